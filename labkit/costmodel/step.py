"""The time of a decoding step that verifies n tokens, and what speculation gains by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from labkit.costmodel.experts import fullest_rank, loaded
from labkit.costmodel.hardware import Hardware
from labkit.costmodel.hardware import hardware as hardware_of
from labkit.costmodel.kernels import PAIRWISE, UNIQUE, Regime, regime
from labkit.costmodel.ranges import Range, corners
from labkit.costmodel.weights import expert_bytes, kv_bytes_per_token, weights
from labkit.errors import LabError
from labkit.targets import Geometry
from labkit.targets import geometry as geometry_of

LOADINGS = ("auto", UNIQUE, PAIRWISE)
VARYING = ("bandwidth_gb_s", "efficiency", "tflops", "allreduce_us", "allreduce_us_per_kib", "token_ms")

Values = Mapping[str, np.ndarray]  # a figure's value in the middle and in each corner


class BadEstimate(LabError):
    """The cost model was given figures that cannot be, or that contradict a measurement."""


@dataclass(frozen=True)
class StepModel:
    """t(n) = sum over parts of max(bytes / bandwidth, arithmetic) + AllReduces + per token + other.

    geometry, hardware: objects or shipped names. reuse: r in U = k + r (U_uniform - k), one figure or one a
    window length (experts.unique_by_window), interpolated between; 1 is independent routing. loading: whether
    the kernel reads each expert once ("unique"), or again for every token that chose it ("pairwise"); "auto"
    follows vLLM's rule (`regime`). expert_budget: MoE-Spec's B, the most experts a layer and step. draft_ms: one
    drafted token; host_ms: what a speculating step adds besides. other_ms: everything else in a step; None takes
    what a measured step leaves over, or the hardware's figure. Figures may be ranges; `sources` says where those
    given here are from.
    """

    geometry: Geometry | str
    hardware: Hardware | str
    tensor_parallel_size: int = 0  # 0: all GPUs
    context_tokens: int = 2048
    reuse: Any = 1.0
    loading: str = "auto"
    expert_parallel: bool = False
    expert_budget: float = 0  # 0: none
    draft_ms: Any = 0.0
    host_ms: Any = 0.0
    other_ms: Any = None
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    curve: Mapping[int, Range] = field(init=False, default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Look up names and check; raises BadEstimate and what geometry and hardware raise."""
        fill = object.__setattr__
        if not isinstance(self.geometry, Geometry):
            fill(self, "geometry", geometry_of(self.geometry))
        if not isinstance(self.hardware, Hardware):
            fill(self, "hardware", hardware_of(self.hardware))
        fill(self, "tensor_parallel_size", self.tensor_parallel_size or self.hardware.gpus)
        self.geometry.require_tensor_parallel(self.tensor_parallel_size)
        if self.tensor_parallel_size > self.hardware.gpus:
            raise BadEstimate(
                f"tensor_parallel_size={self.tensor_parallel_size} on {self.hardware.name}",
                f"it has {self.hardware.gpus} GPUs",
            )
        if self.loading not in LOADINGS:
            raise BadEstimate(f"loading={self.loading!r}", f"use one of {', '.join(LOADINGS)}")
        points = self.reuse if isinstance(self.reuse, Mapping) else {1: self.reuse}
        fill(self, "curve", {int(n): Range.of(r) for n, r in sorted(points.items())})
        self.check_figures()
        fill(self, "draft_ms", Range.of(self.draft_ms))
        fill(self, "host_ms", Range.of(self.host_ms))

    def check_figures(self) -> None:
        """Raise BadEstimate for figures that cannot be, before a step time of less than nothing comes out."""
        low = min((r.low for r in self.curve.values()), default=-1)
        if low < 0:
            told = f"reuse of {low:g}" if self.curve else "reuse without a single figure"
            raise BadEstimate(told, "give r, from 0 (all shared) to 1 (independent), or one a window length")
        if self.context_tokens < 0 or self.expert_budget < 0:
            raise BadEstimate(
                f"context_tokens={self.context_tokens}, expert_budget={self.expert_budget}",
                "give neither below 0; a budget of 0 is none",
            )

    @cached_property
    def figures(self) -> dict[str, Range]:
        """The figures that may be uncertain, by name; reuse is told as -1 (low), 0 or 1 of its curve."""
        ranges = {name: getattr(self.hardware, name) for name in VARYING}
        # Where a step was measured, what it leaves over follows from the other figures: no uncertainty of its own.
        given = self.hardware.other_ms if self.other_ms is None else Range.of(self.other_ms)
        ranges["other_ms"] = Range.of(0) if self.leaves_over else given
        uncertain = any(not r.exact for r in self.curve.values()) and self.geometry.is_moe
        ranges["reuse"] = Range(-1, 0, 1) if uncertain else Range.of(0)
        return ranges | {"draft_ms": self.draft_ms, "host_ms": self.host_ms}

    @cached_property
    def values(self) -> dict[str, np.ndarray]:
        """The figures in the middle and in every corner."""
        return corners(self.figures)

    @property
    def measured(self) -> Mapping[str, Any]:
        """What was measured of this model on this hardware, if anything."""
        whole = self.tensor_parallel_size == self.hardware.gpus
        return self.hardware.measured.get(self.geometry.name, {}) if whole else {}

    @property
    def leaves_over(self) -> bool:
        """Whether other_ms is what a measured step leaves over: a residual."""
        return self.other_ms is None and bool(self.measured)

    @cached_property
    def parts(self) -> dict[str, tuple[float, float]]:
        """part: (GB that one rank reads at one token, TFLOP that it computes for each token)."""
        table = weights(self.geometry, self.tensor_parallel_size)
        flops = 2 * table["gb_per_rank"] / table["bytes_per_weight"] / 1e3
        return dict(zip(table["part"], zip(table["gb_per_rank"], flops, strict=True), strict=True))

    def regime(self, n: int, streams: int = 1) -> Regime:
        """How the kernel reads experts in a step of n tokens in each of `streams` requests, and why."""
        if self.loading != "auto" and self.geometry.is_moe:
            return Regime(self.loading, "given as `loading`")
        options = {"device": self.hardware.device, "expert_parallel": self.expert_parallel}
        return regime(self.geometry, n * streams, **options)

    def kernel(self, tokens: int) -> str:
        """`regime` of a step with that many tokens in all, as one word."""
        return self.regime(tokens).loading

    def experts_loaded(self, n: int, streams: int = 1) -> float:
        """Expert reads a layer of a step with `streams` requests of n tokens each, all ranks together."""
        return float(self.experts_at(n, streams, np.zeros(1))[0])

    def experts_at(self, n: int, streams: int, reuse: np.ndarray) -> np.ndarray:
        """`experts_loaded` at each of -1, 0 or 1 of the reuse curve."""
        r = [np.interp(n, list(self.curve), ends) for ends in zip(*self.curve.values(), strict=True)]
        pairwise = self.regime(n, streams).loading == PAIRWISE
        return loaded(self.geometry, n, streams, np.interp(reuse, (-1, 0, 1), r), pairwise, self.expert_budget)

    def routed_gb(self, n: int, streams: int, reuse: np.ndarray) -> np.ndarray:
        """GB of routed experts that the rank reads which has most to read."""
        read = self.experts_at(n, streams, reuse)
        ranks = self.tensor_parallel_size
        mine = fullest_rank(read, self.geometry.n_routed_experts, ranks) if self.expert_parallel else read / ranks
        return mine * self.geometry.num_moe_layers * expert_bytes(self.geometry) / 1e9

    def gigabytes(self, n: int, streams: int = 1) -> dict[str, float]:
        """GB that one rank reads in a step, by part."""
        table = {name: gb for name, (gb, _flops) in self.parts.items()}
        if "routed experts" in table:
            table["routed experts"] = float(self.routed_gb(n, streams, np.zeros(1))[0])
        return table | {"cache": self.cache_gb(streams)}

    def cache_gb(self, streams: int) -> float:
        """GB of cache that one rank reads in a step."""
        return streams * self.context_tokens * kv_bytes_per_token(self.geometry, self.tensor_parallel_size) / 1e9

    @property
    def allreduces(self) -> int:
        """AllReduces a step: as measured, else as vLLM's model code makes them."""
        return self.measured.get("allreduces", self.geometry.expected_allreduces(self.tensor_parallel_size))

    def terms(self, n: int, streams: int = 1) -> dict[str, float]:
        """Milliseconds of a step by term, in the middle: each part, AllReduce, per token, other."""
        return {name: float(ms[0]) for name, ms in self.terms_at(n, streams, self.values).items()}

    def terms_at(self, n: int, streams: int, values: Values) -> dict[str, np.ndarray]:
        """`terms` at each of the given values."""
        if n < 1 or streams < 1:
            raise BadEstimate(f"a step of {n} tokens in {streams} streams", "count both from 1")
        return self.modelled(n, streams, values) | {"other": self.other(values)}

    def modelled(self, n: int, streams: int, values: Values) -> dict[str, np.ndarray]:
        """The terms that follow from bytes, arithmetic and collectives."""
        gb_per_ms = values["efficiency"] * values["bandwidth_gb_s"] / 1e3
        tokens, found = n * streams, {}
        for name, (gb, flops) in self.parts.items():
            read = self.routed_gb(n, streams, values["reuse"]) if name == "routed experts" else gb
            found[name] = np.maximum(read / gb_per_ms, flops * tokens / values["tflops"] * 1e3)
        found["cache"] = self.cache_gb(streams) / gb_per_ms
        kib = tokens * self.geometry.hidden_size * 2 / 1024 - self.hardware.allreduce_flat_kib.mid
        each_us = values["allreduce_us"] + values["allreduce_us_per_kib"] * max(0.0, kib)
        found["AllReduce"] = self.allreduces * each_us / 1e3
        return found | {"per token": values["token_ms"] * (tokens - 1)}

    def other(self, values: Values) -> np.ndarray:
        """What a measured step leaves over at one token, else the hardware's figure; never predicted."""
        if not self.leaves_over:
            return values["other_ms"]
        modelled = sum(self.modelled(1, 1, values).values())
        rest = self.measured["step_ms"] - modelled
        if rest.min() < 0:
            raise BadEstimate(
                f"{self.geometry.name} on {self.hardware.name}: bytes and collectives take "
                f"{modelled.max():.2f} ms, the whole measured step {self.measured['step_ms']} ms",
                "raise the efficiency or lower the AllReduce latency until they fit, or give other_ms",
            )
        return rest

    def step_at(self, n: int, streams: int, values: Values) -> np.ndarray:
        """Milliseconds of a step at each of the given values."""
        return sum(self.terms_at(n, streams, values).values(), np.zeros(1))

    def step_ms(self, n: int, streams: int = 1) -> float:
        """Milliseconds of a step that verifies n tokens in each of `streams` requests."""
        return float(self.step_at(n, streams, self.values)[0])

    def step_range_ms(self, n: int, streams: int = 1) -> Range:
        """step_ms with its extremes over every combination of the uncertain figures' extremes."""
        return Range.over(self.step_at(n, streams, self.values))

    def verify_ratio(self, n: int, streams: int = 1) -> Range:
        """v(n) = t(n) / t(1): how much dearer verifying n tokens is than decoding one."""
        return Range.over(self.step_at(n, streams, self.values) / self.step_at(1, streams, self.values))

    def break_even_at(self, k: int, streams: int, values: Values) -> np.ndarray:
        """(t(k + 1) + k t_draft + t_host) / t(1) at each of the given values."""
        spent = self.step_at(k + 1, streams, values) + k * values["draft_ms"] + values["host_ms"]
        return spent / self.step_at(1, streams, values)

    def break_even(self, k: int, streams: int = 1) -> Range:
        """The acceptance length (bonus token included) at which k drafted tokens a step neither gain nor lose."""
        return Range.over(self.break_even_at(k, streams, self.values))

    def speedup(self, acceptance_length: Any, k: int, streams: int = 1) -> tuple[float, float, float]:
        """(low, mid, high) of acceptance length x t(1) / (t(k + 1) + k t_draft + t_host).

        acceptance_length counts the bonus token, so it lies between 1 and k + 1; it may be a range.
        """
        length, cost = checked_length(acceptance_length, k), self.break_even(k, streams)
        return length.low / cost.high, length.mid / cost.mid, length.high / cost.low

    def table(self, ns: Iterable[int] = range(1, 9), streams: int = 1) -> pd.DataFrame:
        """A row a number of tokens: n, kernel, experts_loaded, step_ms, verify_ratio with its low and high."""
        rows = []
        for n in ns:
            ratio = self.verify_ratio(n, streams)
            row = {"n": n, "kernel": self.kernel(n * streams), "experts_loaded": self.experts_loaded(n, streams)}
            row |= {"step_ms": self.step_ms(n, streams), "verify_ratio": ratio.mid}
            rows.append(row | {"verify_ratio_low": ratio.low, "verify_ratio_high": ratio.high})
        return pd.DataFrame(rows)

    def inputs(self) -> pd.DataFrame:
        """Every figure that goes in: name, low, mid, high, unit, source."""
        from labkit.costmodel.inputs import inputs_of

        return inputs_of(self)


def checked_length(acceptance_length: Any, k: float) -> Range:
    """An acceptance length as a range; raises BadEstimate unless it lies between 1 and k + 1."""
    length = Range.of(acceptance_length)
    if not 1 <= length.low <= length.high <= k + 1:
        raise BadEstimate(
            f"an acceptance length of {length.low:g} to {length.high:g} with k={k:g}",
            f"it counts the bonus token: give 1 to {k + 1:g}",
        )
    return length
