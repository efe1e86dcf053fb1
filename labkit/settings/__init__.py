"""The parameters of each notebook, and where the lab, its outputs and its cache lie."""

from __future__ import annotations

from labkit.settings.base import SCALES, BadParameter, Settings, cache, here, outputs, place, root
from labkit.settings.notebooks import (
    NOTEBOOKS,
    Eagle3Pipeline,
    Evaluation,
    ExpertActivation,
    NgramBaseline,
    Profiling,
)

__all__ = [
    "NOTEBOOKS",
    "SCALES",
    "BadParameter",
    "Eagle3Pipeline",
    "Evaluation",
    "ExpertActivation",
    "NgramBaseline",
    "Profiling",
    "Settings",
    "cache",
    "here",
    "outputs",
    "place",
    "root",
]
