"""The machine at hand: does a run's data fit its disk and its head the memory, before anything is spent."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from labkit.costmodel import Hardware, Range
from labkit.planner.head import head_of
from labkit.planner.machines import Machine
from labkit.planner.memory import USABLE, training_gb
from labkit.planner.obstacles import Obstacle, no_disk, no_memory
from labkit.planner.plan import DoesNotFit, disk_needed_gb
from labkit.planner.work import Work
from labkit.targets import Geometry

ONE = Range.of(1)


def machine_here(memory_gb: float) -> Machine:
    """This machine as far as a refusal needs it: one device with that much memory free; no rates."""
    figures = dict.fromkeys(
        ("bus_gb_s", "prefill_share", "training_share", "generation_share", "extraction_share", "disk_gb_s"), ONE
    )
    device = Hardware(name="here", gpus=1, bandwidth_gb_s=ONE, device="cpu")
    return Machine(
        name="here",
        what="this machine",
        hardware=device,
        memory_gb=memory_gb / USABLE,
        peak_tflops=1,
        **figures,
    )


def free_memory_gb() -> float:
    """Memory that is free for a training here: a GPU's where torch has one, else the machine's."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0] / 1e9
    return psutil.virtual_memory().available / 1e9


def free_disk_gb(folder: Path, wanted_gb: float = float("inf")) -> float:
    """Disk that is free where the folder is or will be; what it already holds counts where that is not enough."""
    existing = next(p for p in [folder, *folder.parents] if p.exists())
    free = shutil.disk_usage(existing).free
    if free / 1e9 >= wanted_gb or not folder.exists():
        return free / 1e9
    return (free + sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())) / 1e9


def obstacles_here(
    geometry: Geometry, work: Work, folder: Path, *, free_memory: float | None = None
) -> list[Obstacle]:
    """What does not fit here, each with what would do; memory (GB) is left out where nobody says what is free."""
    head, found = head_of(geometry, work.draft_vocab_size), []
    machine = machine_here(free_memory or 0.0)
    needed = disk_needed_gb(geometry, head, work)
    free_disk = free_disk_gb(folder, needed)
    if needed > free_disk:
        found.append(no_disk(geometry, machine, work, needed, free_disk))
    memory = sum(training_gb(geometry, head, work).values())
    if free_memory is not None and memory > free_memory:
        found.append(no_memory(geometry, machine, work, memory))
    return found


def refuse(found: list[Obstacle]) -> None:
    """Raise DoesNotFit with the first obstacle and all that would do, where there is one."""
    if found:
        raise DoesNotFit(found[0].what, "; or ".join(found[0].instead))
