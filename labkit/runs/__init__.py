"""Run folders, provenance, execution through papermill, progress and rendered pages."""

from __future__ import annotations

from labkit.progress import progress
from labkit.runs.archive import BadArchive, BadRecord, UnknownRun
from labkit.runs.execute import PartDone, StageFailed, UnknownNotebook, execute, find_notebook, run_all
from labkit.runs.render import render
from labkit.runs.stage import Stage, headline_of

__all__ = [
    "BadArchive",
    "BadRecord",
    "PartDone",
    "Stage",
    "StageFailed",
    "UnknownNotebook",
    "UnknownRun",
    "execute",
    "find_notebook",
    "headline_of",
    "progress",
    "render",
    "run_all",
]
