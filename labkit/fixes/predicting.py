"""What each fix should give, from the breakdown of the base's trace alone: a prediction to measure against."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from labkit.collectives import as_decoded, decode_bytes
from labkit.fixes.choosing import FIXES, applicable
from labkit.targets import Geometry
from labkit.trace import Trace, names
from labkit.trace.predict import world

SPLIT = (names.GEMM, names.ATTENTION, names.MOE)  # what tensor parallelism deals out to the ranks
DRAWS = 20_000
Interval = tuple[float, float]  # ms a token: least, most


def predict(
    trace: Trace, geometry: Geometry, links: pd.DataFrame | None = None, client: pd.DataFrame | None = None
) -> pd.DataFrame:
    """A row an applicable fix: fix what predicted_low_ms predicted_high_ms speedup_low speedup_high because.

    Milliseconds a token at one stream, all else as it is: the period of the decode steps, less what the profiler
    added where `client` (`trace.capture`) saw tokens without it. `links`: `collectives.summary` of the machine's
    links, without which NCCL's time is not known (NaN).
    """
    spent = per_token(trace)
    if client is not None and len(client):
        spent = unprofiled(spent, client.loc[~client["profiled"].astype(bool), "gap_ms"].median())
    tpot, ranks, on_gpu = float(spent.sum()), world(trace), trace.ranks[0].device == "gpu"
    cases: dict[str, Callable[[], tuple[Interval, str]]] = {
        "single-rank": lambda: single_rank(spent, ranks, shared_cores=not on_gpu),
        "nccl-allreduce": lambda: nccl(trace, geometry, tpot, links),
        "fused-allreduce": lambda: fused(trace, tpot),
        "expert-parallel": lambda: expert_parallel(spent, geometry, ranks),
    }
    rows = []
    for name in applicable(geometry, ranks, on_gpu=on_gpu):
        (low, high), because = cases[name]()
        row = {"fix": name, "what": FIXES[name].what, "predicted_low_ms": low, "predicted_high_ms": high}
        rows.append(row | {"speedup_low": tpot / high, "speedup_high": tpot / low, "because": because})
    columns = ["fix", "what", "predicted_low_ms", "predicted_high_ms", "speedup_low", "speedup_high", "because"]
    return pd.DataFrame(rows, columns=columns)


def per_token(trace: Trace) -> pd.Series:
    """Milliseconds of a decode period by category, mean over ranks; of the step where no period is known."""
    parts = trace.parts(window="period")
    if parts.empty or not parts["ms_per_step"].sum():
        parts = trace.parts()
    return parts.groupby("category", sort=False)["ms_per_step"].mean()


def unprofiled(spent: pd.Series, tpot_ms: float) -> pd.Series:
    """The categories as they add up to `tpot_ms`: the profiler slows launches, so gaps, then waiting, shrink.

    Kernels and operators keep their time, so the sum stays above `tpot_ms` where the gaps do not suffice.
    """
    spent, added = spent.copy(), max(float(spent.sum()) - tpot_ms, 0.0)
    for category in (names.IDLE, names.WAIT):
        less = min(added, float(spent[category]))
        spent[category] -= less
        added -= less
    return spent


def single_rank(spent: pd.Series, ranks: int, *, shared_cores: bool) -> tuple[Interval, str]:
    """No communication; the work of all ranks on one, with their cores or on one device in R times the time."""
    communication = float(spent[[*names.ALLREDUCE, names.OTHER_COMM]].sum())
    rest, split = float(spent.sum()) - communication, float(spent[list(SPLIT)].sum())
    if shared_cores:
        alike = float(spent[[names.NORM, names.SAMPLING, names.COPY]].sum())
        because = "communication goes; work that every rank repeats shrinks to one rank's at best"
        return (rest - alike * (1 - 1 / ranks), rest), because
    because = f"communication goes, GEMM, attention and MoE ({split:.2f} ms) take up to {ranks} times as long"
    return (rest, rest + (ranks - 1) * split), because


def nccl(trace: Trace, geometry: Geometry, tpot: float, links: pd.DataFrame | None) -> tuple[Interval, str]:
    """NCCL's measured time at the decode message for each AllReduce, instead of the transfer in the trace."""
    calls = trace.collectives()
    mine = calls[(calls["collective"] == "AllReduce") & calls["step"].notna()]
    count = float(trace.summary()["allreduce_per_step"].median())
    transfer = mine["transfer_us"].median()
    if links is None or links.empty or not count or np.isnan(transfer):
        return (np.nan, np.nan), "needs NCCL's times on these links (the interconnect section)"
    size = decode_bytes(geometry)
    times = links[(links["collective"] == "AllReduce") & (links["backend"] == "nccl")]
    if times.empty:
        return (np.nan, np.nan), "the links were measured with another transport than NCCL"
    times = as_decoded(times).sort_values("bytes")
    mode = times["mode"].iloc[0]
    low, high = (float(np.interp(size, times["bytes"], times[name])) for name in ("q25_us", "p99_us"))
    because = (
        f"{count:.0f} AllReduces of {low:.1f} to {high:.1f} us (NCCL here, {mode}) instead of {transfer:.1f} us"
    )
    return (tpot + count * (low - transfer) / 1e3, tpot + count * (high - transfer) / 1e3), because


def fused(trace: Trace, tpot: float) -> tuple[Interval, str]:
    """At best the norm kernels cost nothing beside the AllReduce that they merge with."""
    kernels = trace.kernels()
    norms = kernels[kernels["name"].str.contains(r"rms_?norm|layer_?norm|_norm_", case=False)]
    saved = float(norms.groupby("rank")["ms_per_step"].sum().mean()) if len(norms) else 0.0
    return (tpot - saved, tpot), f"at best the norms ({saved:.2f} ms) disappear in the AllReduces; transfers stay"


def expert_parallel(spent: pd.Series, geometry: Geometry, ranks: int) -> tuple[Interval, str]:
    """The busiest rank's share of a token's experts over the even share: the MoE kernels wait for it."""
    load = busiest(geometry.n_routed_experts, geometry.num_experts_per_tok, ranks)
    even = geometry.num_experts_per_tok / ranks
    moe, tpot = float(spent[names.MOE]), float(spent.sum())
    because = (
        f"the busiest of {ranks} ranks has {load:.2f} of a token's {geometry.num_experts_per_tok} experts instead "
        f"of {even:g}: MoE ({moe:.2f} ms) up to {load / even:.2f} times"
    )
    return (tpot, tpot + moe * (load / even - 1)), because


def busiest(experts: int, chosen: int, ranks: int, draws: int = DRAWS) -> float:
    """Mean over random routings of the most experts of one token that fall on one of `ranks` ranks.

    Experts are dealt out evenly and chosen without replacement: a multivariate hypergeometric draw, fixed seed.
    """
    share = [experts // ranks + (i < experts % ranks) for i in range(ranks)]
    drawn = np.random.default_rng(0).multivariate_hypergeometric(share, chosen, size=draws)
    return float(drawn.max(axis=1).mean())
