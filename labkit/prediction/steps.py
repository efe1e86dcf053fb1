"""What a step of the speculating server costs, from step times (bench.step_times), and what those leave open."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pandas as pd

from labkit import acceptance, bench
from labkit.acceptance import Acceptance
from labkit.bench.steptimes import COLUMNS as STEP_COLUMNS
from labkit.engine import launch

FEW_CORES = 4  # on so many the API server and the client cost the engine a noticeable part of each step
ENDS = ("high_ms", "step_ms", "low_ms")  # of step times: the longest ones give the lowest speedup
NOISE = 0.95  # a speculating step in plain ones below which it is no more noise: the machine was not quiet
UNEVEN = 0.10  # a step on more tokens that is so much shorter than one on fewer was not disturbed, the other was


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


def own_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """bench.speculating_step_times of a server's rows; no rows where those have no counts of drafts."""
    try:
        return bench.speculating_step_times(rows)
    except acceptance.NoCounters:
        return pd.DataFrame(columns=STEP_COLUMNS)


def apart(times: pd.DataFrame, sync: pd.DataFrame, own: pd.DataFrame) -> pd.DataFrame:
    """What each change costs, a row a kind of step (plain, drafted): n, and ms by server.

    baseline_ms and sync_ms from step times, speculating_ms from `own` (own_steps). Baselines work on n tokens of n
    requests, the n-gram server verifies n tokens of one request and looks up the next draft.
    """
    table = pd.DataFrame({"n": own["n"], "step": own["tokens_are"], "speculating_ms": own["step_ms"]})
    table["baseline_ms"] = [at(times, n) for n in table["n"]]
    table["sync_ms"] = [at(sync, n) for n in table["n"]]
    return table[["step", "n", "baseline_ms", "sync_ms", "speculating_ms"]]


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


def doubts(times: pd.DataFrame, longest: int) -> str:
    """What step times leave open: numbers of tokens up to `longest` without one, and steps out of order.

    `at` takes the nearest that there is for a step that is missing at an end, a straight line in between.
    """
    if times.empty:
        return ""
    have = set(times["n"])
    lost = [n for n in range(1, longest + 1) if n not in have]
    text = ""
    if lost:
        names = ", ".join(f"t({n})" for n in lost)
        instead = f"t({max(have):.0f}) stands in" if lost[-1] > max(have) else "the nearest ones stand in"
        text = f"**{names} could not be timed** (tokens came in bunches): {instead}, so steps may be dearer. "
    one = times[times["streams"] == times["streams"].min()] if "streams" in times else times
    before = one["step_ms"].cummax().shift()
    if (one["step_ms"] < before * (1 - UNEVEN)).any():
        worst = (one["step_ms"] / before).idxmin()
        high = one.loc[one.loc[:worst, "step_ms"].idxmax()]
        text += (
            f"Step times do not rise with the tokens: t({high['n']:.0f}) is {high['step_ms']:.1f} ms, "
            f"t({one.loc[worst, 'n']:.0f}) {one.loc[worst, 'step_ms']:.1f} ms. The machine was not quiet, and the "
            "prediction is no surer than that."
        )
    return text.rstrip()
