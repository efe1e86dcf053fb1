"""Step times as measured (bench.step_times), with the questions that a StepModel answers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from labkit.costmodel.fitting import fitted
from labkit.costmodel.ranges import Range
from labkit.costmodel.step import BadEstimate, StepModel, checked_length


@dataclass(frozen=True)
class MeasuredSteps:
    """t(n) by interpolation between the measured n of as many streams; never beyond them.

    draft_ms: one drafted token; host_ms: what a speculating step adds besides. Both may be ranges.
    """

    times: pd.DataFrame  # n streams step_ms low_ms high_ms
    draft_ms: Range
    host_ms: Range

    def step_range_ms(self, n: float, streams: int = 1) -> Range:
        """t(n) in each of `streams` requests, ms; raises BadEstimate for what was not measured."""
        measured = self.times[self.times["streams"] == streams].sort_values("n")
        if measured.empty or not measured["n"].iloc[0] <= n <= measured["n"].iloc[-1]:
            known = self.times.groupby("streams")["n"].agg(["min", "max"])
            told = "; ".join(f"{low:g} to {high:g} in {s} streams" for s, low, high in known.itertuples())
            raise BadEstimate(f"t({n:g}) in {streams} streams was not measured (but {told})", "measure it")
        return Range(*(float(np.interp(n, measured["n"], measured[c])) for c in ("low_ms", "step_ms", "high_ms")))

    def step_ms(self, n: float, streams: int = 1) -> float:
        """The middle of step_range_ms."""
        return self.step_range_ms(n, streams).mid

    def verify_ratio(self, n: float, streams: int = 1) -> Range:
        """v(n) = t(n) / t(1)."""
        return ratio(self.step_range_ms(n, streams), self.step_range_ms(1, streams)) if n != 1 else Range(1, 1, 1)

    def break_even(self, k: float, streams: int = 1) -> Range:
        """The acceptance length (bonus included) at which k drafted tokens a step neither gain nor lose."""
        step = self.step_range_ms(k + 1, streams)
        ends = zip(step, self.draft_ms, self.host_ms, strict=True)
        return ratio(Range(*(t + k * draft + host for t, draft, host in ends)), self.step_range_ms(1, streams))

    def speedup(self, acceptance_length: Any, k: float, streams: int = 1) -> tuple[float, float, float]:
        """(low, mid, high) of acceptance length / break_even, as StepModel.speedup."""
        length, cost = checked_length(acceptance_length, k), self.break_even(k, streams)
        return length.low / cost.high, length.mid / cost.mid, length.high / cost.low


def ratio(top: Range, bottom: Range) -> Range:
    """The quotient of two ranges that know nothing of each other."""
    return Range(top.low / bottom.high, top.mid / bottom.mid, top.high / bottom.low)


def calibrate(
    step_times: pd.DataFrame, *, model: StepModel | None = None, draft_ms: Any = None, host_ms: Any = None
) -> MeasuredSteps | StepModel:
    """Measured step times as a cost model.

    `step_times`: columns n streams step_ms low_ms high_ms, of bench.step_times, a trace, or a server with vLLM's
    synthetic acceptance. Without `model`: interpolation between the points, never beyond them. With a StepModel:
    its unknown figures fitted to two points or more (`fitted`), which predicts the others. Raises BadEstimate
    without a measured t(1).
    """
    known = step_times.dropna(subset=["step_ms"])
    if not (known["n"] == 1).any():
        raise BadEstimate("there is no t(1) among the step times", "measure n = 1 too: every ratio is over it")
    given = {name: value for name, value in (("draft_ms", draft_ms), ("host_ms", host_ms)) if value is not None}
    if model is not None:
        return dataclasses.replace(fitted(known, model), **given)
    return MeasuredSteps(known, Range.of(draft_ms or 0.0), Range.of(host_ms or 0.0))
