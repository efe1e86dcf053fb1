"""A figure with its uncertainty: a low, a middle and a high value."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from labkit.errors import LabError

Corner = Mapping[str, str]  # an input's name: which of its three values


class BadRange(LabError):
    """A figure's low, middle and high value are not in order."""


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
        """A range from a number, three numbers, or an object with mid and perhaps low and high."""
        if isinstance(value, Range):
            return value
        if isinstance(value, Mapping):
            return cls(value.get("low", value["mid"]), value["mid"], value.get("high", value["mid"]))
        if isinstance(value, (int, float)):
            return cls(float(value), float(value), float(value))
        return cls(*(float(v) for v in value))

    def __iter__(self) -> Iterator[float]:
        """Low, mid, high, as a tuple unpacks."""
        return iter(astuple(self))

    def at(self, which: str) -> float:
        """The value called low, mid or high."""
        return getattr(self, which)

    @property
    def exact(self) -> bool:
        """Whether nothing is uncertain."""
        return self.low == self.high


def corners(inputs: Mapping[str, Range]) -> Iterable[Corner]:
    """Every combination of the extreme values of the uncertain inputs; exact ones stay in the middle."""
    uncertain = [name for name, value in inputs.items() if not value.exact]
    for choice in itertools.product(("low", "high"), repeat=len(uncertain)):
        yield dict.fromkeys(inputs, "mid") | dict(zip(uncertain, choice, strict=True))
