"""Notebook 03: experts that n tokens touch, of one layer or of all."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from labkit.plots.experts import plot_unique
from labkit.widgets.controls import Control

MEAN = "mean"


def activation(by_window: pd.DataFrame, by_layer: pd.DataFrame, n: int) -> Control:
    """A control over unique experts: which layer, and an n that is marked with its figures.

    `by_window` is experts.unique_by_window, `by_layer` experts.unique_table; `n` is where it starts.
    """
    name = by_window["model"].iloc[0]

    def draw(layer: int | str, n: int) -> Axes:
        shown = by_window if layer == MEAN else by_layer[by_layer["layer"] == layer]
        where = "mean over layers" if layer == MEAN else f"layer {layer}"
        return plot_unique(shown, model=f"{name}, {where}", chosen=n)

    lengths = by_window["n"].tolist()
    start = n if n in lengths else lengths[-1]
    return Control(draw, {"layer": [MEAN, *by_layer["layer"].unique().tolist()], "n": [start, *lengths]})
