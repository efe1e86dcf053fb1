"""Hardware figures of data/hardware.json, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit import files, settings
from labkit.costmodel.ranges import Range
from labkit.errors import LabError

FIGURES = ("bandwidth_gb_s", "efficiency", "allreduce_us", "allreduce_us_per_token", "other_ms")

NOTHING = Range.of(0)


class UnknownHardware(LabError):
    """A hardware name is not in data/hardware.json."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One server's figures.

    bandwidth_gb_s: memory bandwidth of a GPU from its datasheet; efficiency: the share of it that decoding
    reaches. allreduce_us: one AllReduce of one token's state; allreduce_us_per_token: what each further token
    adds. other_ms: everything else in a step. measured: by model, a step's time (one token, one stream) and
    count of AllReduces; where that is known, other_ms is what it leaves over.
    """

    name: str
    gpus: int
    bandwidth_gb_s: Range
    efficiency: Range
    allreduce_us: Range = NOTHING
    allreduce_us_per_token: Range = NOTHING
    other_ms: Range = NOTHING
    measured: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)


def hardware(name: str) -> Hardware:
    """The hardware of that name in data/hardware.json; raises UnknownHardware with the names there are."""
    known = files.read_json(settings.root() / "data" / "hardware.json")
    if name not in known:
        raise UnknownHardware(f"hardware {name!r} is not in data/hardware.json", f"use one of {', '.join(known)}")
    entry = known[name]
    figures = {figure: Range.of(entry[figure]) for figure in FIGURES if figure in entry}
    sources = {figure: entry[figure].get("source", "") for figure in figures}
    return Hardware(name=name, gpus=entry["gpus"], measured=entry.get("measured", {}), sources=sources, **figures)
