"""The time of a decoding step that verifies n tokens, and what speculation gains by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from labkit.costmodel.hardware import Hardware
from labkit.costmodel.hardware import hardware as hardware_of
from labkit.costmodel.ranges import Corner, Range, corners
from labkit.costmodel.weights import expert_bytes, grouped_int, kv_bytes_per_token, weights
from labkit.errors import LabError
from labkit.experts.windows import expected_unique
from labkit.targets import Geometry
from labkit.targets import geometry as geometry_of

LOADINGS = ("auto", "unique", "pairwise")


class BadEstimate(LabError):
    """The cost model was given figures that cannot be, or that contradict a measurement."""


@dataclass(frozen=True)
class StepModel:
    """t(n) = bytes(n) / (efficiency x bandwidth) + AllReduces x (latency + further tokens) + other.

    geometry, hardware: objects or shipped names. reuse: r in U = k + r (U_uniform - k), one figure or one a
    window length (experts.unique_by_window), interpolated between; 1 is independent routing. loading: whether
    the kernel reads each expert once ("unique"), or again for every token that chose it ("pairwise"); "auto"
    follows vLLM's rule. draft_ms: one drafted token; host_ms: what a speculating step adds besides. other_ms:
    everything else in a step; None takes what a measured step leaves over, or the hardware's figure. Figures
    may be ranges. Memory-bound decoding only: no term for arithmetic.
    """

    geometry: Geometry | str
    hardware: Hardware | str
    tensor_parallel_size: int = 0  # 0: all GPUs
    context_tokens: int = 2048
    reuse: Any = 1.0
    loading: str = "auto"
    draft_ms: Any = 0.0
    host_ms: Any = 0.0
    other_ms: Any = None
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
        if self.loading not in LOADINGS:
            raise BadEstimate(f"loading={self.loading!r}", f"use one of {', '.join(LOADINGS)}")
        points = self.reuse if isinstance(self.reuse, Mapping) else {1: self.reuse}
        fill(self, "curve", {int(n): Range.of(r) for n, r in sorted(points.items())})
        fill(self, "draft_ms", Range.of(self.draft_ms))
        fill(self, "host_ms", Range.of(self.host_ms))

    @cached_property
    def inputs(self) -> dict[str, Range]:
        """The figures that may be uncertain, by name."""
        names = ("efficiency", "allreduce_us", "allreduce_us_per_token")
        ranges = {name: getattr(self.hardware, name) for name in names}
        # Where a step was measured, what it leaves over follows from the other figures: no uncertainty of its own.
        given = self.hardware.other_ms if self.other_ms is None else Range.of(self.other_ms)
        ranges["other_ms"] = Range.of(0) if self.other_ms is None and self.measured else given
        # One stands for all window lengths: whether any is uncertain.
        ranges["reuse"] = next((r for r in self.curve.values() if not r.exact), Range.of(1))
        return ranges | {"draft_ms": self.draft_ms, "host_ms": self.host_ms}

    @property
    def measured(self) -> Mapping[str, Any]:
        """What was measured of this model on this hardware, if anything."""
        whole = self.tensor_parallel_size == self.hardware.gpus
        return self.hardware.measured.get(self.geometry.name, {}) if whole else {}

    @cached_property
    def rank_gb(self) -> dict[str, float]:
        """GB that one rank reads at one token, by part."""
        table = weights(self.geometry, self.tensor_parallel_size)
        return dict(zip(table["part"], table["gb_per_rank"], strict=True))

    def kernel(self, tokens: int) -> str:
        """How vLLM's fused MoE reads experts at this many tokens a step: "unique" or "pairwise".

        Without expert parallelism, and unless experts are int4 or int8 in groups, it skips sorting tokens by
        expert when tokens x k x 4 <= N, and reads an expert again for each pair (vLLM 0.24 to 0.32).
        """
        if self.loading != "auto":
            return self.loading
        few = tokens * self.geometry.num_experts_per_tok * 4 <= self.geometry.n_routed_experts
        return "pairwise" if few and not grouped_int(self.geometry) else "unique"

    def experts_loaded(self, n: int, streams: int = 1, which: str = "mid") -> float:
        """Expert reads a layer of a step with `streams` requests of n tokens each.

        Within a request tokens reuse experts by r(n); requests are taken as independent of each other.
        """
        total, chosen = self.geometry.n_routed_experts, self.geometry.num_experts_per_tok
        if not total:
            return 0.0
        if self.kernel(n * streams) == "pairwise":
            return float(n * streams * chosen)
        r = np.interp(n, list(self.curve), [value.at(which) for value in self.curve.values()])
        one = chosen + r * (expected_unique(total, chosen, n) - chosen)
        return float(total * (1 - (1 - one / total) ** streams))

    def gigabytes(self, n: int, streams: int = 1, which: str = "mid") -> dict[str, float]:
        """GB that one rank reads in a step, by part."""
        table = dict(self.rank_gb)
        if "routed experts" in table:
            loaded = self.experts_loaded(n, streams, which) * self.geometry.num_moe_layers
            table["routed experts"] = loaded * expert_bytes(self.geometry) / self.tensor_parallel_size / 1e9
        cached = streams * self.context_tokens * kv_bytes_per_token(self.geometry, self.tensor_parallel_size)
        return table | {"cache": cached / 1e9}

    @property
    def allreduces(self) -> int:
        """AllReduces a step: as measured, else as vLLM's model code makes them."""
        return self.measured.get("allreduces", self.geometry.expected_allreduces(self.tensor_parallel_size))

    def terms(self, n: int, streams: int = 1, corner: Corner | None = None) -> dict[str, float]:
        """Milliseconds of a step by term: each part's reading, AllReduce, other; at the middle or a corner."""
        if n < 1 or streams < 1:
            raise BadEstimate(f"a step of {n} tokens in {streams} streams", "count both from 1")
        at = corner or dict.fromkeys(self.inputs, "mid")
        return self.modelled(n, streams, at) | {"other": self.other(at)}

    def modelled(self, n: int, streams: int, at: Corner) -> dict[str, float]:
        """The terms that follow from bytes and collectives."""
        value = {name: self.inputs[name].at(which) for name, which in at.items()}
        gb_per_ms = value["efficiency"] * self.hardware.bandwidth_gb_s.mid / 1e3
        terms = {name: gb / gb_per_ms for name, gb in self.gigabytes(n, streams, at["reuse"]).items()}
        each_us = value["allreduce_us"] + value["allreduce_us_per_token"] * (n * streams - 1)
        return terms | {"AllReduce": self.allreduces * each_us / 1e3}

    def other(self, at: Corner) -> float:
        """What a measured step leaves over at one token, else the hardware's figure; never predicted."""
        if self.other_ms is not None or not self.measured:
            return self.inputs["other_ms"].at(at["other_ms"])
        modelled = sum(self.modelled(1, 1, at).values())
        rest = self.measured["step_ms"] - modelled
        if rest < 0:
            raise BadEstimate(
                f"{self.geometry.name} on {self.hardware.name}: bytes and collectives take {modelled:.2f} ms, "
                f"the whole measured step {self.measured['step_ms']} ms",
                "raise the efficiency or lower the AllReduce latency until they fit, or give other_ms",
            )
        return rest

    def step_ms(self, n: int, streams: int = 1, corner: Corner | None = None) -> float:
        """Milliseconds of a step that verifies n tokens in each of `streams` requests."""
        return sum(self.terms(n, streams, corner).values())

    def over_corners(self, figure: Callable[[Corner | None], float]) -> Range:
        """A figure in the middle and its extremes over every combination of the uncertain inputs' extremes."""
        middle = figure(None)
        values = [figure(corner) for corner in corners(self.inputs)]
        return Range(min(middle, *values), middle, max(middle, *values))

    def step_range_ms(self, n: int, streams: int = 1) -> Range:
        """step_ms with its interval."""
        return self.over_corners(lambda corner: self.step_ms(n, streams, corner))

    def verify_ratio(self, n: int, streams: int = 1) -> Range:
        """v(n) = t(n) / t(1): how much dearer verifying n tokens is than decoding one."""
        return self.over_corners(lambda at: self.step_ms(n, streams, at) / self.step_ms(1, streams, at))

    def break_even(self, k: int, streams: int = 1) -> Range:
        """The acceptance length (bonus token included) at which k drafted tokens a step neither gain nor lose."""
        return self.over_corners(lambda at: self.spec_ms(k, streams, at) / self.step_ms(1, streams, at))

    def spec_ms(self, k: int, streams: int = 1, corner: Corner | None = None) -> float:
        """Milliseconds of a step that drafts k tokens and verifies k + 1."""
        at = corner or dict.fromkeys(self.inputs, "mid")
        drafting = k * self.draft_ms.at(at["draft_ms"]) + self.host_ms.at(at["host_ms"])
        return self.step_ms(k + 1, streams, corner) + drafting

    def speedup(self, acceptance_length: Any, k: int, streams: int = 1) -> tuple[float, float, float]:
        """(low, mid, high) of acceptance length x t(1) / (t(k + 1) + k t_draft + t_host).

        acceptance_length counts the bonus token, so it lies between 1 and k + 1; it may be a range.
        """
        length = Range.of(acceptance_length)
        if not 1 <= length.low <= length.high <= k + 1:
            raise BadEstimate(
                f"an acceptance length of {length.low:g} to {length.high:g} with k={k}",
                f"it counts the bonus token: give 1 to {k + 1}",
            )
        cost = self.break_even(k, streams)
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
