"""Notebook 05: a sweep over k, streams and temperature, prediction beside measurement."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes

from labkit.plots.sweep import plot_sweep
from labkit.widgets.controls import Control

FIGURES = {"speedup": "speedup", "acceptance length": "acceptance_length"}
ALL = "all prompts"
KNOBS = ("category", "streams", "temperature")


def sweep(points: pd.DataFrame, categories: pd.DataFrame | None = None, *, k: int | None = None) -> Control:
    """A control over a sweep: speedup or acceptance length by k of each variant, of one category and load.

    Both are tidy: variant k streams temperature acceptance_length speedup speedup_low speedup_high and the speedup
    that was predicted (predicted_speedup, or predicted). `points` is over all prompts, or has a column category;
    `categories` has one. Rows without any figure, as a baseline's, are left out. The marked k starts at `k`, else
    at the first. A knob of one value is left out.
    """
    table = joined(points, categories)
    if table.empty:
        return Control(lambda: "Nothing was measured.")

    def draw(show: str, k: int, **where: float | str) -> Axes:
        mine = table
        for name, value in where.items():
            mine = mine[mine[name] == value]
        told = ", ".join(value if name == "category" else f"{name} {value:g}" for name, value in where.items())
        return plot_sweep(mine, FIGURES[show], chosen=k, where=told)

    ks = sorted(table["k"].unique().tolist())
    choices = {"show": list(FIGURES), "k": [k, *ks] if k in ks else ks}
    values = {name: table[name].unique().tolist() for name in KNOBS}
    return Control(draw, choices | {name: found for name, found in values.items() if len(found) > 1})


def joined(points: pd.DataFrame, categories: pd.DataFrame | None) -> pd.DataFrame:
    """One table of both, that over all prompts first."""
    if "category" not in points:
        points = points.assign(category=ALL)
    table = points if categories is None else pd.concat([points, categories], ignore_index=True)
    table = table if "predicted_speedup" in table else table.rename(columns={"predicted": "predicted_speedup"})
    if "predicted_speedup" not in table:
        table = table.assign(predicted_speedup=math.nan)
    return table.dropna(subset=[*FIGURES.values()], how="all")
