"""The speedup that simulated acceptance and measured step times predict, beside the one that was measured."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pandas as pd

from labkit import acceptance, bench, ngram
from labkit.acceptance import Acceptance
from labkit.bench.steptimes import COLUMNS as STEP_COLUMNS
from labkit.engine import launch

CLOSE = 0.10  # a prediction is right within this share of the measurement, or inside its interval
COLUMNS = ["category", "tokens_per_step", "step_cost", "predicted", "predicted_low", "predicted_high", "measured"]
COLUMNS += ["measured_low", "measured_high", "step_overhead", "right", "explained", "explained_right"]
FEW_CORES = 4  # on so many the API server and the client cost the engine a noticeable part of each step
ENDS = ("high_ms", "step_ms", "low_ms")  # of step times: the longest ones give the lowest speedup


def at(times: pd.DataFrame, n: float, column: str = "step_ms") -> float:
    """t(n), ms, between measured n by straight lines; NaN without step times."""
    return float(np.interp(n, times["n"], times[column].astype(float))) if len(times) else np.nan


def scheduling(times: pd.DataFrame, sync: pd.DataFrame) -> float:
    """How many times as long a plain step takes without asynchronous scheduling; 1 where that was not measured."""
    return at(sync, 1) / at(times, 1) if len(times) and len(sync) else 1.0


def step_costs(found: Acceptance, times: pd.DataFrame, sync: pd.DataFrame) -> tuple[float, float, float]:
    """(low, middle, high) mean step time of a server that drafts like `found`, over the baseline's t(1).

    Plain steps cost t(1), drafting ones t(1 + drafted), both under the scheduling that the speculating server has:
    vLLM turns asynchronous scheduling off for the n-gram proposer on the CPU, so `sync` are step times of the
    baseline without it; where there are none, `times`. The mean draft length stands for all drafts. The proposer's
    own time is not in it: the measurement shows that. NaN without steps.
    """
    if not found.steps or times.empty:
        return np.nan, np.nan, np.nan
    used = sync if len(sync) else times
    length = 1 + (found.drafted / found.drafts if found.drafts else 0.0)
    plain, drafting = (found.steps - found.drafts) / found.steps, found.drafts / found.steps
    high, middle, low = ((plain * at(used, 1) + drafting * at(used, length, end)) / at(times, 1) for end in ENDS)
    return low, middle, high


def speedup(
    found: Acceptance, times: pd.DataFrame, sync: pd.DataFrame | None = None
) -> tuple[float, float, float]:
    """(low, middle, high) of tokens a step over what such a step costs in plain steps: `step_costs`."""
    low, middle, high = step_costs(found, times, times.iloc[:0] if sync is None else sync)
    if found.tokens is None or not found.steps:
        return np.nan, np.nan, np.nan
    yields = found.tokens / found.steps
    return yields / high, yields / middle, yields / low


def by_category(
    baseline: pd.DataFrame,
    times: pd.DataFrame,
    measured: pd.DataFrame,
    *,
    k: int,
    lookup_max: int,
    lookup_min: int,
    sync: pd.DataFrame | None = None,
    own: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """A row a category: what the baseline's tokens predict for n-gram, and what was measured (`bench.speedup`).

    `times`: step times of the baseline; `sync`: of the baseline under the n-gram server's scheduling. `step_cost`:
    predicted mean step of the n-gram server in plain steps of the baseline. `right`: the prediction is within 10%
    of the measurement or inside its interval. `step_overhead`: predicted over measured, how many times as long as
    predicted an average step of the n-gram server took. `explained`: the same simulated acceptance with `own`, the
    step times of the n-gram server itself (bench.speculating_step_times): where that is right and the prediction
    is not, what a step costs was misjudged, not what is accepted.
    """
    known = measured.set_index("category")[["speedup", "speedup_low", "speedup_high"]]
    sync = times.iloc[:0] if sync is None else sync
    rows = []
    for category, mine in baseline.groupby("category", sort=False, dropna=False):
        found = ngram.simulate_rows(mine, k=k, lookup_max=lookup_max, lookup_min=lookup_min)
        low, middle, high = speedup(found, times, sync)
        got = known.loc[category] if category in known.index else pd.Series(np.nan, known.columns)
        row = {"category": category, "tokens_per_step": found.tokens_per_step, "predicted": middle}
        row |= {"step_cost": step_costs(found, times, sync)[1], "predicted_low": low, "predicted_high": high}
        row |= {"measured": got["speedup"], "measured_low": got["speedup_low"]}
        row |= {"measured_high": got["speedup_high"], "step_overhead": middle / got["speedup"]}
        explained = np.nan if own is None or own.empty else speedup(found, times, own)[1]
        row |= {"right": right(middle, got), "explained": explained, "explained_right": right(explained, got)}
        rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS)


def grid(
    baseline: pd.DataFrame, times: pd.DataFrame, sync: pd.DataFrame, *, k: int, lookup_max: int
) -> pd.DataFrame:
    """ngram.simulate_grid for k of 1, 2, 3, 5 and `k`, lookups up to 5 or `lookup_max`; and column `predicted`.

    `predicted`: the speedup from the step times, over all recorded outputs; drafts longer than what was timed
    count as the longest that was. NaN without step times.
    """
    lengths = range(1, max(lookup_max, 5) + 1)
    table = ngram.simulate_grid(baseline, ks=[1, 2, 3, 5, k], lookup_maxs=lengths, lookup_mins=lengths)
    used = sync if len(sync) else times
    if used.empty:
        return table.assign(predicted=np.nan)
    length = 1 + (table["drafted"] / table["drafts"].where(table["drafts"] > 0)).fillna(0.0)
    drafting = np.interp(length, used["n"], used["step_ms"].astype(float))
    cost = (1 - table["drafting_share"]) * at(used, 1) + table["drafting_share"] * drafting
    return table.assign(predicted=table["tokens_per_step"] * at(times, 1) / cost)


def right(predicted: float, measured: pd.Series) -> bool | None:
    """Whether a prediction is within 10% or inside the interval; None where nothing was measured."""
    if np.isnan(measured["speedup"]) or np.isnan(predicted):
        return None
    near = abs(predicted / measured["speedup"] - 1) <= CLOSE
    return bool(near or measured["speedup_low"] <= predicted <= measured["speedup_high"])


def sentence(table: pd.DataFrame) -> str:
    """How well the prediction did, and what the rest is."""
    judged = table.dropna(subset=["right"])
    if table["predicted"].isna().all():
        return "Nothing can be predicted: that takes token ids (vLLM's return_token_ids) and step times."
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
    text += f" An average step of the n-gram server took {overhead:.2f} times as long as predicted."
    known = judged.dropna(subset=["explained_right"])
    if known.empty:
        return text
    explained = int(known["explained_right"].sum())
    return (
        f"{text} With that server's own times of a plain and of a drafting step the same simulated acceptance "
        f"is right in {explained} of {len(known)}: what lies between is the cost of a step, not the acceptance."
    )


def apart(times: pd.DataFrame, sync: pd.DataFrame, own: pd.DataFrame) -> pd.DataFrame:
    """What each change costs, a row a kind of step (plain, drafted): n, and ms by server.

    baseline_ms and sync_ms from step times, speculating_ms from `own` (own_steps). Baselines work on n tokens of n
    requests, the n-gram server verifies n tokens of one request and looks up the next draft.
    """
    table = pd.DataFrame({"n": own["n"], "step": own["tokens_are"], "speculating_ms": own["step_ms"]})
    table["baseline_ms"] = [at(times, n) for n in table["n"]]
    table["sync_ms"] = [at(sync, n) for n in table["n"]]
    return table[["step", "n", "baseline_ms", "sync_ms", "speculating_ms"]]


def own_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """bench.speculating_step_times of a server's rows; no rows where those have no counts of drafts."""
    try:
        return bench.speculating_step_times(rows)
    except acceptance.NoCounters:
        return pd.DataFrame(columns=STEP_COLUMNS)


