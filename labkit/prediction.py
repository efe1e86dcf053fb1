"""The speedup that simulated acceptance and measured step times predict, beside the one that was measured."""

from __future__ import annotations

import numpy as np
import pandas as pd

from labkit import ngram
from labkit.acceptance import Acceptance

CLOSE = 0.10  # a prediction is right within this share of the measurement, or inside its interval
COLUMNS = ["category", "tokens_per_step", "predicted", "predicted_low", "predicted_high", "measured"]
COLUMNS += ["measured_low", "measured_high", "step_overhead", "right"]


def speedup(found: Acceptance, times: pd.DataFrame) -> tuple[float, float, float]:
    """(low, middle, high) of tokens x t(1) / (plain steps x t(1) + drafting steps x t(1 + drafted)).

    `times`: bench.step_times, with its quartiles for low and high; the mean draft length stands for all drafts.
    NaN without steps. What the proposer and the scheduler add is not in it: the measurement shows that.
    """
    if not found.steps or found.tokens is None or times.empty:
        return np.nan, np.nan, np.nan
    length = 1 + (found.drafted / found.drafts if found.drafts else 0.0)
    plain = float(np.interp(1, times["n"], times["step_ms"]))
    costs = [float(np.interp(length, times["n"], times[name])) for name in ("high_ms", "step_ms", "low_ms")]
    spent = [(found.steps - found.drafts) * plain + found.drafts * cost for cost in costs]
    low, middle, high = (found.tokens * plain / each for each in spent)
    return low, middle, high


def by_category(
    baseline: pd.DataFrame,
    times: pd.DataFrame,
    measured: pd.DataFrame,
    *,
    k: int,
    lookup_max: int,
    lookup_min: int,
) -> pd.DataFrame:
    """A row a category: what the baseline's tokens predict for n-gram, and what was measured (`bench.speedup`).

    `right` says whether the prediction is within 10% of the measurement or inside its interval; `step_overhead` is
    predicted over measured: how many times as long as predicted an average step of the n-gram server took.
    """
    known = measured.set_index("category")[["speedup", "speedup_low", "speedup_high"]]
    rows = []
    for category, mine in baseline.groupby("category", sort=False, dropna=False):
        found = ngram.simulate_rows(mine, k=k, lookup_max=lookup_max, lookup_min=lookup_min)
        low, middle, high = speedup(found, times)
        got = known.loc[category] if category in known.index else pd.Series(np.nan, known.columns)
        row = {"category": category, "tokens_per_step": found.tokens_per_step, "predicted": middle}
        row |= {"predicted_low": low, "predicted_high": high, "measured": got["speedup"]}
        row |= {"measured_low": got["speedup_low"], "measured_high": got["speedup_high"]}
        rows.append(row | {"step_overhead": middle / got["speedup"], "right": right(middle, got)})
    return pd.DataFrame(rows, columns=COLUMNS)


def right(predicted: float, measured: pd.Series) -> bool | None:
    """Whether a prediction is within 10% or inside the interval; None where nothing was measured."""
    if np.isnan(measured["speedup"]) or np.isnan(predicted):
        return None
    near = abs(predicted / measured["speedup"] - 1) <= CLOSE
    return bool(near or measured["speedup_low"] <= predicted <= measured["speedup_high"])


def sentence(table: pd.DataFrame) -> str:
    """How well the prediction did, and what the rest is."""
    judged = table.dropna(subset=["right"])
    if judged.empty:
        told = ", ".join(f"{row.category} {row.predicted:.2f}×" for row in table.itertuples())
        return f"Predicted from step times, nothing measured to compare with: {told}."
    hits, overhead = int(judged["right"].sum()), float(judged["step_overhead"].median())
    missed = judged[~judged["right"].astype(bool)]
    text = f"The prediction is within {CLOSE:.0%}, or inside the interval, in {hits} of {len(judged)} categories."
    if len(missed):
        told = ", ".join(
            f"{row.category} {row.predicted:.2f}× for {row.measured:.2f}×" for row in missed.itertuples()
        )
        text += f" It missed {told}."
    return (
        f"{text} An average step of the n-gram server took {overhead:.2f} times as long as its tokens alone "
        "would: looking up, verifying one request's tokens instead of several requests', and scheduling that "
        "waits for the proposer (vLLM's CPU n-gram turns asynchronous scheduling off; `baseline-sync` is the "
        "baseline without it)."
    )
