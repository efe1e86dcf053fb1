"""Fixes of communication: the gain that was predicted and the gain that was measured."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from labkit.plots.arms import arms

PREDICTED, MEASURED = "#56B4E9", "#D55E00"


def plot_fixes(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Speedup of each fix over the base; `table` is fixes.compared(). Bars predicted, points measured with 95%."""
    ax = ax or plt.subplots(figsize=(8, 0.55 * len(table) + 1.6))[1]
    rows = table.reset_index(drop=True)
    known = rows[rows["because"] != ""].dropna(subset=["speedup_low"])  # the base predicts nothing
    ax.hlines(known.index, known["speedup_low"], known["speedup_high"], color=PREDICTED, linewidth=14)
    ax.plot(known["speedup_low"], known.index, "|", color=PREDICTED, markersize=14)
    ax.plot([], [], color=PREDICTED, linewidth=8, label="predicted")
    done = rows.dropna(subset=["measured_speedup"])
    middle = done["measured_speedup"]
    apart = arms(middle, done["measured_low"], done["measured_high"])
    ax.errorbar(middle, done.index, xerr=apart, fmt="o", color=MEASURED, capsize=3, label="measured [95%]")
    ax.axvline(1.0, color="#888888", linewidth=1)
    ax.set_yticks(rows.index, rows["fix"])
    for row in rows.index.difference(done.index):
        ax.annotate("not measured", (1.0, row), (6, 10), textcoords="offset points", fontsize=8, color="#666666")
    ax.margins(x=0.1)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set(title="Cheaper fixes: tokens a second against the base", xlabel="speedup over the base (×)", ylabel="")
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return ax
