"""Figures of the cost model: speedup by k, verify ratio by tokens, throughput and speedup by streams."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit.plots.arms import arms
from labkit.plots.experts import plot_verify
from labkit.plots.serving import COLOURS

__all__ = ["plot_concurrency", "plot_measured_steps", "plot_regimes", "plot_speedup", "plot_verify"]


def plot_speedup(df: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Predicted speedup by drafted tokens with its interval, a line a case; `df` is costmodel.what_if or speedups.

    A chosen k is marked.
    """
    ax = ax or plt.subplots(figsize=(7, 4))[1]
    cases = df.groupby("case", sort=False) if "case" in df else [("", df)]
    for number, (case, part) in enumerate(cases):
        colour = COLOURS[number % len(COLOURS)]
        k = part["num_speculative_tokens"]
        ax.plot(
            k, part["speedup"], color=colour, marker="osD^"[number % 4], markersize=4, label=case or "predicted"
        )
        ax.fill_between(k, part["speedup_low"], part["speedup_high"], color=colour, alpha=0.15, linewidth=0)
        if "chosen" in part:
            mine = part[part["chosen"]]
            ax.plot(
                mine["num_speculative_tokens"], mine["speedup"], "o", color=colour, markersize=10, fillstyle="none"
            )
    ax.axhline(1.0, color="grey", linestyle="--", linewidth=1)
    ax.set(title="What speculation is predicted to bring", xlabel="drafted tokens a step (k)")
    ax.set_ylabel("speedup over no speculation (×)")
    ax.set_ylim(bottom=0)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(fontsize="small")
    return ax


def plot_concurrency(df: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Predicted speedup by streams with its interval; `df` is costmodel.concurrency.

    A column speedup_published (costmodel.scenario.streams_table) is drawn as points.
    """
    ax = ax or plt.subplots(figsize=(7, 4))[1]
    ax.plot(df["streams"], df["speedup"], color=COLOURS[0], marker="o", markersize=4, label="predicted")
    ax.fill_between(
        df["streams"], df["speedup_low"], df["speedup_high"], color=COLOURS[0], alpha=0.15, linewidth=0
    )
    if "speedup_published" in df:
        ax.plot(df["streams"], df["speedup_published"], "D", color=COLOURS[1], label="published")
    ax.axhline(1.0, color="grey", linestyle="--", linewidth=1)
    ax.set_xscale("log", base=2)
    ax.set_xticks(df["streams"], [f"{n:g}" for n in df["streams"]])
    ax.set(title="Speculation by number of streams", xlabel="requests side by side")
    ax.set_ylabel("speedup over no speculation (×)")
    ax.set_ylim(bottom=0)
    ax.legend(fontsize="small")
    return ax


def plot_regimes(df: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """t(n) measured (points, extremes) and predicted (lines), shared and varied routing: costmodel.beside."""
    ax = ax or plt.subplots(figsize=(5.5, 3.6))[1]
    for (kind, group), colour, mark in zip(
        df.groupby("kind", sort=False), (COLOURS[0], COLOURS[5]), "os", strict=False
    ):
        group = group.sort_values("n")
        apart = arms(group["measured_ms"], group["low_ms"], group["high_ms"])
        ax.errorbar(
            group["n"], group["measured_ms"], yerr=apart, fmt=mark, color=colour, ms=4, label=f"{kind}: measured"
        )
        ax.plot(group["n"], group["predicted_ms"], color=colour, label=f"{kind}: predicted")
    pairs = df.loc[df["regime"] == "pairwise", "n"]
    if len(pairs):
        ax.axvspan(df["n"].min(), pairs.max() + 0.5, color="#888888", alpha=0.15, label="read pair by pair")
    ax.set(xlabel="tokens a step (n)", ylabel="step (ms)", title="What verifying n tokens costs")
    ax.set_ylim(bottom=0)
    ax.legend(fontsize="x-small", framealpha=0.6)
    return ax


def plot_measured_steps(df: pd.DataFrame) -> Figure:
    """`plot_regimes` of each model and kind of weights; `df` is costmodel.measured_steps."""
    groups = list(df.groupby(["model", "weights"], sort=False))
    figure, axes = plt.subplots(1, len(groups), figsize=(5 * len(groups), 3.8), squeeze=False)
    for ((model, weights), group), ax in zip(groups, axes[0], strict=True):
        plot_regimes(group, ax=ax).set(title=f"{model}, {weights}: {group['layers'].iloc[0]} layers, one H200")
    figure.tight_layout()
    return figure
