"""The EAGLE-3 head: configuration, a fresh one from the target's weights, export for serving, pre-flight."""

from __future__ import annotations

from labkit.draft.average import BadShare, Unlike, average
from labkit.draft.checks import preflight
from labkit.draft.config import FLAGS, UnknownArchitecture, configure, layer_config, shapes
from labkit.draft.export import Occupied, UnknownForm, convert, export
from labkit.draft.forms import BadHead, read
from labkit.draft.head import build, load
from labkit.draft.locate import NoHead, locate, origin, shipped, shipped_for
from labkit.draft.problem import Problem
from labkit.draft.servable import servable
from labkit.draft.warm import warm_start
from labkit.draft.weights import MissingWeights

__all__ = [
    "FLAGS",
    "BadHead",
    "BadShare",
    "MissingWeights",
    "NoHead",
    "Occupied",
    "Problem",
    "UnknownArchitecture",
    "UnknownForm",
    "Unlike",
    "average",
    "build",
    "configure",
    "convert",
    "export",
    "layer_config",
    "load",
    "locate",
    "origin",
    "preflight",
    "read",
    "servable",
    "shapes",
    "shipped",
    "shipped_for",
    "warm_start",
]
