"""Notebook 02: the simulated n-gram grid by category, with one setting marked."""

from __future__ import annotations

import functools

import pandas as pd
from matplotlib.axes import Axes

from labkit import prediction
from labkit.plots.serving import plot_lookup_grid
from labkit.widgets.controls import Control

ALL = "all prompts"
FIGURES = {"tokens a step": "tokens_per_step", "predicted speedup": "predicted"}


def lookup(
    grid: pd.DataFrame,
    baseline: pd.DataFrame,
    times: pd.DataFrame,
    sync: pd.DataFrame,
    *,
    k: int,
    lookup_max: int,
    lookup_min: int,
) -> Control:
    """A control over the grid: what it shows, of which category, k and lookup.

    `grid` is prediction.grid of all `baseline` rows; a category's grid is simulated when it is first chosen.
    """

    @functools.cache
    def grid_of(category: str) -> pd.DataFrame:
        if category == ALL:
            return grid
        rows = baseline[baseline["category"] == category]
        return prediction.grid(rows, times, sync, k=k, lookup_max=lookup_max)

    def draw(show: str, category: str, k: int, lookup_max: int, lookup_min: int) -> Axes:
        chosen = (lookup_max, min(lookup_min, lookup_max))
        axes = plot_lookup_grid(grid_of(category), k, FIGURES[show], chosen=chosen)
        axes.set(title=f"{axes.get_title()}\n{category}")
        return axes

    choices = {"show": list(FIGURES), "category": [ALL, *sorted(baseline["category"].unique())]}
    for name, own in {"k": k, "lookup_max": lookup_max, "lookup_min": lookup_min}.items():
        choices[name] = [own, *grid[name].unique().tolist()]
    return Control(draw, choices)
