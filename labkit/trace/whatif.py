"""What a token would cost if AllReduce cost less: arithmetic on the measured breakdown, no model."""

from __future__ import annotations

import pandas as pd

from labkit.trace import names
from labkit.trace.model import Trace

FREE = "AllReduce free, ranks as they are"
FLOOR = "floor: bytes over bandwidth"


def what_if(trace: Trace, floor_ms: float | None = None) -> pd.DataFrame:
    """Time a token (TPOT at one token a step) in five cases and the floor: case tpot_ms saved_ms speedup.

    The step is the period of the decode steps (start to start; the step itself where none follows another).
    Transfer is the same on all ranks, so it comes off as it is. Waiting is another rank's work: without it a rank
    would still wait for the slowest, so "no wait" is the mean of the ranks' work (the best that balancing can
    give), and "AllReduce free" the slowest rank's own work: a rank cannot be faster than what it computes. All are
    bounds: nothing else is assumed to change. `floor_ms` (costmodel.floor_ms) is what reading the weights takes.
    """
    parts = trace.breakdown(window="period")
    parts = parts[parts["phase"] == trace.decode_phase()]
    if parts.empty:
        parts = trace.breakdown()
        parts = parts[parts["phase"] == trace.decode_phase()]
    by_rank = parts.pivot_table(index="rank", columns="category", values="dur_us", aggfunc="sum") / 1e3
    count = parts.groupby("rank")["step"].nunique()
    by_rank = by_rank.div(count, axis=0)
    tpot = by_rank.sum(axis=1).mean()
    transfer = by_rank[[names.TRANSFER, names.UNSPLIT]].sum(axis=1)
    work = by_rank.sum(axis=1) - by_rank[names.WAIT]
    cases = {
        "as measured": tpot,
        "AllReduce transfer halved": tpot - transfer.mean() / 2,
        "AllReduce transfer free": tpot - transfer.mean(),
        "no wait: ranks balanced": work.mean(),
        FREE: (work - transfer).max(),
    }
    if floor_ms is not None:
        cases[FLOOR] = floor_ms
    frame = pd.DataFrame({"case": list(cases), "tpot_ms": list(cases.values())})
    frame["saved_ms"] = tpot - frame["tpot_ms"]
    frame["speedup"] = tpot / frame["tpot_ms"]
    return frame
