"""Notebook 05: a sweep over k, streams and temperature, prediction beside measurement."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from labkit.plots.sweep import plot_sweep
from labkit.widgets.controls import Control

FIGURES = {"speedup": "speedup", "acceptance length": "acceptance_length"}
KNOBS = ("category", "streams", "temperature")


def sweep(table: pd.DataFrame, k: int | None = None) -> Control:
    """A control over a sweep: speedup or acceptance length by k of each variant, of one category and load.

    `table` is tidy: variant k streams temperature category acceptance_length speedup speedup_low speedup_high
    predicted_speedup. `k` is where the marked k starts; without it, the first. A knob of one value is left out.
    """

    def draw(show: str, k: int, **where: float | str) -> Axes:
        mine = table
        for name, value in where.items():
            mine = mine[mine[name] == value]
        told = ", ".join(value if name == "category" else f"{name} {value:g}" for name, value in where.items())
        return plot_sweep(mine, FIGURES[show], chosen=k, where=told)

    ks = sorted(table["k"].unique().tolist())
    choices = {"show": list(FIGURES), "k": [k if k in ks else ks[0], *ks]}
    values = {name: table[name].unique().tolist() for name in KNOBS}
    return Control(draw, choices | {name: found for name, found in values.items() if len(found) > 1})
