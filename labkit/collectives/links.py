"""The interconnect as notebook 01 shows it: measured here or read from a table, and what it says of decode."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from labkit import files
from labkit.collectives.fitting import as_decoded, decode_bytes, fit
from labkit.collectives.measuring import KINDS, LaunchFailed, TooManyRanks, measure, measure_all_to_all
from labkit.collectives.topology import cores, gpu_links
from labkit.errors import LabError
from labkit.runs import provenance
from labkit.targets import Geometry

if TYPE_CHECKING:
    from labkit.settings import Profiling
    from labkit.trace import Trace

COLUMNS = ["collective", "bytes", "mode", "sample", "time_us", "ranks", "backend", "tokens"]
# scale: message sizes beside the decode message's own, samples, calls in a sample
EFFORT = {
    "smoke": ((2**12, 2**16, 2**20), 5, 5),
    "demo": (tuple(2**power for power in range(10, 23, 2)), 20, 10),
    "full": (tuple(2**power for power in range(8, 27, 2)), 40, 20),
}


class NoLinks(LabError):
    """The table of collectives that was named is another table."""


def obtain(settings: Profiling, geometry: Geometry) -> tuple[pd.DataFrame, str]:
    """Times of collectives by message size (columns of `measure`, and `tokens`), and where they come from.

    From the table `settings.interconnect`; else measured between as many ranks as the target is served on. Empty
    for traces that somebody brings (this machine's links say nothing of theirs) and where measuring failed: then
    the sentence says why.
    """
    nothing = pd.DataFrame(columns=COLUMNS)
    if settings.interconnect:
        return saved(Path(settings.interconnect)), f"Links as measured in `{settings.interconnect}`."
    if settings.trace_dir or settings.server:
        return nothing, (
            "The links of the machine that served were not measured: run this notebook there, or name a saved "
            "`interconnect.parquet` of it as `interconnect`."
        )
    ranks = settings.tensor_parallel_size
    if ranks < 2:
        return nothing, "One rank has no links to measure."
    try:
        return measured(settings.scale, geometry, ranks), topology(ranks)
    except (LaunchFailed, TooManyRanks) as error:
        return nothing, f"**The links could not be measured:** {error}"


def saved(path: Path) -> pd.DataFrame:
    """A table of an earlier measurement (Profiling saw that the file is there); raises NoLinks for another."""
    rows = files.read_parquet(path)
    missing = {"collective", "bytes", "mode", "time_us"} - set(rows)
    if missing:
        raise NoLinks(
            f"interconnect={str(path)!r} lacks {', '.join(sorted(missing))}",
            "name an interconnect.parquet that notebook 01 saved, or leave it empty",
        )
    return rows.reindex(columns=COLUMNS)


def measured(scale: str, geometry: Geometry, ranks: int) -> pd.DataFrame:
    """Every kind over the sizes of the scale and the decode message; AllToAll as experts would need it."""
    sizes, samples, calls = EFFORT[scale]
    effort = {"samples": samples, "calls": calls}
    rows = measure(ranks, kinds=KINDS, sizes=sorted({*sizes, decode_bytes(geometry)}), **effort)
    if geometry.is_moe:
        rows = pd.concat([rows, measure_all_to_all(geometry, ranks, **effort)], ignore_index=True)
    return rows.reindex(columns=COLUMNS)


def topology(ranks: int) -> str:
    """How the ranks' devices are joined, in a sentence."""
    pairs = gpu_links()
    if len(pairs):
        kinds = pairs["link"].value_counts()
        told = ", ".join(f"{count} of {len(pairs)} pairs by {kind}" for kind, count in kinds.items())
        name = provenance.gpus()[0]["name"]
        return f"{len(set(pairs['first']) | set(pairs['second']))} {name}: {told}; measured over NCCL."
    nodes = cores()
    where = "; ".join(f"node {row.node}: cores {row.cores}, {row.memory_gb} GB" for row in nodes.itertuples())
    return (
        f"No GPU: {ranks} processes on {provenance.cpu_model()} ({where or 'NUMA nodes unknown'}), measured over "
        "gloo through loopback. vLLM's ranks on a CPU use shared memory of their own, which is faster: read the "
        "figures as this machine's alternative, not as what the trace went through."
    )


def fits(table: pd.DataFrame) -> pd.DataFrame:
    """A row a collective and mode of `summary`: collective mode latency_us bandwidth_gb_s (message over time)."""
    rows = []
    for (collective, mode), mine in table.groupby(["collective", "mode"], sort=False):
        if len(set(mine["bytes"])) > 1:
            link = fit(mine)
            row = {"collective": collective, "mode": mode, "latency_us": link.latency_us}
            rows.append(row | {"bandwidth_gb_s": link.bandwidth_gb_s})
    return pd.DataFrame(rows, columns=["collective", "mode", "latency_us", "bandwidth_gb_s"])


def decode_sentence(table: pd.DataFrame, geometry: Geometry, trace: Trace) -> str:
    """What a decode step's AllReduce should take on these links beside what it takes in the trace."""
    mine = table[table["collective"] == "AllReduce"] if len(table) else table
    if mine.empty:
        return ""
    mine = as_decoded(mine)
    mode, link = mine["mode"].iloc[0], fit(mine)
    size, expected = decode_bytes(geometry), link.time_us(decode_bytes(geometry))
    rate = f"{link.bandwidth_gb_s:.2f} GB/s" if np.isfinite(link.bandwidth_gb_s) else "no bandwidth to be seen"
    text = (
        f"A token's AllReduce moves {size:,} bytes: **{expected:.1f} µs** by the fit ({mode}; latency "
        f"{link.latency_us:.1f} µs, {rate})"
    )
    calls = trace.collectives()
    seen = calls.loc[(calls["collective"] == "AllReduce") & calls["step"].notna(), "transfer_us"].median()
    if pd.notna(seen) and seen > 0:
        times = f"{seen / expected:.1f} times that" if seen > expected else f"1/{expected / seen:.1f} of that"
        text += f"; inside the engine the transfer takes {seen:.1f} µs, {times}"
    share = link.latency_us / expected
    return f"{text}. Latency is {share:.0%} of it, so {'fewer calls' if share > 0.5 else 'smaller messages'} help."


def all_to_all_sentence(table: pd.DataFrame, geometry: Geometry, rows: pd.DataFrame) -> str:
    """What expert parallelism's exchange would cost at 1 to 16 tokens a rank; "" for a dense model."""
    if not geometry.is_moe or rows["tokens"].isna().all():
        return ""
    sizes = rows.dropna(subset=["tokens"]).groupby("tokens")["bytes"].first()
    times = as_decoded(table[table["collective"] == "AllToAll"])
    mode, median = times["mode"].iloc[0], times.set_index("bytes")["median_us"]
    told = ", ".join(f"{median[size]:.0f} µs at {tokens:.0f}" for tokens, size in sizes.items())
    return (
        f"Dispatching tokens to experts, AllToAll ({mode}) by tokens a rank: {told}. Each MoE layer needs two of "
        "these where expert parallelism comes with data-parallel attention, beside the AllReduces it saves."
    )
