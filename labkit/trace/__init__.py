"""Kineto traces of all ranks to steps, collectives and shares.

Imports wait until a function is called: the processes that only parse a file start without pandas.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.trace.errors import CaptureFailed, NoKernels, NoSteps, NotATrace, TraceNotFound

if TYPE_CHECKING:
    from labkit.trace.model import Trace
    from labkit.trace.predict import allreduce_sentence, geometry_of
    from labkit.trace.profiler import capture, obtain
    from labkit.trace.reading import conclusion, overhead_sentence, steadiness_sentence, wait_sentence
    from labkit.trace.sidebyside import compare, compare_counts
    from labkit.trace.whatif import FREE, what_if

__all__ = [
    "FREE",
    "CaptureFailed",
    "NoKernels",
    "NoSteps",
    "NotATrace",
    "Trace",
    "TraceNotFound",
    "allreduce_sentence",
    "capture",
    "compare",
    "compare_counts",
    "conclusion",
    "geometry_of",
    "load",
    "obtain",
    "overhead_sentence",
    "steadiness_sentence",
    "wait_sentence",
    "what_if",
]
LATER = {
    "FREE": "whatif",
    "Trace": "model",
    "allreduce_sentence": "predict",
    "capture": "profiler",
    "compare": "sidebyside",
    "compare_counts": "sidebyside",
    "conclusion": "reading",
    "geometry_of": "predict",
    "obtain": "profiler",
    "overhead_sentence": "reading",
    "steadiness_sentence": "reading",
    "wait_sentence": "reading",
    "what_if": "whatif",
}


def load(source: str | Path | Iterable[str | Path]) -> Trace:
    """Read the Kineto traces of all ranks: a file, several files, or a folder of .json and .json.gz files.

    What can be used of imperfect files is used and `Trace.warnings` says what was left out. Raises TraceNotFound,
    NotATrace when nothing can be read, NoKernels when launches were recorded and what they ran was not.
    """
    from labkit.trace.model import Trace
    from labkit.trace.sources import load_ranks

    return Trace(*load_ranks(source))


def __getattr__(name: str) -> Any:
    """The other names, imported when they are asked for."""
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{LATER[name]}"), name)
