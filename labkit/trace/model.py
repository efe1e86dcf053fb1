"""A trace of all ranks as data frames."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from labkit.trace import breakdown, matching, names
from labkit.trace.calls import KINDS
from labkit.trace.errors import NoSteps
from labkit.trace.rank import Rank
from labkit.trace.steps import Marker, marker

if TYPE_CHECKING:
    from labkit.targets import Geometry

EXACT_NS = 1 << 53  # whole numbers up to here survive as float64


class Trace:
    """Kineto traces of one or more ranks. Times in frames are microseconds on each rank's own clock.

    `origin_ns` was taken off every time stamp: 0 unless they are too large for a float64 to hold nanoseconds.
    `warnings` says what was left out or is doubtful.
    """

    def __init__(self, ranks: list[Rank], warnings: list[str]) -> None:
        """Match steps and collectives across the ranks."""
        self.ranks = ranks
        self.warnings = warnings
        self.numbers, leads = matching.step_numbers(ranks)
        self.matched, self.clock_lead_ns = matching.match(ranks, self.numbers)
        if not any(len(rank.calls) for rank in ranks):
            self.clock_lead_ns = np.array(leads, np.int64) - leads[0]
        stamps = [rank.steps.start[:1] for rank in ranks] + [rank.start[:1] for rank in ranks]
        first = np.concatenate(stamps)
        self.origin_ns = int(first.min()) if len(first) and first.max() > EXACT_NS else 0
        self.note_uneven_steps()

    @cached_property
    def lines(self) -> list[breakdown.Line]:
        """The time line of each rank."""
        return [breakdown.line(rank, matched) for rank, matched in zip(self.ranks, self.matched, strict=True)]

    def us(self, stamp_ns: np.ndarray) -> np.ndarray:
        """Time stamps in µs."""
        return (stamp_ns - self.origin_ns) / 1e3

    def marks(self, rank: Rank) -> list[Marker]:
        """What each step's marker says; steps told by their repetition are decode steps."""
        known = [marker(rank.names[i]) if i >= 0 else Marker("decode") for i in rank.steps.name]
        return [mark or Marker("step") for mark in known]

    def note_uneven_steps(self) -> None:
        """Warn where ranks recorded different steps: the others have no partner to tell waiting by."""
        if len(self.ranks) < 2 or not all(len(rank.steps) for rank in self.ranks):
            return
        common = set.intersection(*({int(n) for n in numbers} for numbers in self.numbers))
        extra = {rank.rank: len(rank.steps) - len(common) for rank in self.ranks}
        if any(extra.values()):
            told = ", ".join(f"rank {rank} has {count} more" for rank, count in extra.items() if count)
            self.warnings.append(
                f"{len(common)} steps are in every rank's trace; {told} (a profiler that started or stopped apart)"
            )

    def steps(self) -> pd.DataFrame:
        """A row a rank and step: rank step phase start_us dur_us period_us and the marker's requests and tokens.

        dur_us is the marked step (on a GPU from its first kernel to its last); period_us runs to the next decode
        step, so it contains sampling and the host's work between; NaN where no decode step follows.
        """
        frames = []
        for rank, numbers in zip(self.ranks, self.numbers, strict=True):
            marks = self.marks(rank)
            phases = np.array([mark.phase for mark in marks], object)
            frame = pd.DataFrame(
                {
                    "rank": rank.rank,
                    "step": numbers,
                    "phase": phases,
                    "start_us": self.us(rank.steps.start),
                    "dur_us": (rank.steps.end - rank.steps.start) / 1e3,
                    "period_us": periods(rank.steps.start, phases) / 1e3,
                    "context_requests": [mark.context_requests for mark in marks],
                    "context_tokens": [mark.context_tokens for mark in marks],
                    "generation_requests": [mark.generation_requests for mark in marks],
                    "generation_tokens": [mark.generation_tokens for mark in marks],
                }
            )
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    def collectives(self) -> pd.DataFrame:
        """A row a call and rank: rank step call collective name start_us dur_us transfer_us wait_us late_us bytes.

        transfer_us is the shortest over the ranks that made the call together, wait_us the rest of dur_us; late_us
        is the latest start over the ranks minus own start on aligned clocks: where it is below wait_us, the rank
        was held up itself after all had come. bytes is the larger of input and output on this rank; fused says
        that the kernel does more than communicate. step, transfer_us, wait_us, late_us and bytes are missing where
        unknown: outside of steps, without a partner, without shapes.
        """
        return self.every_call.copy()

    @cached_property
    def every_call(self) -> pd.DataFrame:
        """The collectives, put together once: counts, waits and summaries all ask for them."""
        frames = []
        for rank, numbers, matched in zip(self.ranks, self.numbers, self.matched, strict=True):
            calls = rank.calls
            step = pd.array(np.append(numbers, 0)[matched.step], dtype="Int64")
            step[matched.step < 0] = pd.NA
            size = pd.array(calls.bytes, dtype="Int64")
            size[calls.bytes < 0] = pd.NA
            frame = pd.DataFrame(
                {
                    "rank": rank.rank,
                    "step": step,
                    "call": matched.call,
                    "collective": pd.Categorical.from_codes(calls.kind, KINDS).astype(object),
                    "name": [rank.names[i] for i in calls.name],
                    "start_us": self.us(calls.start),
                    "dur_us": (calls.end - calls.start) / 1e3,
                    "transfer_us": matched.transfer / 1e3,
                    "wait_us": matched.wait / 1e3,
                    "late_us": matched.late / 1e3,
                    "bytes": size,
                    "fused": calls.fused,
                }
            )
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    def breakdown(self, *, window: str = "step") -> pd.DataFrame:
        """A row a rank, step and category: rank step phase category dur_us share; the shares of a step sum to 1.

        window="step" divides the marked step, "period" the time to the next decode step (steps without one are
        left out). Idle is time in which nothing ran. Communication under compute is the compute's time here.
        """
        frames = [self.rank_breakdown(i, window) for i in range(len(self.ranks))]
        return pd.concat(frames, ignore_index=True)

    def rank_breakdown(self, i: int, window: str) -> pd.DataFrame:
        """The breakdown of one rank."""
        start, end, numbers, phases = self.windows(i, window)
        spent = self.lines[i].spent(start, end) / 1e3
        count = len(names.CATEGORIES)
        length = np.repeat((end - start) / 1e3, count)
        return pd.DataFrame(
            {
                "rank": self.ranks[i].rank,
                "step": np.repeat(numbers, count),
                "phase": np.repeat(phases, count),
                "category": np.tile(np.array(names.CATEGORIES, object), len(numbers)),
                "dur_us": spent.ravel(),
                "share": np.divide(spent.ravel(), length, out=np.zeros(spent.size), where=length > 0),
            }
        )

    def windows(self, i: int, window: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Start, end, number and phase of the windows of one rank."""
        rank = self.ranks[i]
        phases = np.array([mark.phase for mark in self.marks(rank)], object)
        start, end = rank.steps.start, rank.steps.end
        keep = np.ones(len(start), bool)
        if window == "period":
            length = periods(start, phases)
            keep = ~np.isnan(length)
            end = start + np.where(keep, length, 0).astype(np.int64)
        return start[keep], end[keep], self.numbers[i][keep], phases[keep]

    def decode_phase(self) -> str:
        """The phase that summaries are over: decode; where no marker tells phases, all steps."""
        phases = {mark.phase for rank in self.ranks for mark in self.marks(rank)}
        for phase in ("decode", "step", "mixed", "prefill"):
            if phase in phases:
                return phase
        raise NoSteps(
            "the trace has no steps: no marker, and nothing that repeats",
            "profile a few decode steps with vLLM's or SGLang's profiler, which mark them",
        )

    def step_ms(self) -> float:
        """Median length of a decode step over all ranks and steps, ms."""
        steps = self.steps()
        return float(steps.loc[steps["phase"] == self.decode_phase(), "dur_us"].median()) / 1e3

    def summary(self) -> pd.DataFrame:
        """A row a rank over its decode steps. See labkit.trace.summary."""
        return self.by_rank.copy()

    @cached_property
    def by_rank(self) -> pd.DataFrame:
        """The summary, computed once."""
        from labkit.trace import summary

        return summary.by_rank(self)

    def parts(self, *, window: str = "step") -> pd.DataFrame:
        """Mean breakdown of the decode steps: rank category ms_per_step share. See labkit.trace.summary."""
        from labkit.trace import summary

        return summary.parts(self, window)

    def waits(self, collective: str = "AllReduce") -> pd.DataFrame:
        """Mean wait and transfer at each call of a decode step. See labkit.trace.summary."""
        from labkit.trace import summary

        return summary.waits(self, collective)

    def counts(self, geometry: Geometry | None = None) -> pd.DataFrame:
        """Collectives a decode step beside what the geometry predicts. See labkit.trace.predict."""
        from labkit.trace import predict

        return predict.counts(self, geometry)

    def kernels(self) -> pd.DataFrame:
        """What ran in decode steps by name. See labkit.trace.summary."""
        from labkit.trace import summary

        return summary.kernels(self)

    def timeline(self, step: int | None = None) -> pd.DataFrame:
        """The stretches of one decode step on all ranks, on one clock. See labkit.trace.summary."""
        from labkit.trace import summary

        return summary.timeline(self, step)


def periods(start: np.ndarray, phases: np.ndarray) -> np.ndarray:
    """ns from each step's start to the next's where both decode; NaN elsewhere."""
    length = np.full(len(start), np.nan)
    if len(start) > 1:
        alike = (phases[1:] == phases[:-1]) & np.isin(phases[1:], ["decode", "step"])
        length[:-1] = np.where(alike, np.diff(start), np.nan)
    return length
