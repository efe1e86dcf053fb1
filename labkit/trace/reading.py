"""What the figures of a trace say, in words whose numbers all come from it."""

from __future__ import annotations

import pandas as pd

from labkit.trace.model import Trace
from labkit.trace.whatif import FLOOR, FREE


def overhead_sentence(trace: Trace, client: pd.DataFrame) -> str:
    """The period in the trace beside what the client saw with and without the profiler; "" without a client."""
    if client.empty:
        return ""
    gaps = client.groupby("profiled")["gap_ms"].median()
    period = trace.summary()["period_ms"].median()
    apart = period / gaps[True] - 1
    return (
        f"From start to start a step takes {period:.1f} ms; the client saw {gaps[True]:.1f} ms a token under "
        f"the profiler ({apart:+.0%} apart) and {gaps[False]:.1f} ms without it: the profiler changes a step by "
        f"{gaps[True] / gaps[False] - 1:+.0%}."
    )


def steadiness_sentence(trace: Trace) -> str:
    """A warning where single steps took far longer than the median; "" where the steps were steady."""
    steps = trace.steps()
    lengths = steps.loc[steps["phase"] == trace.decode_phase(), "dur_us"] / 1e3
    middle, slow = lengths.median(), lengths[lengths > 1.5 * lengths.median()]
    if slow.empty:
        return ""
    return (
        f"**The machine was not quiet:** {len(slow)} of {len(lengths)} steps took over 1.5 times the median "
        f"({middle:.1f} ms; up to {slow.max():.1f} ms, mean {lengths.mean():.1f} ms). Shares and waits are over "
        "all steps, so they contain the disturbance."
    )


def wait_sentence(trace: Trace) -> str:
    """Transfer and wait by rank, and who is waited for."""
    summary = trace.summary().set_index("rank")
    if summary["allreduce_unsplit_ms"].sum() > summary[["allreduce_transfer_ms", "allreduce_wait_ms"]].sum().sum():
        return "With one rank's trace waiting cannot be told from transfer: profile all ranks."
    waits = summary["allreduce_wait_ms"]
    if not waits.sum() + summary["allreduce_transfer_ms"].sum():
        return "There is no AllReduce to wait in."
    transfer = summary["allreduce_transfer_ms"].mean()
    told = ", ".join(f"rank {rank} waits {wait:.2f} ms" for rank, wait in waits.items())
    share = waits.sum() / (waits.sum() + summary["allreduce_transfer_ms"].sum())
    balance = (
        f"the ranks wait for rank {waits.idxmin()}"
        if waits.min() < 0.5 * waits.max()
        else "the ranks wait for each other in turn: jitter, not one slow rank"
    )
    late = late_share(trace)
    held = (
        f" {late:.0%} of the waiting is for a rank that came late; the rest passed after all had come."
        if late
        else ""
    )
    return (
        f"A step's transfers take **{transfer:.2f} ms**; {told} a step. **{share:.0%} of the AllReduce time is "
        f"waiting**, and {balance}.{held}"
    )


def late_share(trace: Trace) -> float:
    """The part of all waiting that a later start of another rank explains; 0 where nothing waits."""
    calls = trace.collectives()
    mine = calls[(calls["collective"] == "AllReduce") & calls["step"].notna()].dropna(subset=["wait_us"])
    total = mine["wait_us"].sum()
    return float(mine[["wait_us", "late_us"]].min(axis=1).clip(lower=0).sum() / total) if total else 0.0


def conclusion(trace: Trace, cases: pd.DataFrame) -> str:
    """The answer of notebook 01 in a few sentences; `cases` is what_if(trace)."""
    summary = trace.summary()
    names = cases.set_index("case")
    free, faster = names.loc[FREE], names.loc["AllReduce transfer free"]
    largest = trace.parts().groupby("category")["share"].mean().drop("idle").idxmax()
    floor = f" (reading alone: {names.loc[FLOOR, 'tpot_ms']:.2f} ms)" if FLOOR in names.index else ""
    share, count = summary["allreduce_share"].mean(), summary["allreduce_per_step"].median()
    return (
        f"A decode step takes {trace.step_ms():.1f} ms; of all that time {share:.1%} is in {count:.0f} AllReduces "
        "a step. With free links a token would take "
        f"{faster.tpot_ms:.2f} instead of {names.tpot_ms.iloc[0]:.2f} ms ({faster.speedup:.2f}×), and with "
        f"AllReduce gone altogether {free.tpot_ms:.2f} ms ({free.speedup:.2f}×): the most that any faster "
        f"interconnect or better AllReduce can give{floor}. The largest kind of work is {largest}; during "
        f"{summary['idle_share'].mean():.0%} of the step nothing that is recorded was running."
    )
