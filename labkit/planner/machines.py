"""What a machine brings to a training: memory, arithmetic, links, disk, each figure with its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit import files, settings
from labkit.costmodel import Hardware, Range, UnknownHardware, hardware

SHARES = ("prefill_share", "training_share", "generation_share", "extraction_share", "disk_gb_s")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A server for the plan: the cost model's `hardware` and what data/hardware_training.json adds to it.

    memory_gb and peak_tflops (dense bf16) are one GPU's, bus_gb_s is AllReduce's bus bandwidth; the shares say
    how much of the peak, of the cost model's prediction, or of bare prefill a step reaches; disk_gb_s is for
    reading and writing.
    """

    name: str
    what: str
    hardware: Hardware
    memory_gb: float
    peak_tflops: float
    bus_gb_s: Range
    prefill_share: Range
    training_share: Range
    generation_share: Range
    extraction_share: Range
    disk_gb_s: Range
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def gpus(self) -> int:
        """How many GPUs it has."""
        return self.hardware.gpus


def known() -> dict[str, Any]:
    """data/hardware_training.json: shares, links, machines."""
    return files.read_json(settings.root() / "data" / "hardware_training.json")


def machine(name: str, *, gpus: int = 0, **figures: Any) -> Machine:
    """The machine of that name, with another number of GPUs or other figures where given.

    Raises UnknownHardware with the names there are.
    """
    told = known()
    if name not in told["machines"]:
        names = ", ".join(told["machines"])
        raise UnknownHardware(
            f"data/hardware_training.json has no machine {name!r}",
            f"use one of {names}, or add its memory, arithmetic and link there",
        )
    entry, base = told["machines"][name], hardware(name)
    link = told["links"][entry["link"]]
    found = {share: Range.of(told["shares"][share]) for share in SHARES}
    sources = {share: told["shares"][share]["source"] for share in SHARES} | {"bus_gb_s": link["source"]}
    sources |= {"memory_gb": entry["source"], "peak_tflops": entry["source"]}
    given = {figure: Range.of(value) if figure in SHARES else value for figure, value in figures.items()}
    values = {"memory_gb": entry["memory_gb"], "peak_tflops": entry["peak_tflops"], "bus_gb_s": Range.of(link)}
    return Machine(
        name=name,
        what=entry["what"],
        hardware=dataclasses.replace(base, gpus=gpus) if gpus else base,
        sources=sources,
        **(values | found | given),
    )


def rentable() -> list[str]:
    """The machines that one rents for a hero run."""
    return [name for name, entry in known()["machines"].items() if entry.get("rent")]
