"""Figures of expert activation: experts that n tokens touch, reuse, coverage, budgets, verify ratio."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from labkit.plots.arms import arms
from labkit.plots.serving import COLOURS


def plot_unique(df: pd.DataFrame, *, model: str = "", chosen: int | None = None, ax: Axes | None = None) -> Axes:
    """Unique experts a layer by window length, measured with its interval; `df` is experts.unique_by_window.

    A chosen n is marked, its figures are in the legend.
    """
    ax = ax or plt.subplots(figsize=(7, 4))[1]
    row = df[df["n"] == chosen]
    labels = {"uniform": "independent and uniform", "popularity": "independent, by popularity"}
    labels |= {"unique_mean": "measured"}
    for (column, label), colour, style in zip(
        labels.items(), (COLOURS[1], COLOURS[2], COLOURS[0]), ("--", ":", "-o"), strict=True
    ):
        told = "".join(f", n={chosen}: {value:.2f}" for value in row[column])
        ax.plot(df["n"], df[column], style, color=colour, markersize=4, label=label + told)
    if len(row):
        ax.axvline(chosen, color="#888888", linestyle=":", linewidth=1)
    ax.fill_between(df["n"], df["low"], df["high"], color=COLOURS[0], alpha=0.25, linewidth=0)
    ax.set(title=f"Experts that n consecutive tokens touch: {model}", xlabel="tokens verified together (n)")
    ax.set_ylabel("different experts a layer")
    ax.set_ylim(bottom=0)
    ax.legend()
    return ax


def plot_layers(df: pd.DataFrame, *, model: str = "", ax: Axes | None = None) -> Axes:
    """Unique experts by layer, a line a window length; `df` is experts.unique_table."""
    ax = ax or plt.subplots(figsize=(7, 3.5))[1]
    for number, (n, part) in enumerate(df.groupby("n")):
        style = {"marker": "osD^v"[number % 5], "color": COLOURS[number % len(COLOURS)]}
        ax.plot(part["layer"], part["unique_mean"], label=f"{n}", **style)
    ax.set(title=f"Experts touched, by layer: {model}", xlabel="layer", ylabel="different experts")
    ax.set_ylim(bottom=0)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(title="tokens (n)", loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def plot_categories(df: pd.DataFrame, *, model: str = "", ax: Axes | None = None) -> Axes:
    """Unique experts by kind of text with their interval; `df` is experts.unique_by_category of one window."""
    ax = ax or plt.subplots(figsize=(7, 0.8 + 0.45 * len(df)))[1]
    apart = arms(df["unique_mean"], df["low"], df["high"])
    ax.errorbar(
        df["unique_mean"], df["category"], xerr=apart, fmt="o", color=COLOURS[0], capsize=3, label="measured"
    )
    ax.plot(df["popularity"], df["category"], "|", color=COLOURS[2], markersize=12, label="by popularity")
    ax.axvline(df["uniform"].iloc[0], color=COLOURS[1], linestyle="--", label="independent and uniform")
    ax.set(title=f"Experts touched, by kind of text: {model}")
    ax.set_xlabel(f"different experts a layer, {df['n'].iloc[0]} consecutive tokens")
    ax.margins(y=0.15)
    ax.invert_yaxis()
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def draw_each_layer(ax: Axes, df: pd.DataFrame, x: str, share: str) -> None:
    """A thin line a layer, in percent: the spread behind a mean over layers."""
    for number, (_layer, part) in enumerate(df.groupby("layer")):
        label = None if number else "a layer"
        ax.plot(part[x], part[share] * 100, color=COLOURS[4], linewidth=0.8, alpha=0.7, label=label)


def plot_overlap(df: pd.DataFrame, *, model: str = "", ax: Axes | None = None) -> Axes:
    """Share of experts that tokens some distance apart have in common; `df` is experts.overlap_table."""
    ax = ax or plt.subplots(figsize=(7, 3.5))[1]
    draw_each_layer(ax, df, "distance", "overlap")
    mean = df.groupby("distance")[["overlap", "popularity", "uniform"]].mean() * 100
    ax.plot(mean.index, mean["overlap"], color=COLOURS[0], marker="o", markersize=4, label="mean over layers")
    ax.plot(mean.index, mean["popularity"], color=COLOURS[2], linestyle=":", label="chance, by popularity")
    ax.plot(mean.index, mean["uniform"], color=COLOURS[1], linestyle="--", label="chance, equal use")
    ax.set(title=f"Experts in common with an earlier token: {model}", xlabel="tokens apart", ylabel="shared (%)")
    ax.set_xscale("log", base=2)
    ax.set_xticks(mean.index, [str(distance) for distance in mean.index])
    ax.set_ylim(bottom=0)
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def plot_reuse(
    df: pd.DataFrame,
    published: pd.DataFrame,
    *,
    trend: Mapping[int, tuple[float, float, float]] | None = None,
    model: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Reuse factor by window length (experts.unique_by_window) beside experts.published_reuse.

    `trend`, of experts.reuse_trend, is drawn as a band.
    """
    ax = ax or plt.subplots(figsize=(7, 3.8))[1]
    ax.axhline(1.0, color="grey", linestyle="--", linewidth=1)
    if trend:
        lows, middles, highs = zip(*trend.values(), strict=True)
        ax.fill_between(list(trend), lows, highs, color="grey", alpha=0.15, linewidth=0, label="published, trend")
        ax.plot(list(trend), middles, color="grey", linewidth=1)
    known = df.dropna(subset="reuse")
    ax.plot(known["n"], known["reuse"], color=COLOURS[0], marker="o", markersize=4, label=model or "measured")
    for number, (name, part) in enumerate(published.groupby("model", sort=False), start=1):
        style = {"marker": "sD^vP"[number % 5], "color": COLOURS[number % len(COLOURS)]}
        ax.plot(part["n"], part["reuse"], linestyle="none", label=f"published, {name}", **style)
    ax.set(title="How far routing is from independent", xlabel="tokens verified together (n)", ylim=(0, 1.1))
    ax.set_ylabel("reuse factor r (1: independent)")
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def plot_coverage(df: pd.DataFrame, *, model: str = "", ax: Axes | None = None) -> Axes:
    """Share of all assignments that each layer's most used experts hold; `df` is experts.coverage."""
    ax = ax or plt.subplots(figsize=(7, 3.8))[1]
    draw_each_layer(ax, df, "top", "coverage")
    mean = df.groupby("top")[["coverage", "uniform"]].mean()
    ax.plot(
        mean.index, mean["coverage"] * 100, color=COLOURS[0], marker="o", markersize=4, label="mean over layers"
    )
    ax.plot(mean.index, mean["uniform"] * 100, color=COLOURS[1], linestyle="--", label="equal use")
    ax.set(
        title=f"What the most used experts cover: {model}", xlabel="most used experts of a layer", ylim=(0, 102)
    )
    ax.set_ylabel("share of assignments (%)")
    ax.legend()
    return ax


