"""What stands in the way of a plan, and what would do instead: told before anything is spent."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from labkit.planner import machines, memory
from labkit.planner.head import Head, disk_bytes, head_of
from labkit.planner.machines import Machine
from labkit.planner.memory import USABLE, Serving
from labkit.planner.work import Work
from labkit.targets import Geometry

VOCABULARIES = (131_072, 65_536, 32_000, 16_384, 8_192)
SMALLEST_BATCH = 512


@dataclass(frozen=True)
class Obstacle:
    """What will not do, with the figures, and the changes that would, each by itself."""

    what: str
    instead: tuple[str, ...]


def obstacles(
    target: Geometry,
    machine: Machine,
    head: Head,
    work: Work,
    served: Serving | None,
    disk_gb: float,
    free_gb: float | None,
) -> Iterator[Obstacle]:
    """Everything that stands in the way; `free_gb` None: nobody said how much disk there is."""
    if served is None:
        yield too_large(target, machine, work)
    elif not work.stored and memory.serving(target, machine, work, machine.gpus // 2 or 1) is None:
        yield no_room_beside(target, machine, served)
    if free_gb is not None and disk_gb > free_gb:
        yield no_disk(target, machine, work, disk_gb, free_gb)
    needed = sum(memory.training_gb(target, head, work).values())
    if needed > machine.memory_gb * USABLE:
        yield no_memory(target, machine, work, needed)


def too_large(target: Geometry, machine: Machine, work: Work) -> Obstacle:
    """The target's weights do not fit the machine's GPUs."""
    ranks = max(target.tensor_parallel_sizes(machine.gpus) or [1])
    needed = memory.target_gb(target, ranks) + memory.ENGINE_GB
    room = machine.memory_gb * USABLE
    what = (
        f"{target.name} needs {needed:.0f} GB on each of {ranks} GPUs, and {machine.what} has {room:.0f} GB of use"
    )
    fitting = [n for n in machines.known()["machines"] if memory.serving(target, machines.machine(n), work)]
    return Obstacle(what, (f"use one of {', '.join(fitting)}" if fitting else "quantise the target",))


def no_room_beside(target: Geometry, machine: Machine, served: Serving) -> Obstacle:
    """States on the fly want a server and a trainer at once."""
    what = (
        f"on the fly, a server of {target.name} and the training run at once, and the server alone needs "
        f"{served.tensor_parallel_size} of the {machine.gpus} GPUs of {machine.what}"
    )
    return Obstacle(what, ("store the states on disk", "add GPUs that train (a second machine)"))


def no_disk(target: Geometry, machine: Machine, work: Work, disk_gb: float, free_gb: float) -> Obstacle:
    """The states do not fit the disk; each way out with its own figure."""
    if not work.stored:
        return Obstacle(f"{size(disk_gb)} of disk are needed, {size(free_gb)} are free", ("use a larger disk",))
    each = disk_bytes(target, work.length, work.item_bytes) / 1e9
    fixed = disk_gb - (work.tokens and disk_bytes(target, work.tokens, work.item_bytes) / 1e9)
    fitting = int(max(0.0, free_gb - fixed) / each)
    instead = [f"take {fitting:,} conversations instead of {work.conversations:,}"] if fitting else []
    if work.item_bytes == 2:
        half = disk_gb - disk_bytes(target, work.tokens) / 1e9 + disk_bytes(target, work.tokens, 1) / 1e9
        word = "which fits" if half <= free_gb else "still too much by itself"
        instead.append(f"store FP8 states: {size(half)}, {word}")
    beside = dataclasses.replace(work, stored=False)
    if machine.gpus > 1 and memory.serving(target, machine, beside, machine.gpus // 2):
        instead.append("make the states on the fly, on half of the GPUs, in every epoch anew")
    instead.append(f"use a disk with {size(disk_gb)} free")
    return Obstacle(
        f"{work.tokens:,} tokens need {size(disk_gb)} of disk, {size(free_gb)} are free", tuple(instead)
    )


def no_memory(target: Geometry, machine: Machine, work: Work, needed: float) -> Obstacle:
    """Head, optimiser and logits do not fit a GPU."""
    room = machine.memory_gb * USABLE
    instead = []
    for size_ in VOCABULARIES:
        if size_ < min(work.draft_vocab_size, target.vocab_size) and training_fits(target, room, work, size_):
            instead.append(f"a draft vocabulary of {size_:,}")
            break
    batch = work.batch_tokens
    while batch > SMALLEST_BATCH and not training_fits(
        target, room, dataclasses.replace(work, batch_tokens=batch), work.draft_vocab_size
    ):
        batch //= 2
    if training_fits(target, room, dataclasses.replace(work, batch_tokens=batch), work.draft_vocab_size):
        instead.append(f"{batch:,} tokens a step on each GPU")
    instead.append("share weights and optimiser between GPUs (FSDP)" if machine.gpus > 1 else "a larger GPU")
    return Obstacle(
        f"training the head needs {needed:.0f} GB on a GPU, and one of {machine.what} has {room:.0f} GB of use",
        tuple(instead),
    )


def training_fits(target: Geometry, room_gb: float, work: Work, draft_vocab_size: int) -> bool:
    """Whether a head with that vocabulary trains in so much memory."""
    head = head_of(target, draft_vocab_size)
    return sum(memory.training_gb(target, head, work).values()) <= room_gb


def size(gigabytes: float) -> str:
    """Disk space as one says it."""
    return f"{gigabytes / 1e3:.2f} TB" if gigabytes >= 1000 else f"{gigabytes:.1f} GB"
