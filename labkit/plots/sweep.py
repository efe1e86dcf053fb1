"""Figures of a sweep over the length of drafts."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from labkit.plots.serving import COLOURS

LABELS = {"speedup": "speedup over no speculation (×)", "acceptance_length": "acceptance length (tokens a step)"}


def plot_sweep(
    df: pd.DataFrame, value: str = "speedup", *, chosen: int | None = None, where: str = "", ax: Axes | None = None
) -> Axes:
    """Speedup with its interval, or acceptance length, by k: a line a variant, the predicted speedup dashed.

    `df` has a row a variant and k: variant k acceptance_length speedup speedup_low speedup_high predicted_speedup;
    `chosen` marks a k and puts its figures into the legend.
    """
    ax = ax or plt.subplots(figsize=(8, 4))[1]
    for number, (variant, part) in enumerate(df.groupby("variant", sort=False)):
        part, colour = part.sort_values("k"), COLOURS[number % len(COLOURS)]
        told = "".join(
            f" (k={row.k}: {getattr(row, value):.2f})" for row in part[part["k"] == chosen].itertuples()
        )
        ax.plot(part["k"], part[value], color=colour, marker="osD^"[number % 4], label=f"{variant}{told}")
        if value == "speedup":
            low, high = part["speedup_low"], part["speedup_high"]
            ax.fill_between(part["k"], low, high, color=colour, alpha=0.15, linewidth=0)
            foreseen = part.dropna(subset="predicted_speedup")
            if len(foreseen):
                ax.plot(
                    foreseen["k"],
                    foreseen["predicted_speedup"],
                    "x--",
                    color=colour,
                    label=f"{variant}, predicted",
                )
    if df.empty:
        ax.text(0.5, 0.5, "not measured", ha="center", va="center", transform=ax.transAxes)
        ax.set(title=f"By drafted tokens: {where}", xticks=[], yticks=[])
        return ax
    if chosen is not None:
        ax.axvline(chosen, color="#888888", linestyle=":", linewidth=1)
    ax.axhline(1.0, color="grey", linestyle="--", linewidth=1)
    ax.set(
        title=f"By drafted tokens: {where}" if where else "By drafted tokens", xlabel="drafted tokens a step (k)"
    )
    ax.set_ylabel(LABELS[value])
    ax.set_ylim(bottom=0)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return ax
