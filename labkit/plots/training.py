"""Figures of a head's training and of what its drafts are worth."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"  # Okabe and Ito's palette
# Room that fits; tight_layout, which finds it, takes as long as the drawing.
SIDE_BY_SIDE = {"left": 0.05, "right": 0.98, "bottom": 0.15, "top": 0.9, "wspace": 0.15}


def plot_loss(df: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Loss by step; `df` as train writes it (step, loss, epoch). Where an epoch ends is marked."""
    ax = ax or plt.subplots(figsize=(7, 3.5))[1]
    ax.plot(df.step, df.loss, color=BLUE, linewidth=1)
    for step in df.groupby("epoch").step.max():
        ax.axvline(step, color=GREY, linewidth=0.5, linestyle=":")
    ax.set(title="Training loss (dotted: end of an epoch)", xlabel="optimiser step")
    ax.set_ylabel("loss, summed over TTT steps (nats)")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_ylim(bottom=0)
    return ax


def plot_acceptance_by_epoch(df: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Simulated acceptance length on held-out answers after each epoch (epoch, acceptance_length)."""
    ax = ax or plt.subplots(figsize=(7, 3.5))[1]
    known = df.dropna(subset="acceptance_length")
    ax.plot(known.epoch + 1, known.acceptance_length, color=ORANGE, marker="o")
    ax.axhline(1.0, color=GREY, linewidth=1, linestyle="--")
    ax.set(title="Held-out acceptance length, simulated (dashed: no draft accepted)", xlabel="epochs trained")
    ax.set_ylabel("acceptance length (tokens a step)")
    ax.set_xticks(sorted(set(known.epoch + 1)))
    return ax


def plot_acceptance_by_position(df: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Share of drafts whose token i was accepted (position, unconditional_rate, conditional_rate)."""
    ax = ax or plt.subplots(figsize=(5, 3.5))[1]
    ax.bar(df.position, df.unconditional_rate, color=BLUE, label="of all drafts")
    ax.plot(df.position, df.conditional_rate, color=ORANGE, marker="o", label="where all before were accepted")
    ax.set(title="Accepted by draft position", xlabel="draft position", ylabel="share", ylim=(0, 1))
    ax.set_xticks(list(df.position))
    ax.legend()
    return ax


def plot_lengths(df: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Answer lengths by category (category, answer_tokens)."""
    ax = ax or plt.subplots(figsize=(7, 3.5))[1]
    names = sorted(df.category.unique())
    ax.boxplot([df.answer_tokens[df.category == name] for name in names], tick_labels=names, widths=0.5)
    ax.set(title="Length of the target's own answers", xlabel="form of the prompt", ylabel="tokens")
    ax.tick_params(axis="x", rotation=30)
    return ax


def plot_coverage(df: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Coverage of answers by draft vocabulary size (draft_vocab_size, split, coverage)."""
    ax = ax or plt.subplots(figsize=(7, 3.5))[1]
    for (split, part), colour in zip(df.groupby("split", sort=True), (ORANGE, BLUE), strict=False):
        ax.plot(part.draft_vocab_size, part.coverage, marker="o", color=colour, label=split.replace("_", "-"))
    ax.set(title="What the draft can say at all", xlabel="draft vocabulary (tokens)", xscale="log")
    ax.set_ylabel("share of answer tokens in it")
    ax.legend()
    return ax


def plot_progress(df: pd.DataFrame, *, figure: Figure | None = None) -> Figure:
    """Loss and held-out acceptance side by side, while training and afterwards."""
    figure = figure or plt.figure()
    figure.set_size_inches(12, 3.5)
    left, right = figure.subplots(1, 2, gridspec_kw=SIDE_BY_SIDE)
    plot_loss(df, ax=left)
    plot_acceptance_by_epoch(df, ax=right)
    return figure
