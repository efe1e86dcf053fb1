"""The speedup that simulated acceptance and measured step times predict, beside the one that was measured."""

from __future__ import annotations

from labkit.prediction.steps import (
    apart,
    at,
    care,
    doubts,
    own_steps,
    scheduling,
    scheduling_sentence,
    speedup,
    step_costs,
)
from labkit.prediction.tables import COLUMNS, beside, by_category, by_prompt, grid, overall, shown
from labkit.prediction.telling import reasons, sentence
from labkit.prediction.verdict import conclusion, headline, limits, worth

__all__ = [
    "COLUMNS",
    "apart",
    "at",
    "beside",
    "by_category",
    "by_prompt",
    "care",
    "conclusion",
    "doubts",
    "grid",
    "headline",
    "limits",
    "overall",
    "own_steps",
    "reasons",
    "scheduling",
    "scheduling_sentence",
    "sentence",
    "shown",
    "speedup",
    "step_costs",
    "worth",
]
