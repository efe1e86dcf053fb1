"""Collectives by message size."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

COLOURS = {"AllReduce": "#0072B2", "AllGather": "#E69F00", "ReduceScatter": "#009E73", "AllToAll": "#CC79A7"}
LINES = {"graph": "-", "eager": "--"}


def plot_links(
    table: pd.DataFrame,
    fits: pd.DataFrame,
    *,
    decode_bytes: int,
    transfer_us: float = np.nan,
    ax: Axes | None = None,
) -> Axes:
    """Time by message size: medians with quartiles, fitted AllReduce; the decode message and the trace's transfer.

    `table` is collectives.summary(), `fits` collectives.fits(); dashed is launched call by call, solid as a graph.
    """
    ax = ax or plt.subplots(figsize=(8, 4.2))[1]
    ax.set(title="Collectives by message size", xlabel="message of a rank (bytes)", ylabel="time of a call (µs)")
    if table.empty:
        ax.text(0.5, 0.5, "not measured", ha="center", va="center", transform=ax.transAxes)
        return ax
    for (kind, mode), mine in table.groupby(["collective", "mode"], sort=False):
        rows = mine.sort_values("bytes")
        ax.plot(
            rows["bytes"], rows["median_us"], LINES[mode], color=COLOURS[kind], marker=".", label=f"{kind}, {mode}"
        )
        ax.fill_between(rows["bytes"], rows["q25_us"], rows["q75_us"], color=COLOURS[kind], alpha=0.2, linewidth=0)
    for row in fits[fits["collective"] == "AllReduce"].itertuples():
        sizes = np.geomspace(table["bytes"].min(), table["bytes"].max(), 100)
        times = row.latency_us + sizes / row.bandwidth_gb_s / 1e3
        ax.plot(sizes, times, ":", color="#555555", linewidth=1.2, label=f"AllReduce fitted, {row.mode}")
    ax.axvline(decode_bytes, color="#D55E00", linewidth=1, label="message of one token")
    if np.isfinite(transfer_us) and transfer_us > 0:
        ax.plot([decode_bytes], [transfer_us], "*", color="#D55E00", markersize=13, label="transfer in the trace")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return ax