def care(settings: Any, times: pd.DataFrame, rows: pd.DataFrame) -> str:
    """How sure step times are where an engine that was started here shares few CPU cores; empty elsewhere.

    `rows`: of the benchmark, the baseline's among them. Its time per token at one stream is what t(1) should be:
    both are one request's steps seen by a client. How far they lie apart says how much step times move.
    """
    cores = len(os.sched_getaffinity(0))
    if settings.server or not launch.on_cpu() or cores > FEW_CORES or times.empty:
        return ""
    text = (
        f"**On {cores} CPU cores** the engine takes turns with its API server and with this client: step times "
        "are longer than the engine's own, a single stream's most of all, and other programs move them."
    )
    step, token = at(times[times["streams"] == 1], 1), single_stream_ms(rows)
    if np.isnan(token) or np.isnan(step):
        return text
    return (
        f"{text} Here t(1) is {step:.1f} ms, and the benchmark's requests to the same server took {token:.1f} ms "
        "a token, which should be the same: no prediction from step times is surer than these "
        f"{abs(step / token - 1):.0%}."
    )


def single_stream_ms(rows: pd.DataFrame) -> float:
    """The baseline's time per token at one greedy stream, ms, median over requests; NaN where not measured."""
    own = rows[(rows["variant"] == "baseline") & (rows["concurrency"] == 1)]
    own = own[own["temperature"] == 0] if "temperature" in own else own
    return float(own["tpot_ms"].median())