QUALITIES = {
    "perplexity": "perplexity",
    "perplexity_ratio": "perplexity, budget / no budget",
    "greedy_agreement": "greedy tokens as the target's (share)",
    "acceptance_length": "acceptance length of the text (tokens, bonus included)",
    "acceptance_length_target": "acceptance length of the target's tokens (bonus included)",
    "mass_dropped": "router mass of chosen experts dropped (share)",
    "agreement": "chosen experts that stay (share)",
}


def plot_budget(
    df: pd.DataFrame, *, quality: str = "greedy_agreement", model: str = "", ax: Axes | None = None
) -> Axes:
    """Quality against the experts that a step reads, a line a method, points named by their budget B.

    Of budgets that lie on one point the least is named. `df` is experts.live_budget or experts.budget_table;
    quality is one of its columns. A dashed line shows the target without a budget, where `df` holds it.
    """
    ax = ax or plt.subplots(figsize=(7, 4))[1]
    bare = df[df["method"] == "none"]
    for value in bare[quality]:
        ax.axhline(value, color="grey", linestyle="--", linewidth=1, label="no budget")
    ax.plot(bare["unique_budget"], bare[quality], color="grey", marker="*", markersize=10, linestyle="none")
    limited = df[df["method"] != "none"]
    for number, (method, part) in enumerate(limited.groupby("method", sort=False)):
        part = part.sort_values(["unique_budget", "budget"])
        style = {"color": COLOURS[number % len(COLOURS)], "marker": "osD^"[number % 4], "markersize": 5}
        ax.plot(part["unique_budget"], part[quality], label=method, **style)
        named = part.drop_duplicates("unique_budget")  # budgets that do not bind lie on one point
        for x, y, budget in zip(named["unique_budget"], named[quality], named["budget"], strict=True):
            where, side = ((6, -9), "left") if number == 0 else ((-6, 4), "right")
            ax.annotate(f"B={budget}", (x, y), textcoords="offset points", xytext=where, ha=side, fontsize=7)
    tokens = ", ".join(str(n) for n in sorted(df["n"].unique()))
    ax.set(
        title=f"Expert budgets are lossy: {model}", xlabel=f"experts a layer that a step of {tokens} tokens reads"
    )
    ax.set_ylabel(QUALITIES.get(quality, quality))
    ax.margins(x=0.1)
    ax.legend()
    return ax


def plot_verify(df: pd.DataFrame, *, model: str = "", ax: Axes | None = None) -> Axes:
    """Verify ratio by tokens with its interval, a line a case; `df` is StepModel.table with a column case."""
    ax = ax or plt.subplots(figsize=(7, 4))[1]
    for number, (case, part) in enumerate(df.groupby("case", sort=False)):
        colour = COLOURS[number % len(COLOURS)]
        ax.plot(part["n"], part["verify_ratio"], color=colour, marker="osD^"[number % 4], markersize=4, label=case)
        low, high = part["verify_ratio_low"], part["verify_ratio_high"]
        ax.fill_between(part["n"], low, high, color=colour, alpha=0.15, linewidth=0)
    ax.set(title=f"Cost of verifying, predicted: {model}", xlabel="tokens verified together (n)")
    ax.set_ylabel("step time, n tokens / one token")
    ax.legend(title="routing")
    return ax
