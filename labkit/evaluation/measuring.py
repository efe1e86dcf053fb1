"""The order of the whole measurement: k first, then streams and temperature at the best k; one start a server."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.acceptance import Acceptance
from labkit.bench import attached, steptimes
from labkit.engine import sampling
from labkit.evaluation import judging
from labkit.evaluation.candidates import BASELINE, NGRAM, candidates, label_of
from labkit.evaluation.earlier import HELD_OUT
from labkit.evaluation.rig import Rig
from labkit.evaluation.standing import ALL, PAIR, standing
from labkit.settings import Evaluation

LONGEST = 6  # notebook 02 times steps of up to this many tokens: the same file then serves both


@dataclass(frozen=True)
class Measured:
    """All that was measured: rows marked with k, streams and temperature, counts, step times, compared outputs."""

    everything: pd.DataFrame  # every row of every point, held-out prompts among them
    counts: dict[tuple[Any, ...], Acceptance]  # point: the server's own counters, where requests overlapped
    times: pd.DataFrame  # bench.step_times of the baseline
    compared: pd.DataFrame  # agreement.judge of each greedy point of the head
    best_k: int
    how: str  # side by side or one after the other, and why

    def rows(self, settings: Evaluation) -> pd.DataFrame:
        """The rows of the settings' own point: greedy, `concurrency` streams, k = num_speculative_tokens."""
        rows = self.everything
        own = (rows["streams"] == settings.concurrency) & (rows["temperature"] == 0)
        wanted = (rows["variant"] != "eagle3") | (rows["k"] == settings.num_speculative_tokens)
        return rows[own & wanted].reset_index(drop=True)

    @property
    def sweep(self) -> pd.DataFrame:
        """The rows of the benchmark prompts."""
        return self.everything[self.everything["category"] != HELD_OUT].reset_index(drop=True)


def sweep(
    settings: Evaluation, head: Path, benchmark: pd.DataFrame, held: pd.DataFrame, also: Sequence[Path] = ()
) -> Measured:
    """Measure the head against no speculation and n-gram: each k greedy at the settings' concurrency, then at the
    best k every number of streams, and sampling at `sweep_temperature`.

    What is on disk under the same settings (also in the folders `also` of other stages) is not measured again.
    Servers stand side by side where the memory reaches (`side_by_side`): all, or the baseline beside the head;
    else they are measured one after the other.
    """
    attached.require_answers(settings)
    found = candidates(settings, head, also)
    rig = Rig(settings, found, also)
    target = None if settings.server else rig.target
    how = standing(settings, target, sum(each.measurable for each in found.values()), also)
    rig.flags = how.flags
    if how.servers == ALL:
        compared, times = at_once(rig, benchmark, held)
    else:
        compared, times = in_turn(rig, benchmark, held, pair=how.servers == PAIR)
    return Measured(rig.rows(), rig.counts, times, compared, rig.best_k(), how.sentence)


def at_once(rig: Rig, benchmark: pd.DataFrame, held: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """All servers stand: every point is measured by turns. Returns compared outputs and step times."""
    main = label_of(rig.settings.num_speculative_tokens)
    with rig.serving(rig.candidates):
        rig.measure(list(rig.candidates), benchmark)
        rig.measure([BASELINE, main], held)
        extra_points(rig, [BASELINE, *along(rig), label_of(rig.best_k())], benchmark)
        return of_baseline(rig)


def in_turn(
    rig: Rig, benchmark: pd.DataFrame, held: pd.DataFrame, *, pair: bool
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One server at a time, or with `pair` the baseline beside the head, measured by turns with it.

    The settings' own k comes last of the head's, so that its server still stands if it is the best.
    """
    main, beside = rig.settings.num_speculative_tokens, [BASELINE] if pair else []
    for k in (k for k in rig.settings.ks if k != main):
        with rig.serving([label_of(k)]):
            rig.measure([label_of(k)], benchmark)
    with contextlib.ExitStack() as stack:
        stack.enter_context(rig.serving(beside))
        with rig.serving([label_of(main)]):
            rig.measure([*beside, label_of(main)], benchmark)
            rig.measure([*beside, label_of(main)], held)
            if rig.best_k() == main:
                extra_points(rig, [*beside, label_of(main)], benchmark)
        if rig.best_k() != main:
            with rig.serving([label_of(rig.best_k())]):
                extra_points(rig, [*beside, label_of(rig.best_k())], benchmark)
        if not pair:
            stack.enter_context(rig.serving([BASELINE]))
            rig.measure([BASELINE], benchmark)
            rig.measure([BASELINE], held)
            extra_points(rig, [BASELINE], benchmark)
        compared, times = of_baseline(rig)
    with rig.serving([NGRAM]):
        rig.measure([NGRAM], benchmark)
        extra_points(rig, along(rig), benchmark)
    return compared, times


def along(rig: Rig) -> list[str]:
    """n-gram, where it is measured at all points too: at full scale."""
    return [NGRAM] if rig.settings.scale == "full" else []


def extra_points(rig: Rig, labels: Sequence[str], benchmark: pd.DataFrame) -> None:
    """More streams, and one stream at a temperature, which no engine is asked for that would write garbage."""
    for streams in rig.settings.streams:
        if streams != rig.settings.concurrency and labels:
            rig.measure(labels, benchmark, streams=streams)
    if rig.settings.sweep_temperature and labels and (rig.settings.server or not sampling.broken()):
        rig.measure(labels, benchmark, temperature=rig.settings.sweep_temperature)


def of_baseline(rig: Rig) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What the baseline's server is asked besides: near-ties of differing outputs, and its step times."""
    server, settings = rig.servers[BASELINE], rig.settings
    compared = judging.judged_points(rig.rows(), server, settings)
    longest = max(LONGEST, max(settings.ks) + 1)
    points = {streams: (1, rig.best_k() + 1) for streams in settings.streams if streams > 1}
    at = rig.at(settings.concurrency, 0.0, settings.repeats)
    return compared, steptimes.kept(at, server, longest, points=points, also=rig.also)
