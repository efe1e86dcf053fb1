"""Figures of an evaluation: speedups with their intervals."""

from __future__ import annotations

import math
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba

from labkit.plots.arms import arms
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


def plot_speedup_by_k(points: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Speedup with its interval over k, the prediction beside; `points` is evaluation.by_k."""
    ax = ax or plt.subplots(figsize=(5.5, 3.6))[1]
    intervals(ax, points, "speedup", COLOURS[0], "o", "measured, 95% interval", -0.05)
    intervals(ax, points, "predicted", COLOURS[1], "s", "predicted by the cost model", 0.05)
    ax.axhline(1.0, color="grey", linestyle="--", linewidth=1)
    of_k(ax, points)
    ax.set(title="Speedup by drafted tokens", xlabel="drafted tokens a step (k)", ylabel="speedup (×)")
    if len(points):
        room_for_legend(ax, points)
    return ax


def plot_length_by_k(points: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Acceptance length over k under its ceiling of k + 1; `points` is evaluation.by_k."""
    ax = ax or plt.subplots(figsize=(5.5, 3.6))[1]
    ks = points["k"].to_numpy(float)
    ax.plot(ks, ks + 1, color="grey", linestyle=":", label="everything accepted")
    ax.plot(ks, points["acceptance_length"], "o-", color=COLOURS[2], label="measured")
    for k, length in zip(ks, points["acceptance_length"], strict=True):
        ax.annotate(f"{length:.2f}", (k, length), (0, -14), textcoords="offset points", ha="center")
    of_k(ax, points)
    ax.set_ylim(1, None)
    ax.set(title="Acceptance length by drafted tokens", xlabel="drafted tokens a step (k)")
    ax.set_ylabel("tokens a drafting step, bonus included")
    ax.legend(fontsize="small")
    return ax


def plot_by_streams(
    points: pd.DataFrame, stops_at: float, *, ngram: pd.DataFrame | None = None, ax: Axes | None = None
) -> Axes:
    """Speedup with its interval over streams, prediction and n-gram beside, the crossover marked.

    `points`: evaluation.greedy of the head at one k; `ngram`: of n-gram; `stops_at`: evaluation.crossover's low,
    drawn where it is finite: there is none where it was not reached or cannot be told.
    """
    ax = ax or plt.subplots(figsize=(7, 3.8))[1]
    # The prediction as a broad pale bar behind: at the same number of streams a thin one would hide the other.
    broad = {"elinewidth": 7, "ecolor": to_rgba(COLOURS[1], 0.45), "capsize": 0, "zorder": 1}
    intervals(ax, points, "predicted", COLOURS[1], "s", "predicted by the cost model", x="streams", **broad)
    drawn = [points] if ngram is None or ngram["speedup"].isna().all() else [points, ngram]
    if len(drawn) > 1:
        intervals(ax, ngram, "speedup", COLOURS[3], "^", "n-gram, measured", x="streams")
    intervals(ax, points, "speedup", COLOURS[0], "o", "measured, 95% interval", x="streams", linestyle="-")
    if math.isfinite(stops_at):
        ax.axvline(stops_at, color=COLOURS[5], label=f"no longer a go from {stops_at:.0f} streams on")
    ax.axhline(1.0, color="grey", linestyle="--", linewidth=1)
    of_streams(ax, pd.concat([each["streams"] for each in drawn]))
    ax.set(title="Speedup by requests in flight", xlabel="streams (requests in flight)", ylabel="speedup (×)")
    if len(points):
        room_for_legend(ax, pd.concat(drawn))
    return ax


def plot_by_category(categories: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Speedup of each category with its interval, a bar a variant; rows of evaluation.by_category."""
    ax = ax or plt.subplots(figsize=(8, 3.8))[1]
    names = list(dict.fromkeys(categories["category"]))
    variants = list(categories.groupby(["variant", "k"], sort=False))
    width = 0.8 / max(len(variants), 1)
    for number, ((variant, k), group) in enumerate(variants):
        rows = group.set_index("category").reindex(names)
        at = [i + (number - (len(variants) - 1) / 2) * width for i in range(len(names))]
        ax.bar(at, rows["speedup"], width, color=COLOURS[number % len(COLOURS)], label=f"{variant}, k={k}")
        spread = arms(rows["speedup"], rows["speedup_low"], rows["speedup_high"])
        ax.errorbar(at, rows["speedup"], yerr=spread, fmt="none", color="black", capsize=3, linewidth=1)
    ax.axhline(1.0, color="grey", linestyle="--", linewidth=1)
    ax.set_xticks(range(len(names)), names, rotation=30, ha="right")
    ax.set(title="Speedup by category of prompt", xlabel="category", ylabel="speedup (×)")
    if variants:
        ax.legend(fontsize="small")
    return ax


def room_for_legend(ax: Axes, points: pd.DataFrame) -> None:
    """A legend above all points. The y axis reaches what was measured and predicted, not a wide prediction's end:
    an interval that goes on beyond it says so by running out of the figure."""
    known = points.reindex(columns=["speedup_high", "predicted"]).astype(float)
    ax.set_ylim(0, 1.5 * max(1.0, known.max().max()) if known.notna().any(axis=None) else None)
    ax.legend(fontsize="small", loc="upper left")


def of_k(ax: Axes, points: pd.DataFrame) -> None:
    """Ticks at the k of the points, with room beside a single one."""
    ks = sorted(points["k"].unique())
    ax.set_xticks(ks)
    if ks:
        ax.set_xlim(ks[0] - 0.5, ks[-1] + 0.5)


def of_streams(ax: Axes, streams: pd.Series) -> None:
    """A logarithmic x axis that ends half a doubling beside the numbers of streams, with ticks at those alone."""
    numbers = sorted(map(int, streams.unique()))
    ax.set_xscale("log", base=2)
    ax.set_xticks(numbers, numbers)
    if numbers:
        ax.set_xlim(numbers[0] / 2**0.5, numbers[-1] * 2**0.5)


def intervals(
    ax: Axes,
    points: pd.DataFrame,
    name: str,
    colour: str,
    marker: str,
    label: str,
    shift: float = 0.0,
    *,
    x: str = "k",
    **style: Any,
) -> None:
    """A figure with its _low and _high over `x`; points without a value are left out. `style`: of errorbar."""
    known = points[points[name].notna()] if name in points else points.iloc[:0]
    if known.empty:
        return
    middle = known[name].astype(float)
    apart = arms(middle, known[f"{name}_low"], known[f"{name}_high"])
    plain = {"color": colour, "marker": marker, "linestyle": "none", "capsize": 3, "label": label}
    ax.errorbar(known[x].astype(float) + shift, middle, yerr=apart, **plain | style)
