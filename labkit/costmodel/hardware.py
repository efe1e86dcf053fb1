"""Hardware figures of data/hardware.json, each with its source, and those of the machine at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit import files, settings
from labkit.costmodel.ranges import Range
from labkit.errors import LabError

# Figure: its unit and what it is.
FIGURES = {
    "bandwidth_gb_s": ("GB/s", "memory bandwidth of one GPU"),
    "efficiency": ("", "share of it that decoding reaches"),
    "tflops": ("TFLOPS", "arithmetic that the layers' matrix products reach on one GPU"),
    "allreduce_us": ("us", "one AllReduce of a message up to the flat size"),
    "allreduce_flat_kib": ("KiB", "message up to which an AllReduce takes no longer"),
    "allreduce_us_per_kib": ("us/KiB", "what each further KiB adds to an AllReduce"),
    "other_ms": ("ms", "everything else in a step"),
    "token_ms": ("ms", "what each further token adds besides"),
}

DIVISORS = ("bandwidth_gb_s", "efficiency", "tflops")  # time is something over these
NEEDED = ("gpus", "bandwidth_gb_s")
NOTHING = Range.of(0)
ENDLESS = Range.of(1e12)


class UnknownHardware(LabError):
    """A hardware name is not in data/hardware.json."""


class BadHardware(LabError):
    """A server's figure is missing, or cannot be."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One server's figures, as FIGURES says, each a range or a number; `device` is "cuda" or "cpu".

    measured: by model, a step's time (one token, one stream) and count of AllReduces; where that is known,
    other_ms is what it leaves over. tflops: no limit where none is given.
    """

    name: str
    gpus: int
    bandwidth_gb_s: Range
    efficiency: Range = field(default_factory=lambda: Range.of(1))
    tflops: Range = ENDLESS
    allreduce_us: Range = NOTHING
    allreduce_flat_kib: Range = NOTHING
    allreduce_us_per_kib: Range = NOTHING
    other_ms: Range = NOTHING
    token_ms: Range = NOTHING
    device: str = "cuda"
    measured: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Numbers become ranges; raises BadHardware for what no server has."""
        for name in FIGURES:
            figure = Range.of(getattr(self, name))
            object.__setattr__(self, name, figure)
            if figure.low < 0 or (name in DIVISORS and figure.low == 0):
                raise BadHardware(
                    f"{self.name}: {name} is {figure.low:g}",
                    "give it above 0" if name in DIVISORS else "give 0 or more, or leave it out",
                )
        if self.gpus < 1:
            raise BadHardware(f"{self.name}: gpus is {self.gpus}", "count GPUs from 1 (on a CPU: ranks)")


def known_hardware() -> list[str]:
    """The names in data/hardware.json."""
    return list(files.read_json(settings.root() / "data" / "hardware.json"))


def hardware(name: str) -> Hardware:
    """The hardware of that name in data/hardware.json; raises UnknownHardware with the names there are.

    Raises BadHardware for an entry without what every step needs, or with figures that cannot be.
    """
    known = files.read_json(settings.root() / "data" / "hardware.json")
    if name not in known:
        raise UnknownHardware(f"hardware {name!r} is not in data/hardware.json", f"use one of {', '.join(known)}")
    entry = known[name]
    missing = [key for key in NEEDED if key not in entry]
    if missing:
        raise BadHardware(f"{name} in data/hardware.json has no {' and no '.join(missing)}", "add it")
    figures = {figure: Range.of(entry[figure]) for figure in FIGURES if figure in entry}
    sources = {figure: entry[figure].get("source", "") for figure in figures}
    more = {"device": entry.get("device", "cuda"), "measured": entry.get("measured", {})}
    return Hardware(name=name, gpus=entry["gpus"], sources=sources, **more, **figures)
