"""From times by message size to a latency and a bandwidth, and the messages that a decode step sends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from labkit.targets import Geometry

BF16_BYTES = 2


@dataclass(frozen=True)
class Link:
    """t(bytes) = latency + bytes / bandwidth, for one collective."""

    latency_us: float
    bandwidth_gb_s: float

    def time_us(self, size: float) -> float:
        """Microseconds for a message of `size` bytes a rank."""
        return self.latency_us + size / self.bandwidth_gb_s / 1e3


def bus_factor(collective: str, ranks: int) -> float:
    """Bytes that cross a rank's link for a byte of message: nccl-tests' factor from algbw to busbw."""
    share = (ranks - 1) / ranks
    return 2 * share if collective == "AllReduce" else share


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a collective, mode and size: median, quartiles, 99th percentile, bus bandwidth; none for no rows."""
    keys = ["backend", "ranks", "collective", "mode", "bytes"]
    times = rows.astype({"time_us": float}).groupby(keys)["time_us"]
    quantiles = {"q25_us": 0.25, "median_us": 0.5, "q75_us": 0.75, "p99_us": 0.99}
    table = pd.DataFrame({name: times.quantile(q) for name, q in quantiles.items()}).reset_index()
    factors = [bus_factor(kind, ranks) for kind, ranks in zip(table["collective"], table["ranks"], strict=True)]
    return table.assign(
        samples=times.size().to_numpy(), bus_gb_s=table["bytes"] * factors / table["median_us"] / 1e3
    )


def fit(table: pd.DataFrame) -> Link:
    """Latency and bandwidth of one collective from `summary` rows of one mode.

    Least squares on relative errors, both parts non-negative: otherwise the largest message would decide alone
    and the latency, which is all that decode sees, would be its rounding error.
    """
    sizes, times = (table[name].to_numpy(float) for name in ("bytes", "median_us"))
    design = np.column_stack([1 / times, sizes / times])
    (latency, per_byte), _ = nnls(design, np.ones(len(times)))
    return Link(float(latency), float(1 / per_byte / 1e3) if per_byte > 0 else np.inf)


def as_decoded(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of `summary` as a decode step launches collectives: in a CUDA graph where that was measured."""
    modes = set(table["mode"])
    return table[table["mode"] == ("graph" if "graph" in modes else next(iter(modes), ""))]


def decode_bytes(geometry: Geometry, tokens: int = 1) -> int:
    """Message of a decode step's AllReduce: the hidden state of each token in bf16."""
    return geometry.hidden_size * BF16_BYTES * tokens


def dispatch_bytes(geometry: Geometry, tokens: int) -> int:
    """What a rank sends in expert parallelism for its own `tokens`: a hidden state for each chosen expert."""
    return decode_bytes(geometry, tokens) * geometry.num_experts_per_tok