def scheduling_sentence(times: pd.DataFrame, sync: pd.DataFrame) -> str:
    """What the speculating server loses before it drafts anything, or that it was not measured."""
    if times.empty:
        return "Without step times nothing can be said of what a step costs."
    if sync.empty:
        return (
            "Step times without asynchronous scheduling are not known for an attached server: where its n-gram "
            "variant turns that off (vLLM's `ngram` does, `ngram_gpu` does not), the prediction is too good."
        )
    return (
        "The n-gram server changes more than speculation: vLLM turns asynchronous scheduling off for it. That "
        f"alone makes a plain step **{scheduling(times, sync):.2f} times** as long ({at(times, 1):.1f} ms to "
        f"{at(sync, 1):.1f} ms, `baseline-sync`); verifying {sync['n'].max():.0f} tokens instead of one makes it "
        f"{at(sync, sync['n'].max()) / at(sync, 1):.2f} times as long again."
    )


def reasons(table: pd.DataFrame, changed: float) -> str:
    """The category that gains most and the one that loses most, and why: tokens a step against its cost.

    `table` is `by_category`, `changed` what `scheduling` found.
    """
    shown = "measured" if table["measured"].notna().any() else "predicted"
    known = table.dropna(subset=[shown, "tokens_per_step"]).sort_values(shown)
    if known.empty:
        return "No category has both token ids and a rate, so no reason can be given."
    told = [reason(row, shown, changed) for row in (known.iloc[-1], known.iloc[0])]
    return " ".join(told if len(known) > 1 else told[:1])


def reason(row: pd.Series, shown: str, changed: float) -> str:
    """Why n-gram is faster or slower on one category."""
    ratio = float(row[shown])
    cost = float(row["tokens_per_step"]) / ratio
    changes = f"{ratio - 1:.0%} faster" if ratio > 1 else f"{1 - ratio:.0%} slower"
    verb = "as fast as no speculation" if abs(ratio - 1) < 0.005 else changes
    because = f"a step there yields {row['tokens_per_step']:.2f} tokens and costs {cost:.2f} plain ones"
    part = f" ({changed:.2f} of that is scheduling)" if changed > 1.02 else ""
    said = "is" if shown == "measured" else "should be"
    return f"n-gram {said} {verb} on {row['category']} because {because}{part}."
