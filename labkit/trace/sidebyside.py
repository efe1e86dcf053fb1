"""Two traces side by side: what changed, per kind of work."""

from __future__ import annotations

import pandas as pd

from labkit.trace.model import Trace
from labkit.trace.predict import counts


def compare(before: Trace, after: Trace, *, window: str = "step") -> pd.DataFrame:
    """Mean over ranks of each category's time a decode step: category before_ms after_ms change_ms change_share.

    change_share is the part of the whole change that the category accounts for; the last row is the step itself,
    and the categories' changes add up to its change.
    """
    sides = [
        trace.parts(window=window).groupby("category", sort=False)["ms_per_step"].mean().rename(name)
        for name, trace in (("before_ms", before), ("after_ms", after))
    ]
    frame = pd.concat(sides, axis=1).fillna(0.0)
    frame.loc["decode step"] = frame.sum()
    frame["change_ms"] = frame["after_ms"] - frame["before_ms"]
    whole = frame.loc["decode step", "change_ms"]
    frame["change_share"] = frame["change_ms"] / whole if whole else 0.0
    return frame.rename_axis("category").reset_index()


def compare_counts(before: Trace, after: Trace) -> pd.DataFrame:
    """Collectives a decode step in both traces (median over ranks): collective before after."""
    sides = [
        counts(trace).groupby("collective")["calls_per_step"].median().rename(name)
        for name, trace in (("before", before), ("after", after))
    ]
    return pd.concat(sides, axis=1).fillna(0.0).rename_axis("collective").reset_index()
