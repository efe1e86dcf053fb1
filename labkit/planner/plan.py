"""The plan of a training: hours, disk, memory, what stands in the way and what would do; here and elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from labkit.costmodel import Range
from labkit.errors import LabError
from labkit.planner import machines, memory, rates
from labkit.planner.head import Head, disk_bytes, head_of
from labkit.planner.machines import Machine
from labkit.planner.memory import Serving
from labkit.planner.obstacles import Obstacle, obstacles
from labkit.planner.rates import Rates
from labkit.planner.work import Work
from labkit.targets import Geometry, geometry

STAY, RENT, UNCLEAR, REFUSED = "train here", "rent", "unclear", "does not fit"


class DoesNotFit(LabError):
    """Disk or memory will not do for what is planned."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a training takes on a machine. hours: by step, none where the machine cannot do it.

    obstacles: what will not do, each with what would; free_gb: disk that is free, None where nobody said.
    """

    target: Geometry
    machine: Machine
    work: Work
    head: Head
    served: Serving | None
    rates: Rates | None
    hours: dict[str, Range]
    disk_gb: float
    free_gb: float | None
    training_gb: dict[str, float]
    obstacles: tuple[Obstacle, ...]

    @property
    def total(self) -> Range | None:
        """Hours of all steps; None where the machine cannot do it."""
        return rates.added(*self.hours.values()) if self.hours else None

    def refuse(self) -> None:
        """Raise DoesNotFit with the first obstacle and all that would do, where there is one."""
        if self.obstacles:
            first = self.obstacles[0]
            more = f" ({len(self.obstacles)} obstacles in all)" if len(self.obstacles) > 1 else ""
            raise DoesNotFit(f"{first.what}{more}", "; or ".join(first.instead))


def plan(
    target: Geometry | str, machine: Machine | str, work: Work | None = None, *, free_gb: float | None = None
) -> Plan:
    """Plan the training of a head for a target on a machine; nothing is started and nothing refused.

    Raises UnknownGeometry, UnknownHardware, BadPlan, UnknownQuantization.
    """
    target = target if isinstance(target, Geometry) else geometry(target)
    machine = machine if isinstance(machine, Machine) else machines.machine(machine)
    work = work or Work()
    head = head_of(target, work.draft_vocab_size)
    served = memory.serving(target, machine, work)
    found = rates.predicted(target, machine, head, work, served) if served else None
    disk_gb = disk_needed_gb(target, head, work)
    needed = memory.training_gb(target, head, work)
    return Plan(
        target=target,
        machine=machine,
        work=work,
        head=head,
        served=served,
        rates=found,
        hours=hours(target, machine, head, work, served, found),
        disk_gb=disk_gb,
        free_gb=free_gb,
        training_gb=needed,
        obstacles=tuple(obstacles(target, machine, head, work, served, disk_gb, free_gb)),
    )


def disk_needed_gb(target: Geometry, head: Head, work: Work) -> float:
    """GB on disk: states and ids where they are stored, two checkpoints, the answers' text at 8 bytes a token."""
    states = disk_bytes(target, work.tokens, work.item_bytes) / 1e9 if work.stored else 0.0
    return states + 2 * memory.checkpoint_gb(head) + 8 * work.tokens / 1e9


def hours(
    target: Geometry, machine: Machine, head: Head, work: Work, served: Serving | None, found: Rates | None
) -> dict[str, Range]:
    """Hours by step: generation, extraction and training; without stored states the last two run side by side."""
    if served is None or found is None:
        return {}
    generation = rates.added(
        spent(work.conversations * work.prompt_tokens, found.prefill),
        spent(work.conversations * work.answer_tokens, found.decode),
    )
    if work.stored:
        extraction, training = spent(work.tokens, found.extraction), spent(work.trained_tokens, found.training)
        return {"generation": generation, "extraction": extraction, "training": training}
    beside = on_the_fly(target, machine, head, work)
    return {"generation": generation, "training, states on the fly": beside} if beside else {}


def on_the_fly(target: Geometry, machine: Machine, head: Head, work: Work) -> Range | None:
    """Hours where about half of the GPUs serve states while the rest trains; None where that does not fit."""
    served = memory.serving(target, machine, work, machine.gpus // 2) if machine.gpus > 1 else None
    if served is None:
        return None
    server = rates.with_gpus(machine, machine.gpus // 2)
    trainer = rates.with_gpus(machine, machine.gpus - server.gpus)
    states = rates.predicted(target, server, head, work, served).extraction
    trained = rates.training_rate(trainer, head, work, machine.disk_gb_s)
    return spent(work.trained_tokens, rates.slowest(states, trained))


def spent(tokens: float, rate: Range) -> Range:
    """Hours for that many tokens."""
    return rates.scaled(rates.inverse(rate), tokens / 3600)


def elsewhere(target: Geometry, work: Work, names: list[str] | None = None) -> pd.DataFrame:
    """The same training on other machines (those that one rents, where none are named), a row each.

    Columns machine what tensor_parallel_size replicas, generation_h extraction_h training_h, hours with _low and
    _high, gpu_hours, obstacle.
    """
    rows = []
    for name in names or machines.rentable():
        found = plan(target, name, work)
        row = {"machine": name, "what": found.machine.what, "obstacle": "; ".join(o.what for o in found.obstacles)}
        if found.served and found.total:
            row |= {"tensor_parallel_size": found.served.tensor_parallel_size, "replicas": found.served.replicas}
            row |= {f"{step.split(',')[0]}_h": value.mid for step, value in found.hours.items()}
            row |= {"hours_low": found.total.low, "hours": found.total.mid, "hours_high": found.total.high}
            row |= {"gpu_hours": found.total.mid * found.machine.gpus}
        rows.append(row)
    return pd.DataFrame(rows)


def verdict(found: Plan, rent_after_days: float) -> tuple[str, str]:
    """(train here, rent, unclear or does not fit; why): rent where it takes longer here than the threshold."""
    if found.obstacles or found.total is None:
        why = found.obstacles[0].what if found.obstacles else "nothing can serve the target here"
        return REFUSED, f"not as planned on {found.machine.what}: {why}"
    days = rates.scaled(found.total, 1 / 24)
    told = f"{told_range(days)} days on {found.machine.what}"
    limit = f"the threshold of {rent_after_days:g} days"
    if days.high <= rent_after_days:
        return STAY, f"{told}, within {limit} even at worst"
    if days.low > rent_after_days:
        return RENT, f"{told}, beyond {limit} even at best"
    lean = "rather rent" if days.mid > rent_after_days else "rather train here"
    return UNCLEAR, f"{told}, on both sides of {limit}: {lean}, and let the calibration run of notebook 04 decide"


def told_range(value: Range) -> str:
    """A range in words: two significant digits."""
    low, mid, high = (significant(v) for v in value)
    return mid if low == high else f"{mid} [{low}, {high}]"


def significant(value: float) -> str:
    """Two significant digits, never an exponent: 0.037, 4.2, 35, 1,500."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10 else f"{rounded:.3g}"
