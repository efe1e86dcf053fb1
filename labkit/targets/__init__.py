"""What a target model is: where it comes from, its files, geometry and tokenizer."""

from __future__ import annotations

from labkit.targets.geometry import Geometry, geometry
from labkit.targets.sources import (
    NAMES,
    BrokenTarget,
    HubUnreachable,
    Target,
    UnknownTarget,
    folder_of,
    resolve,
    text_model,
)

__all__ = [
    "NAMES",
    "BrokenTarget",
    "Geometry",
    "HubUnreachable",
    "Target",
    "UnknownTarget",
    "folder_of",
    "geometry",
    "resolve",
    "text_model",
]
