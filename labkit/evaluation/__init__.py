"""What notebook 05 asks of a head: the sweep over k, streams and temperature, its prediction, go or no-go."""

from __future__ import annotations

from labkit.evaluation.advice import rules
from labkit.evaluation.earlier import HELD_OUT, Pipeline, require_fit
from labkit.evaluation.judging import sentence as agreement_sentence
from labkit.evaluation.measuring import Measured, sweep
from labkit.evaluation.predicting import Predictor
from labkit.evaluation.sets import acceptances, speedups
from labkit.evaluation.streams import crossover, crossover_sentence, greedy
from labkit.evaluation.tables import by_category, points, positions, shown
from labkit.evaluation.verdicts import best, by_k, conclusion, headline, sweep_headline, verdict

__all__ = [
    "HELD_OUT",
    "Measured",
    "Pipeline",
    "Predictor",
    "acceptances",
    "agreement_sentence",
    "best",
    "by_category",
    "by_k",
    "conclusion",
    "crossover",
    "crossover_sentence",
    "greedy",
    "headline",
    "points",
    "positions",
    "require_fit",
    "rules",
    "shown",
    "speedups",
    "sweep",
    "sweep_headline",
    "verdict",
]
