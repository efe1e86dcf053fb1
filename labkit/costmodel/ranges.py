"""A figure with its uncertainty: a low, a middle and a high value."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from labkit.errors import LabError


class BadRange(LabError):
    """What was given is no figure, or its low, middle and high value are not in order."""


@dataclass(frozen=True)
class Range:
    """low <= mid <= high; a figure known exactly has all three the same."""

    low: float
    mid: float
    high: float

    def __post_init__(self) -> None:
        """Check the order; raises BadRange."""
        if not self.low <= self.mid <= self.high:
            raise BadRange(f"a range of {self.low} to {self.high} around {self.mid}", "give low <= mid <= high")

    @classmethod
    def of(cls, value: Any) -> Range:
        """A range from a number, three numbers, or an object with mid and perhaps low and high.

        Raises BadRange.
        """
        if isinstance(value, Range):
            return value
        try:
            if isinstance(value, Mapping):
                value = (value.get("low", value["mid"]), value["mid"], value.get("high", value["mid"]))
            elif isinstance(value, numbers.Real):
                value = (value, value, value)
            low, mid, high = (float(v) for v in value)
        except (TypeError, ValueError, KeyError) as error:
            told = "give a number, three of them, or an object with mid and perhaps low and high"
            raise BadRange(f"{value!r} is no figure", told) from error
        return cls(low, mid, high)

    @classmethod
    def over(cls, values: np.ndarray) -> Range:
        """From a figure in the middle (the first) and in every corner."""
        return cls(float(values.min()), float(values[0]), float(values.max()))

    def __iter__(self) -> Iterator[float]:
        """Low, mid, high, as a tuple unpacks."""
        return iter(astuple(self))

    @property
    def exact(self) -> bool:
        """Whether nothing is uncertain."""
        return self.low == self.high

    def told(self, digits: int = 2) -> str:
        """As text: the middle, and the interval where there is one."""
        middle = f"{self.mid:.{digits}f}"
        return middle if self.exact else f"{middle} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def corners(figures: Mapping[str, Range]) -> dict[str, np.ndarray]:
    """Each figure as an array: all in the middle first, then every combination of the uncertain ones' extremes."""
    uncertain = [name for name, value in figures.items() if not value.exact]
    count = 1 + (2 ** len(uncertain) if uncertain else 0)
    found = {name: np.full(count, float(value.mid)) for name, value in figures.items()}
    if uncertain:
        ends = itertools.product(*([figures[name].low, figures[name].high] for name in uncertain))
        for name, column in zip(uncertain, zip(*ends, strict=True), strict=True):
            found[name][1:] = column
    return found


def one_by_one(figures: Mapping[str, Range]) -> dict[str, np.ndarray]:
    """As `corners`, but with one figure at an extreme at a time: middle, then low and high of each in turn."""
    count = 1 + 2 * len(figures)
    found = {name: np.full(count, float(value.mid)) for name, value in figures.items()}
    for position, (name, value) in enumerate(figures.items()):
        found[name][1 + 2 * position : 3 + 2 * position] = value.low, value.high
    return found
