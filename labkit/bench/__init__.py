"""Streaming benchmark of an OpenAI-compatible server: prompts, a row a request, summaries, paired comparison."""

from __future__ import annotations

from labkit.bench.conditions import fingerprint
from labkit.bench.measure import measure, measure_variant
from labkit.bench.pairing import MixedCounts, MixedLevels, interval, paired, speedup
from labkit.bench.prompts import BadPrompts, Prompt, as_prompts, prompts, selection
from labkit.bench.run import BadRun, MeasurementFailed, NoModel, NothingMeasured, ServerGone, run
from labkit.bench.statistics import levels, rate_interval, rate_told, rates_sentence, succeeded, summary
from labkit.bench.steptimes import measure_baseline, measure_step_times, speculating_step_times, step_times
from labkit.bench.together import Side, run_together

__all__ = [
    "BadPrompts",
    "BadRun",
    "MeasurementFailed",
    "MixedCounts",
    "MixedLevels",
    "NoModel",
    "NothingMeasured",
    "Prompt",
    "ServerGone",
    "Side",
    "as_prompts",
    "fingerprint",
    "interval",
    "levels",
    "measure",
    "measure_baseline",
    "measure_step_times",
    "measure_variant",
    "paired",
    "prompts",
    "rate_interval",
    "rate_told",
    "rates_sentence",
    "run",
    "run_together",
    "selection",
    "speculating_step_times",
    "speedup",
    "step_times",
    "succeeded",
    "summary",
]
