"""The floor of a decode step: the bytes that it has to read over the memory bandwidth there is."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from labkit.costmodel.hardware import Hardware, hardware
from labkit.costmodel.ranges import Range
from labkit.costmodel.weights import kv_bytes_per_token, weights
from labkit.targets import Geometry

if TYPE_CHECKING:
    import torch

    from labkit.settings import Profiling

ARRAY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}  # far beyond the caches
REPEATS = 15


@dataclass(frozen=True)
class Bandwidth:
    """GB/s of reading memory: median and quartiles of the repeats; `shared` where all ranks share one memory."""

    gb_s: float
    low_gb_s: float
    high_gb_s: float
    shared: bool
    source: str


def measure_bandwidth(device: str = "", repeats: int = REPEATS) -> Bandwidth:
    """Read two large arrays over and over (a dot product, every core or one GPU); decode mostly reads, too."""
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    count = ARRAY_BYTES[device] // 4
    one, other = (torch.ones(count, dtype=torch.float32, device=device) for _ in range(2))
    rates = [2 * ARRAY_BYTES[device] / seconds(one, other) / 1e9 for _ in range(repeats + 2)][2:]
    low, middle, high = np.quantile(rates, [0.25, 0.5, 0.75])
    told = "one GPU" if device == "cuda" else f"{torch.get_num_threads()} cores"
    return Bandwidth(middle, low, high, device == "cpu", f"measured here, reading with {told}")


def machine_at_hand(bandwidth: Bandwidth | None = None, ranks: int = 1) -> Hardware:
    """This machine's CPU as hardware: its memory bandwidth (measured now, where none is given), nothing else.

    Ranks share one memory, so each has its part of the bandwidth.
    """
    found = bandwidth or measure_bandwidth("cpu")
    low, high = found.low_gb_s / found.gb_s, found.high_gb_s / found.gb_s
    return Hardware(
        name="this machine",
        gpus=ranks,
        device="cpu",
        bandwidth_gb_s=Range.of(found.gb_s / ranks),
        efficiency=Range(low, 1.0, high),
        sources={"bandwidth_gb_s": found.source, "efficiency": "spread of that measurement"},
    )


def seconds(one: torch.Tensor, other: torch.Tensor) -> float:
    """How long one pass over both arrays takes."""
    import torch

    if one.is_cuda:
        torch.cuda.synchronize()
    before = time.perf_counter()
    float(torch.dot(one, other))  # waits for the result
    return time.perf_counter() - before


def bandwidth_for(settings: Profiling) -> Bandwidth | None:
    """What notebook 01 takes: the named hardware's, else this machine's where the target ran on it, else None."""
    if settings.hardware:
        told = hardware(settings.hardware).bandwidth_gb_s
        return Bandwidth(told.mid, told.low, told.high, False, f"data/hardware.json, {settings.hardware}")
    return None if settings.trace_dir or settings.server else measure_bandwidth()


def floor_ms(geometry: Geometry, ranks: int, context_tokens: int, bandwidth: Bandwidth) -> float:
    """Milliseconds that reading alone takes at one token in one stream: weights and cache of a rank.

    Where the ranks share one memory (a CPU), the bytes of all of them go through it.
    """
    cache_gb = context_tokens * kv_bytes_per_token(geometry, ranks) / 1e9
    rank_gb = float(weights(geometry, ranks)["gb_per_rank"].sum()) + cache_gb
    return rank_gb * (ranks if bandwidth.shared else 1) / bandwidth.gb_s * 1e3


def floor_sentence(settings: Profiling, geometry: Geometry, bandwidth: Bandwidth | None) -> str:
    """The floor with where its figures come from, or why there is none."""
    if bandwidth is None:
        return (
            "No floor: the memory bandwidth of the machine that served is not known here; name it as `hardware` "
            "(data/hardware.json)."
        )
    ranks, context = settings.tensor_parallel_size, settings.context_tokens
    return (
        f"Reading alone would take **{floor_ms(geometry, ranks, context, bandwidth):.2f} ms** a token at "
        f"{bandwidth.gb_s:.1f} GB/s [{bandwidth.low_gb_s:.1f}, {bandwidth.high_gb_s:.1f}] ({bandwidth.source}): "
        "the floor under every fix; speculation gets below it only because a step then yields several tokens."
    )
