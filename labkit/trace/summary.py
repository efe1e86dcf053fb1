"""Figures over the decode steps of a trace: shares by rank, calls a step, kernels, one step's time line."""

from __future__ import annotations

import numpy as np
import pandas as pd

from labkit.trace import breakdown, names
from labkit.trace.model import Trace

SHARES = {  # column: the categories that it sums; together they are all
    "allreduce_share": names.ALLREDUCE,
    "other_communication_share": (names.OTHER_COMM,),
    "gemm_share": (names.GEMM,),
    "attention_share": (names.ATTENTION,),
    "moe_share": (names.MOE,),
    "norm_elementwise_share": (names.NORM,),
    "sampling_share": (names.SAMPLING,),
    "copy_share": (names.COPY,),
    "overhead_share": (names.OVERHEAD,),
    "unclassified_share": (names.OTHER,),
    "idle_share": (names.IDLE,),
}


def by_rank(trace: Trace) -> pd.DataFrame:
    """A row a rank over its decode steps; the columns that end with _share sum to 1.

    step_ms is the mean (so that shares times step_ms are times), step_p50_ms the median, period_ms the median time
    to the next step. allreduce_share is exposed transfer and wait over the steps' wall time. allreduce_per_step is
    the median; _min and _max show a step that differs. hidden_ms is communication under compute, launch_gap_ms the
    part of idle between a step's first and last activity, clock_lead_us how far the rank's clock is ahead of the
    first rank's.
    """
    phase = trace.decode_phase()
    steps, calls = trace.steps(), trace.collectives()
    steps = steps[steps["phase"] == phase]
    rows = [row_of(trace, i, phase, steps, calls) for i in range(len(trace.ranks))]
    return pd.DataFrame([row for row in rows if row])


def row_of(trace: Trace, i: int, phase: str, steps: pd.DataFrame, calls: pd.DataFrame) -> dict[str, float]:
    """The summary of one rank."""
    number = trace.ranks[i].rank
    mine = steps[steps["rank"] == number]
    if mine.empty:
        return {}
    start, end, _, phases = trace.windows(i, "step")
    here = phases == phase
    line, count = trace.lines[i], len(mine)
    spent = pd.Series(line.spent(start[here], end[here]).sum(0) / 1e6, list(names.CATEGORIES))
    total_ms = float((end - start)[here].sum()) / 1e6
    each = reduces_per_step(calls[calls["rank"] == number], mine["step"])
    row = {
        "rank": number,
        "steps": count,
        "step_ms": total_ms / count,
        "step_p50_ms": mine["dur_us"].median() / 1e3,
        "period_ms": mine["period_us"].median() / 1e3,
    }
    row |= {column: float(spent[list(parts)].sum()) / total_ms for column, parts in SHARES.items()}
    row |= {
        "allreduce_transfer_ms": float(spent[names.TRANSFER]) / count,
        "allreduce_wait_ms": float(spent[names.WAIT]) / count,
        "allreduce_unsplit_ms": float(spent[names.UNSPLIT]) / count,
        "allreduce_per_step": float(each.median()),
        "allreduce_per_step_min": int(each.min()),
        "allreduce_per_step_max": int(each.max()),
        "hidden_ms": float(line.hidden(start[here], end[here]).sum()) / 1e6 / count,
        "launch_gap_ms": float(line.gaps(start[here], end[here]).sum()) / 1e6 / count,
        "clock_lead_us": float(trace.clock_lead_ns[i]) / 1e3,
    }
    return row


def reduces_per_step(calls: pd.DataFrame, steps: pd.Series) -> pd.Series:
    """AllReduces in each of the given steps of one rank, 0 where there are none."""
    reduces = calls[calls["collective"] == "AllReduce"]
    return reduces.groupby("step").size().reindex(steps.to_numpy(), fill_value=0)


def per_step(trace: Trace) -> pd.DataFrame:
    """Calls a decode step: a row a rank, step and collective: rank step collective calls."""
    steps, calls = trace.steps(), trace.collectives()
    steps = steps[steps["phase"] == trace.decode_phase()][["rank", "step"]]
    kinds = pd.DataFrame({"collective": sorted(calls["collective"].unique())})
    counted = calls.dropna(subset=["step"]).groupby(["rank", "step", "collective"]).size().rename("calls")
    every = steps.merge(kinds, how="cross")
    every["calls"] = counted.reindex(pd.MultiIndex.from_frame(every), fill_value=0).to_numpy()
    return every


def parts(trace: Trace, window: str) -> pd.DataFrame:
    """Mean breakdown of the decode steps, a row a rank and category: rank category ms_per_step share."""
    every = trace.breakdown(window=window)
    every = every[every["phase"] == trace.decode_phase()]
    found = every.groupby(["rank", "category"], sort=False)["dur_us"].sum().reset_index()
    count = every.groupby("rank")["step"].nunique()
    found["ms_per_step"] = found.pop("dur_us") / 1e3 / found["rank"].map(count)
    found["share"] = found["ms_per_step"] / found.groupby("rank")["ms_per_step"].transform("sum")
    return found


