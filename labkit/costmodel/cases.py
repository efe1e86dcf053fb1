"""The same step under several assumptions about routing, side by side."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from labkit.costmodel.hardware import Hardware
from labkit.costmodel.step import StepModel
from labkit.targets import Geometry

INDEPENDENT = "independent (r=1)"
PAIRWISE = "every pair read"


def cases(geometry: Geometry | str, hardware: Hardware | str, reuse: Mapping[str, Any]) -> dict[str, StepModel]:
    """Step models by case: independent routing, each given reuse, and the kernel that reads every pair."""
    models = {INDEPENDENT: StepModel(geometry, hardware)}
    models |= {case: StepModel(geometry, hardware, reuse=value) for case, value in reuse.items()}
    return models | {PAIRWISE: StepModel(geometry, hardware, loading="pairwise")}


def compare(models: Mapping[str, StepModel], ns: Iterable[int] = range(1, 9)) -> pd.DataFrame:
    """StepModel.table of several cases under each other; case comes first."""
    lengths, frames = list(ns), []
    for case, model in models.items():
        frames.append(model.table(lengths))
        frames[-1].insert(0, "case", case)
    return pd.concat(frames, ignore_index=True)


def break_even_table(models: Mapping[str, StepModel], ks: Iterable[int] = (1, 2, 3, 5)) -> pd.DataFrame:
    """A row a case and k: the acceptance length (bonus token included) that breaks even, with low and high."""
    rows = []
    for (case, model), k in itertools.product(models.items(), sorted(set(ks))):
        low, mid, high = model.break_even(k)
        row = {"case": case, "num_speculative_tokens": k, "acceptance_length": mid}
        rows.append(row | {"acceptance_length_low": low, "acceptance_length_high": high})
    return pd.DataFrame(rows)


def one_token(model: StepModel) -> str:
    """A sentence on what a step of one token reads and how long each part takes."""
    terms = model.terms(1)
    reading = sum(terms.values()) - terms["AllReduce"] - terms["other"]
    residual = " (what the measured step leaves over: a residual, not a prediction)" if model.measured else ""
    return (
        f"{sum(model.gigabytes(1).values()):.2f} GB a rank with {model.context_tokens} tokens of cache: a step of "
        f"{sum(terms.values()):.1f} ms, of which reading {reading:.1f} ms, {model.allreduces} AllReduces "
        f"{terms['AllReduce']:.1f} ms, everything else {terms['other']:.1f} ms{residual}."
    )


def needed(model: StepModel, k: int) -> str:
    """The acceptance length that breaks even, with its interval, as text."""
    low, mid, high = model.break_even(k)
    return f"{mid:.2f} [{low:.2f}, {high:.2f}]"
