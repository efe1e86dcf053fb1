"""Figures of an evaluation: speedups with their intervals."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from labkit.plots.serving import COLOURS


def plot_speedups(speedups: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Median speedup and 95% interval, a line a variant and set of prompts; `speedups` is evaluation.speedups."""
    ax = ax or plt.subplots(figsize=(7, 0.6 * len(speedups) + 1.6))[1]
    names = [f"{line.variant}, {line.prompts_set} prompts" for line in speedups.itertuples()]
    for number, line in enumerate(speedups.itertuples()):
        colour = COLOURS[number % len(COLOURS)]
        ax.plot([line.speedup_low, line.speedup_high], [number, number], color=colour, linewidth=3)
        ax.plot(line.speedup, number, "o", color=colour, markersize=9)
        ax.annotate(
            f"{line.speedup:.2f}×", (line.speedup, number), (0, 9), textcoords="offset points", ha="center"
        )
    ax.axvline(1.0, color="grey", linestyle="--", linewidth=1)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(-0.6, max(len(names) - 0.3, 0.6))
    ax.set(title="Speedup over no speculation, paired by prompt", xlabel="decode rate, variant / baseline")
    return ax
