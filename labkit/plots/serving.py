"""Figures of serving: rates by category, where tokens go, acceptance by position, paired ratios, lookup grid."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from labkit.plots.arms import arms

ASIDE = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "frameon": False}  # a legend that covers nothing
# Okabe and Ito's palette: tellable apart with every kind of colour vision.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


def plot_rates(summary: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Decode rate by category, a bar a variant; `summary` is bench.summary by variant and category."""
    ax = ax or plt.subplots(figsize=(8, 3.5))[1]
    table = summary.pivot_table(index="category", columns="variant", values="tok_s")
    positions, width = np.arange(len(table)), 0.8 / max(table.shape[1], 1)
    for number, variant in enumerate(summary["variant"].unique()):
        offset = (number - (table.shape[1] - 1) / 2) * width
        ax.bar(positions + offset, table[variant], width, color=COLOURS[number], label=variant)
    ax.set_xticks(positions, table.index, rotation=30, ha="right")
    ax.set(title="Decode rate by category", xlabel="category", ylabel="decode rate (tok/s)")
    ax.legend(title="variant", **ASIDE)
    return ax


def plot_tokens(summary: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Mean reasoning and answer tokens of a request, stacked, a bar a category of one variant's summary."""
    ax = ax or plt.subplots(figsize=(8, 3))[1]
    names, reasoning, answer = (summary[c].to_numpy() for c in ("category", "tokens_reasoning", "tokens_answer"))
    ax.bar(names, reasoning, color=COLOURS[3], hatch="//", label="reasoning")
    ax.bar(names, answer, bottom=reasoning, color=COLOURS[0], label="answer")
    ax.tick_params(axis="x", rotation=30)
    ax.set(title="Where the tokens go", xlabel="category", ylabel="tokens a request (mean)")
    ax.legend(**ASIDE)
    return ax


def plot_acceptance(positions: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Unconditional rate by draft position, a bar a source; `positions` is acceptance.positions."""
    ax = ax or plt.subplots(figsize=(7, 3.5))[1]
    sources = list(positions.groupby("source", sort=False)) if len(positions) else []
    width = 0.8 / max(len(sources), 1)
    for number, (source, group) in enumerate(sources):
        offset = (number - (len(sources) - 1) / 2) * width
        colour = COLOURS[number % len(COLOURS)]
        ax.bar(group["position"] + offset, group["unconditional_rate"], width, color=colour, label=source)
    ax.set(title="Acceptance by draft position", xlabel="position in the draft", ylabel="share of all drafts")
    ax.set_ylim(0, 1)
    if sources:
        ax.set_xticks(sorted(positions["position"].unique()))
        ax.legend(fontsize="small", **ASIDE)
    return ax


def plot_ratios(pairs: pd.DataFrame, overall: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Speedup of each prompt (bench.paired) by category, over median and interval (one row of bench.speedup)."""
    ax = ax or plt.subplots(figsize=(8, 3.5))[1]
    line = overall.iloc[0]
    if pd.notna(line["speedup_low"]):
        ax.axvspan(line["speedup_low"], line["speedup_high"], color=COLOURS[4], alpha=0.35, label="95% interval")
    ax.axvline(line["speedup"], color=COLOURS[0], label="median")
    ax.axvline(1.0, color="black", linestyle="--", linewidth=1, label="no change")
    ax.plot(pairs["ratio"], pairs["category"], "o", color=COLOURS[5], label="one prompt")
    ax.set(title="Speedup, paired by prompt", xlabel="decode rate, variant / baseline", ylabel="category")
    ax.legend(fontsize="small", **ASIDE)
    return ax


def plot_lookup_grid(
    grid: pd.DataFrame,
    k: int,
    value: str = "tokens_per_step",
    *,
    chosen: tuple[int, int] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Tokens a step, or the predicted speedup, over lookup_max and lookup_min for drafts of k tokens.

    `grid` is prediction.grid or ngram.simulate_grid, `value` one of its columns; `chosen`, a pair (lookup_max,
    lookup_min), is framed and told in the title.
    """
    ax = ax or plt.subplots(figsize=(5, 3.8))[1]
    table = grid[grid["k"] == k].pivot_table(index="lookup_min", columns="lookup_max", values=value)
    if table.empty:
        ax.set(title="No simulation: the server returned no token ids")
        return ax
    image = ax.imshow(table, cmap="cividis", origin="lower", aspect="auto")
    for row, column in np.argwhere(table.notna().to_numpy()):
        number = table.iloc[row, column]
        dark = image.norm(number) < 0.5  # cividis is dark at its low end
        ax.text(column, row, f"{number:.2f}", ha="center", va="center", color="white" if dark else "black")
    ax.set_xticks(range(table.shape[1]), table.columns)
    ax.set_yticks(range(table.shape[0]), table.index)
    label = {"tokens_per_step": "tokens a step", "predicted": "predicted speedup (×)"}.get(value, value)
    ax.set(title=f"Simulated {label}, k={k}", xlabel="lookup_max (tokens)", ylabel="lookup_min (tokens)")
    if chosen and chosen[0] in table.columns and chosen[1] in table.index:
        at = (table.columns.get_loc(chosen[0]), table.index.get_loc(chosen[1]))
        ax.add_patch(Rectangle((at[0] - 0.5, at[1] - 0.5), 1, 1, fill=False, edgecolor=COLOURS[5], linewidth=3))
        ax.set(title=f"{ax.get_title()}, lookup {chosen[0]}..{chosen[1]}: {table.iloc[at[1], at[0]]:.2f}")
    ax.figure.colorbar(image, ax=ax, label=label)
    return ax


def plot_prediction(table: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Predicted n-gram speedup by category, beside the measured one where there is one.

    `table` is prediction.by_category(), prediction.overall() above it. Where prompts are too few for an interval
    there is none.
    """
    ax = ax or plt.subplots(figsize=(8, 0.4 * len(table) + 1.6))[1]
    at, beside = np.arange(len(table)), bool(table["measured"].notna().any())
    sides = [("predicted", COLOURS[0], -0.12), ("measured", COLOURS[5], 0.12)]
    for name, colour, shift in sides if beside else [("predicted", COLOURS[0], 0.0)]:
        middle = table[name].astype(float)
        apart = arms(middle, table[f"{name}_low"], table[f"{name}_high"])
        ax.errorbar(middle, at + shift, xerr=apart, fmt="o", color=colour, capsize=3, label=name)
    ax.axvline(1.0, color="#888888", linewidth=1)
    ax.set_yticks(at, table["category"])
    ax.set_ylim(len(table) - 0.5, -0.5)
    title = "n-gram: predicted before, measured after" if beside else "n-gram: predicted, not measured"
    xlabel = "speedup over no speculation (×), median over prompts"
    ax.set(title=title, xlabel=f"{xlabel}, 95% interval from three prompts on", ylabel="")
    if beside:
        ax.legend(fontsize=8, **ASIDE)
    return ax
