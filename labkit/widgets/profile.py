"""Notebook 01: the breakdown of chosen ranks and steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
from matplotlib.axes import Axes

from labkit.plots.profile import plot_breakdown
from labkit.widgets.controls import Control, span

if TYPE_CHECKING:
    from labkit.trace import Trace

ALL = "all"


def parts_between(every: pd.DataFrame, rank: int | str, first: int, last: int) -> pd.DataFrame:
    """Mean breakdown of the steps from `first` to `last` of a rank or of all: rank category ms_per_step.

    `every` is Trace.breakdown() of one phase; a step's categories are all in it, so each mean is over all steps.
    """
    mine = every[every["step"].between(first, last)]
    if rank != ALL:
        mine = mine[mine["rank"] == rank]
    found = mine.groupby(["rank", "category"], sort=False)["dur_us"].mean().div(1e3)
    return found.rename("ms_per_step").reset_index()


def breakdown(traces: Trace) -> Control:
    """A control over the decode steps' breakdown: which rank, and from which step to which."""
    every = traces.breakdown()
    every = every[every["phase"] == traces.decode_phase()]

    def draw(rank: int | str, steps: tuple[int, int]) -> Axes:
        axes = plot_breakdown(parts_between(every, rank, *steps))
        axes.set(title=f"Where decode steps {steps[0]} to {steps[1]} go")
        return axes

    ranks = sorted(every["rank"].unique().tolist())
    return Control(draw, {"rank": [ALL, *ranks], "steps": span("steps", every["step"].unique().tolist())})
