"""The EAGLE-3 head: configuration, a fresh one from the target's weights, export for serving, pre-flight."""

from __future__ import annotations

from labkit.draft.checks import preflight
from labkit.draft.head import FLAGS, BadHead, UnknownArchitecture, build, export, load
from labkit.draft.locate import NoHead, locate
from labkit.draft.warm import warm_start

__all__ = [
    "FLAGS",
    "BadHead",
    "NoHead",
    "UnknownArchitecture",
    "build",
    "export",
    "load",
    "locate",
    "preflight",
    "warm_start",
]
