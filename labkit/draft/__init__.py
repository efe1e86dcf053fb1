"""The EAGLE-3 head: configuration, a fresh one from the target's weights, export for serving, pre-flight."""

from __future__ import annotations

from labkit.draft.build import BadHead, UnknownArchitecture, build, export, load
from labkit.draft.preflight import preflight

__all__ = ["BadHead", "UnknownArchitecture", "build", "export", "load", "preflight"]
