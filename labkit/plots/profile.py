"""Figures of a profile: where a decode step goes, on all ranks, and who waits."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

# Okabe and Ito's palette; kinds of AllReduce share a colour and differ by hatching.
STYLE: dict[str, tuple[str, str]] = {
    "GEMM": ("#0072B2", ""),
    "attention": ("#56B4E9", ""),
    "MoE": ("#009E73", ""),
    "norm and elementwise": ("#CC79A7", ""),
    "sampling": ("#F0E442", ""),
    "memory copy": ("#666666", ""),
    "framework overhead": ("#CCCCCC", ".."),
    "AllReduce transfer": ("#D55E00", ""),
    "AllReduce wait": ("#D55E00", "///"),
    "AllReduce, wait not told apart": ("#D55E00", "xxx"),
    "other communication": ("#E69F00", ""),
    "unclassified": ("#000000", ""),
    "idle": ("#FFFFFF", ""),
}
BELOW = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 5, "fontsize": 8, "frameon": False}
RANKS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#666666", "#000000")


def plot_breakdown(parts: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """A bar a rank, stacked by category; `parts` is Trace.parts(): rank category ms_per_step."""
    ranks = sorted(parts["rank"].unique())
    ax = ax or plt.subplots(figsize=(9, 0.7 * len(ranks) + 2.2))[1]
    table = parts.pivot_table(index="rank", columns="category", values="ms_per_step", aggfunc="sum")
    left = pd.Series(0.0, index=table.index)
    for category, (colour, hatch) in STYLE.items():
        if category in table and table[category].max() > 0:
            label = f"{category} ({table[category].mean():.2f} ms)"
            at = range(len(ranks))
            ax.barh(at, table[category], left=left, color=colour, hatch=hatch, edgecolor="#555555", label=label)
            left = left + table[category]
    ax.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    ax.invert_yaxis()
    ax.set(title="Where a decode step goes", xlabel="time a step (ms)", ylabel="rank")
    ax.legend(**BELOW, ncols=3)
    return ax


def plot_timeline(timeline: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """One decode step on all ranks; `timeline` is Trace.timeline(): rank category start_us dur_us."""
    ranks = sorted(timeline["rank"].unique())
    ax = ax or plt.subplots(figsize=(11, 0.7 * len(ranks) + 1.8))[1]
    for row, rank in enumerate(ranks):
        mine = timeline[timeline["rank"] == rank]
        for category, stretch in mine.groupby("category"):
            colour, hatch = STYLE[str(category)]
            spans = list(zip(stretch["start_us"] / 1e3, stretch["dur_us"] / 1e3, strict=True))
            label = str(category) if row == 0 else None
            ax.broken_barh(spans, (row - 0.4, 0.8), facecolors=colour, hatch=hatch, linewidth=0, label=label)
    ax.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    ax.invert_yaxis()
    step = int(timeline["step"].iloc[0])
    ax.set(title=f"Decode step {step} on all ranks", xlabel="time since its start (ms)", ylabel="rank")
    ax.legend(**BELOW, ncols=4)
    return ax


def plot_waits(waits: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Mean wait at each AllReduce of a step, a line a rank; `waits` is Trace.waits(): rank call wait_us...

    The grey line is the transfer, the same on every rank.
    """
    ax = ax or plt.subplots(figsize=(10, 3.2))[1]
    for number, (rank, mine) in enumerate(waits.groupby("rank")):
        ax.plot(mine["call"], mine["wait_us"], color=RANKS[number % len(RANKS)], label=f"rank {rank} waits")
    first = waits[waits["rank"] == waits["rank"].min()]
    ax.plot(first["call"], first["transfer_us"], color="#999999", linestyle="--", label="transfer")
    ax.set_yscale("symlog", linthresh=1.0)  # a rank that comes last does not wait at all
    ax.set_ylim(bottom=0)
    ax.set(title="Who waits, and where", xlabel="AllReduce of the step (0 is the embedding's)", ylabel="mean (µs)")
    ax.legend(fontsize=8)
    return ax


def plot_what_if(cases: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Time a token in each case; `cases` is trace.what_if(): case tpot_ms speedup."""
    ax = ax or plt.subplots(figsize=(8, 0.45 * len(cases) + 1.4))[1]
    ax.barh(cases["case"], cases["tpot_ms"], color=["#0072B2", *["#56B4E9"] * (len(cases) - 1)])
    for row, line in enumerate(cases.itertuples()):
        ax.annotate(f"{line.tpot_ms:.2f} ms  {line.speedup:.2f}×", (line.tpot_ms, row), (-4, 0),
                    textcoords="offset points", va="center", ha="right", color="white" if row == 0 else "black",
                    fontsize=8)  # fmt: skip
    ax.invert_yaxis()
    ax.set(title="What if AllReduce cost less", xlabel="time a token (ms)", ylabel="")
    return ax
