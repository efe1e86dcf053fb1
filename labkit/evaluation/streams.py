"""From how many requests in flight on a head stops paying, where the measured points can tell."""

from __future__ import annotations

import math

import pandas as pd

from labkit.costmodel import stops_paying
from labkit.evaluation.candidates import EAGLE3

BOUNDS = {"low": "speedup_low", "mid": "speedup", "high": "speedup_high"}


def greedy(table: pd.DataFrame, k: int, variant: str = EAGLE3) -> pd.DataFrame:
    """The greedy rows of `points` (or `by_category`) for one variant and k, by streams."""
    chosen = table[(table["variant"] == variant) & (table["k"] == k) & (table["temperature"] == 0)]
    return chosen.sort_values("streams", kind="stable")


def with_interval(table: pd.DataFrame, k: int) -> pd.DataFrame:
    """The rows of `greedy` whose speedup has an interval."""
    return greedy(table, k).dropna(subset=["speedup_low", "speedup_high"])


def crossover(table: pd.DataFrame, k: int) -> dict[str, float]:
    """From how many streams on speculation stops paying: costmodel.stops_paying over the measured points.

    `low`: the interval reaches 1, so it is no longer a go; `mid`: the median falls below 1; `high`: the whole
    interval lies below. Infinite where that did not happen up to the most streams measured. NaN where it cannot
    be told: nothing stops that did not pay at fewer streams, and one number of streams knows no fewer.
    """
    known = with_interval(table, k)
    found = stops_paying(known) if several(known) else dict.fromkeys(BOUNDS, math.nan)
    paid = {name: (known[column] >= 1).any() for name, column in BOUNDS.items()}
    return {name: at if paid[name] else math.nan for name, at in found.items()}


def crossover_sentence(table: pd.DataFrame, k: int) -> str:
    """`crossover` in words."""
    known = with_interval(table, k)
    if known.empty:
        return "No speedup has an interval, which takes three prompts, so nothing can be said of streams."
    found, most = crossover(table, k), int(known["streams"].max())
    if not several(known):
        load = f"{most} request" + ("s" if most > 1 else "")
        return f"One load was measured, {load} in flight at k={k}: **{known['verdict'].iloc[0]}** there."
    if math.isinf(found["low"]):
        return (
            f"At k={k} the whole interval lies above 1 at every number of streams measured, up to {most}: **go**."
        )
    told = {name: f"from {at:.0f} streams on" for name, at in found.items() if math.isfinite(at)}
    told |= {name: f"not up to {most} streams" for name, at in found.items() if math.isinf(at)}
    if math.isnan(found["low"]):
        words = ", ".join(f"{row.verdict} at {row.streams:.0f}" for row in known.itertuples())
        also = f" The median falls below 1 {told['mid']}." if "mid" in told else ""
        return f"At k={k} **no number of streams measured is a go** ({words}), so there is no crossover.{also}"
    return (
        f"At k={k} the speedup's interval reaches 1 **{told['low']}** (no longer a go), its median "
        f"falls below 1 {told['mid']}, its whole interval (no-go) {told['high']}."
    )


def several(table: pd.DataFrame) -> bool:
    """Whether there are rows of more than one number of streams."""
    return len(set(table["streams"])) > 1
