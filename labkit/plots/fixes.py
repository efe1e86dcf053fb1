"""Fixes of communication: the gain that was predicted and the gain that was measured."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

PREDICTED, MEASURED = "#56B4E9", "#D55E00"


def plot_fixes(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Speedup of each fix over the base; `table` is fixes.compared(). Bars predicted, points measured with 95%."""
    ax = ax or plt.subplots(figsize=(8, 0.55 * len(table) + 1.6))[1]
    rows = table.reset_index(drop=True)
    known = rows.dropna(subset=["speedup_low"])
    width = (known["speedup_high"] - known["speedup_low"]).clip(lower=0.01)
    ax.barh(known.index, width, left=known["speedup_low"], height=0.5, color=PREDICTED, label="predicted")
    done = rows.dropna(subset=["measured_speedup"])
    middle = done["measured_speedup"]
    apart = [(middle - done["measured_low"]).fillna(0), (done["measured_high"] - middle).fillna(0)]
    ax.errorbar(middle, done.index, xerr=apart, fmt="o", color=MEASURED, capsize=3, label="measured [95%]")
    ax.axvline(1.0, color="#888888", linewidth=1)
    ax.set_yticks(rows.index, rows["fix"])
    ax.invert_yaxis()
    ax.set(title="Cheaper fixes: tokens a second against the base", xlabel="speedup over the base (×)", ylabel="")
    ax.legend(fontsize=8, loc="best")
    return ax