def waits(trace: Trace, collective: str) -> pd.DataFrame:
    """Means over the decode steps at each matched call of a step: rank call wait_us late_us transfer_us."""
    steps, calls = trace.steps(), trace.collectives()
    decode = set(steps.loc[steps["phase"] == trace.decode_phase(), "step"])
    mine = calls[(calls["collective"] == collective) & calls["step"].isin(decode)].dropna(subset=["wait_us"])
    return mine.groupby(["rank", "call"])[["wait_us", "late_us", "transfer_us"]].mean().reset_index()


def kernels(trace: Trace) -> pd.DataFrame:
    """What ran in decode steps: rank name category calls_per_step ms_per_step share (of the steps' wall time).

    On a CPU the time is an operator's own, without what it called. A collective counts whole, wait included.
    """
    frames = [kernels_of(trace, i) for i in range(len(trace.ranks))]
    found = pd.concat(frames, ignore_index=True)
    return found.sort_values(["rank", "ms_per_step"], ascending=[True, False], ignore_index=True)


def kernels_of(trace: Trace, i: int) -> pd.DataFrame:
    """What ran in the decode steps of one rank."""
    rank, calls = trace.ranks[i], trace.ranks[i].calls
    first, last, _, phases = trace.windows(i, "step")
    here = phases == trace.decode_phase()
    first, last = first[here], last[here]
    begin = np.concatenate((rank.start, calls.start))
    length = np.concatenate((rank.end - rank.start, calls.end - calls.start))
    counts = np.concatenate((rank.first, np.ones(len(calls), bool)))
    name = np.concatenate((rank.name, calls.name))
    at = np.searchsorted(first, begin, "right") - 1
    inside = at >= 0
    inside[inside] = begin[inside] < last[at[inside]]
    spent = np.bincount(name[inside], weights=length[inside], minlength=len(rank.names))
    times = np.bincount(name[inside], weights=counts[inside], minlength=len(rank.names))
    used = np.flatnonzero(spent + times)
    spoken = set(calls.name.tolist())
    return pd.DataFrame(
        {
            "rank": rank.rank,
            "name": [rank.names[k] for k in used],
            "category": ["communication" if k in spoken else names.work(rank.names[k]) for k in used],
            "calls_per_step": times[used] / max(len(first), 1),
            "ms_per_step": spent[used] / 1e6 / max(len(first), 1),
            "share": spent[used] / max((last - first).sum(), 1),
        }
    )


def timeline(trace: Trace, step: int | None = None) -> pd.DataFrame:
    """One decode step on all ranks, on the first rank's clock: rank step category start_us dur_us.

    `step` is a step's number; without one, the step of median length on the first rank. start_us counts from the
    earliest start over the ranks.
    """
    steps = trace.steps()
    decode = steps[steps["phase"] == trace.decode_phase()]
    if step is None:
        first = decode[decode["rank"] == decode["rank"].iloc[0]].sort_values("dur_us")
        step = int(first["step"].iloc[len(first) // 2])
    frames = []
    for i, rank in enumerate(trace.ranks):
        at = np.flatnonzero(trace.numbers[i] == step)
        if len(at):
            lead = int(trace.clock_lead_ns[i])
            frames.append(
                stretches(trace.lines[i], rank.steps.start[at[0]], rank.steps.end[at[0]], lead, rank.rank)
            )
    found = pd.concat(frames, ignore_index=True)
    found["start_us"] = (found["start_us"] - found["start_us"].min()) / 1e3
    return found.assign(step=step)[["rank", "step", "category", "start_us", "dur_us"]]


def stretches(line: breakdown.Line, start: int, end: int, lead: int, rank: int | None) -> pd.DataFrame:
    """Stretches of one category in a window; start still in ns, on the common clock."""
    a, b = np.searchsorted(line.edge, start, "right"), np.searchsorted(line.edge, end, "left")
    before = line.owner[a - 1] if a else breakdown.INDEX[names.IDLE]
    owner, edge = np.append(before, line.owner[a:b]), np.append(start, line.edge[a:b])
    lasting = np.append(edge[1:], end) > edge
    owner, edge = owner[lasting], edge[lasting]
    turn = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
    begin, stop = edge[turn], np.append(edge[turn[1:]], end)
    return pd.DataFrame(
        {
            "rank": rank,
            "category": [names.CATEGORIES[c] for c in owner[turn]],
            "start_us": begin - lead,
            "dur_us": (stop - begin) / 1e3,
        }
    )
