"""What a target model is: where it comes from, its files, geometry and tokenizer."""

from __future__ import annotations

from labkit.targets.geometry import Geometry, geometry
from labkit.targets.sources import BrokenTarget, HubUnreachable, Target, UnknownTarget, resolve, text_model

__all__ = [
    "BrokenTarget",
    "Geometry",
    "HubUnreachable",
    "Target",
    "UnknownTarget",
    "geometry",
    "resolve",
    "text_model",
]
