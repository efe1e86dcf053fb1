"""Go, no-go, or unclear and what to measure next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from labkit.costmodel.questions import sensitivity
from labkit.costmodel.ranges import Range
from labkit.costmodel.step import StepModel

GO, NO_GO, UNCLEAR = "go", "no-go", "unclear"

# How each uncertain input is had.
MEASURE = {
    "acceptance_length": "acceptance: serve the head, or simulate n-gram on recorded answers; read the counters",
    "reuse": "expert reuse r(n): record routing on your own prompts (notebook 03)",
    "draft_ms": "the time of a drafted token: serve any head of that shape, vLLM's synthetic acceptance will do",
    "host_ms": "what a speculating step adds besides: serve with synthetic acceptance, compare step times",
    "efficiency": "t(n) at two points (bench.step_times, costmodel.calibrate), or a copy benchmark",
    "allreduce_us": "AllReduce latency: all_reduce_perf, or a trace of all ranks (notebook 01)",
    "allreduce_us_per_kib": "AllReduce at (k + 1) tokens' size: all_reduce_perf",
    "other_ms": "a plain decode step: trace it (notebook 01)",
    "token_ms": "t(n) at two points (bench.step_times, costmodel.calibrate)",
    "tflops": "t(n) at your concurrency (bench.step_times with streams)",
}


@dataclass(frozen=True)
class Verdict:
    """`word`: "go" when the whole interval lies above 1, "no-go" when below, else "unclear"."""

    word: str
    speedup: Range
    widest: str  # the input that widens the interval most, "" where none is uncertain
    sensitivity: pd.DataFrame

    @property
    def next_measurement(self) -> str:
        """What to measure next to narrow the interval."""
        return MEASURE.get(self.widest, self.widest)

    def sentence(self) -> str:
        """The verdict as a sentence."""
        text = f"{self.word}: predicted speedup {self.speedup.told()}"
        if self.word == UNCLEAR and self.widest:
            text += f"; {self.widest} widens it most, so next measure {self.next_measurement}"
        return text + "."


def word_for(speedup: Range) -> str:
    """Which verdict an interval gives."""
    return GO if speedup.low > 1 else NO_GO if speedup.high < 1 else UNCLEAR


def verdict(model: StepModel, acceptance_length: Any, k: int, streams: int = 1) -> Verdict:
    """Whether k drafted tokens a step pay, over the intervals of acceptance, reuse, drafting and the machine."""
    speedup = Range(*model.speedup(acceptance_length, k, streams))
    moved = sensitivity(model, acceptance_length, k, streams)
    widest = str(moved["input"].iloc[0]) if len(moved) and moved["width"].iloc[0] > 0 else ""
    return Verdict(word_for(speedup), speedup, widest, moved)
