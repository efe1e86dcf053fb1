"""The training loop: steps over packed conversations on one process or many, stopped and taken up at any step.

A step trains on the same conversations whatever the number of processes: each takes its share of the group.
Weights are fp32 under bf16 autocast. Nothing waits for the device but every few steps, when numbers are fetched,
clocks and signals looked at, and checkpoints written.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
import torch

from labkit import progress
from labkit.settings import Eagle3Pipeline
from labkit.train import checkpoint, health, simulation
from labkit.train.batches import Batch, Sample, pack, pinned, reading, to_device
from labkit.train.metrics import Metrics, opened
from labkit.train.optimizer import CLIP_NORM, adamw, drop_broken, schedule
from labkit.train.order import Ahead, plan, shares
from labkit.train.stopping import Flag, Stopped, Stopping
from labkit.train.unroll import BAD_STATES, Unrolled

if TYPE_CHECKING:
    from accelerate import Accelerator

CHECKPOINT_EVERY_S = 20.0
SHOW_EVERY_S = 5.0
LOOK_EVERY = {"cpu": 1}  # steps between looks at the device; 10 where waiting for it costs
READERS = 4
Watcher = Callable[[pd.DataFrame], Any]


@dataclass
class Position:
    """Where a training stands: the next group, steps and seconds so far, and conversations that were left out."""

    epoch: int = 0
    group: int = 0
    step: int = 0
    seconds: float = 0.0
    seen: int = 0
    bad: dict[str, int] = field(default_factory=dict)


class Part(NamedTuple):
    """A process's share of a step; `counted` is 0 where it only keeps the others company."""

    samples: Sequence[Sample]
    batch: Batch
    counted: float


@dataclass
class Loop:
    """One training. `source` computes states on the device; None where the batches bring them."""

    settings: Eagle3Pipeline
    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: Any
    train: Sequence[Sample]
    held_out: Sequence[Sample]
    path: Path
    digest: str
    source: Callable[[Batch], torch.Tensor] | None = None
    watch: Watcher | None = None
    position: Position = field(default_factory=Position)
    waiting: list[tuple[Sequence[Sample], torch.Tensor]] = field(default_factory=list)
    error: BaseException | None = None

    def run(self, stopping: Stopping) -> Metrics:
        """All steps that are left; raises Stopped, Diverged, BadSamples and what `watch` raises."""
        self.stopping = stopping
        self.readers = ThreadPoolExecutor(READERS, thread_name_prefix="labkit-states")
        self.take_up()
        plans = self.plans()
        self.total = sum(map(len, plans))
        self.before, self.started = self.position.seconds, time.monotonic()
        self.saved = self.shown = self.started
        rest = [
            (epoch, number, group, number == len(groups) - 1)
            for epoch, groups in enumerate(plans)
            for number, group in enumerate(groups)
            if (epoch, number) >= (self.position.epoch, self.position.group)
        ]
        batches = Ahead(self.parts(group) for _epoch, _number, group, _last in rest)
        line = progress.bar("training", self.total, unit="step", initial=self.position.step, disable=not self.main)
        try:
            for (epoch, number, group, last), parts in zip(rest, batches, strict=True):
                self.step(group, parts, epoch)
                self.position.step += 1
                self.position.epoch, self.position.group = (epoch + 1, 0) if last else (epoch, number + 1)
                line.update()
                self.pause(last)
        finally:
            line.close()
            batches.close()
            self.readers.shutdown(wait=False, cancel_futures=True)
        return self.metrics

    def take_up(self) -> None:
        """Go on from the last checkpoint of the same training, if there is one."""
        if self.main:
            checkpoint.sweep(self.path)
        self.accelerator.wait_for_everyone()
        found = checkpoint.newest(self.path, self.digest)
        rows = checkpoint.rows(found) if found else []
        if found:
            state = checkpoint.peek(found) or {}
            checkpoint.load(found, self.model, self.bare_optimizer)
            self.position = Position(**{name: state[name] for name in asdict(self.position)})
        self.metrics = opened(self.path.parent / "metrics.parquet", rows, events=self.main)

    @property
    def main(self) -> bool:
        """Whether this process writes."""
        return self.accelerator.is_main_process

    @property
    def bare_optimizer(self) -> torch.optim.Optimizer:
        """The optimiser without accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def plans(self) -> list[list[list[Sample]]]:
        """The groups of each epoch."""
        size, seed = self.settings.batch_tokens, self.settings.seed
        return [plan(self.train, size, seed=seed + epoch) for epoch in range(self.settings.epochs)]

    def parts(self, group: list[Sample]) -> list[Part]:
        """This process's shares of a group, packed, one after the other to be accumulated."""
        world, accumulate = self.accelerator.num_processes, self.settings.accumulate
        own = shares(group, world * accumulate)[self.accelerator.process_index :: world]
        return [Part(part or group[:1], self.batch(part or group[:1]), float(bool(part))) for part in own]

    def batch(self, samples: Sequence[Sample]) -> Batch:
        """Packed conversations, with their states where files have them."""
        read = None if self.source else reading(samples, self.readers)
        made = pack(samples, self.settings.ttt_steps, read)
        return pinned(made) if self.accelerator.device.type == "cuda" else made

    def forward(self, batch: Batch, ttt_steps: int, *, drafts: bool = False) -> dict[str, torch.Tensor]:
        """The model's answer to a packed batch, wherever its states come from."""
        device = self.accelerator.device
        batch = to_device(batch, device)
        if self.source:
            batch = batch | {"states": self.source(batch)}
        with torch.autocast(device.type, torch.bfloat16, enabled=self.settings.precision == "bf16"):
            return self.model(batch, ttt_steps, drafts=drafts)

    def step(self, group: list[Sample], parts: list[Part], epoch: int) -> None:
        """One optimiser step on a group.

        The loss is the sum over TTT steps of decay^i times the mean over all trained tokens of the group: over
        processes and accumulated parts alike, so that a short part weighs by its tokens. A conversation whose
        states are not finite adds nothing to the sum, but its tokens stay in the mean.
        """
        steps, device = self.settings.ttt_steps, self.accelerator.device
        counts = sum(sample.trained(steps) for sample in group)
        weighed = [self.settings.ttt_decay**i / max(int(n), 1) for i, n in enumerate(counts)]
        weights = torch.tensor(weighed, dtype=torch.float32).to(device, non_blocking=True)
        rate = self.settings.learning_rate * schedule(self.position.step / self.total)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=device)
        for number, part in enumerate(parts):
            silent = number < len(parts) - 1
            with self.accelerator.no_sync(self.model) if silent else contextlib.nullcontext():
                answer = self.forward(part.batch, steps)
                own = (answer["sums"] * weights).sum() * part.counted
                self.accelerator.backward(own * self.accelerator.num_processes)  # gradients are averaged
            loss += own.detach()
            if part.counted:
                self.waiting.append((part.samples, answer["documents"]))
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        drop_broken(self.model)
        self.optimizer.step()
        self.note(group, counts, epoch, rate, loss, norm)

    def note(
        self, group: list[Sample], counts: Any, epoch: int, rate: float, loss: torch.Tensor, norm: torch.Tensor
    ) -> None:
        """Add the step's row to the metrics."""
        if self.accelerator.num_processes > 1:
            loss = self.accelerator.reduce(loss, "sum")
        self.position.seconds = self.before + time.monotonic() - self.started
        row = {
            "step": self.position.step,
            "epoch": epoch,
            "learning_rate": rate,
            "tokens": sum(sample.tokens for sample in group),
            "trained_tokens": int(counts[0]),
            "seconds": self.position.seconds,
            "skipped": sum(self.position.bad.values()),
            "acceptance_length": math.nan,
            "validation_loss": math.nan,
        }
        self.metrics.add(row, loss=loss, grad_norm=norm)

    def pause(self, last: bool) -> None:
        """Between two steps, now and then: fetch numbers, look at them, show them, save, stop if told to."""
        if not last and self.position.step % LOOK_EVERY.get(self.accelerator.device.type, 10):
            return
        self.look()
        if last:
            self.evaluate()
        self.show(last)
        now = time.monotonic()
        stop, save = self.agree(self.stopping.wanted, last or now - self.saved > CHECKPOINT_EVERY_S)
        if save or stop:
            state = asdict(self.position) | {"digest": self.digest}
            checkpoint.save(self.path, self.model, self.bare_optimizer, state, self.metrics.rows, write=self.main)
            self.saved = now
        if stop:
            raise self.error or Stopped(
                f"stopped after step {self.position.step} of {self.total} ({self.stopping.why or 'told to'})",
                f"run the same cell or command again: it goes on from {self.path.name}",
            )

    def look(self) -> None:
        """Fetch what the device measured; name conversations left out, give up where it is hopeless."""
        self.metrics.flush()
        marks = torch.cat([documents for _samples, documents in self.waiting]).tolist() if self.waiting else []
        samples = [sample for part, _documents in self.waiting for sample in part]
        self.waiting = []
        bad = [sample.path.name for sample, mark in zip(samples, marks, strict=True) if mark == BAD_STATES]
        for name in bad:
            self.position.bad[name] = self.position.bad.get(name, 0) + 1
        self.position.seen += len(samples)
        health.refuse_divergence(self.metrics.rows, self.total)
        health.refuse_bad_data(
            *self.total_of(sum(self.position.bad.values()), self.position.seen), self.position.bad
        )

    def total_of(self, *values: float) -> list[float]:
        """Sums over all processes."""
        if self.accelerator.num_processes == 1:
            return list(values)
        return self.accelerator.reduce(
            torch.tensor(values, dtype=torch.float64, device=self.accelerator.device), "sum"
        ).tolist()

    def agree(self, *wishes: bool) -> list[bool]:
        """For each wish whether any process has it: all of them stop and save at the same step."""
        return [total > 0 for total in self.total_of(*map(float, wishes))]

    def evaluate(self) -> None:
        """Held-out loss and simulated acceptance into the last row; every process computes all of it."""
        self.model.eval()
        groups = plan(self.held_out, self.settings.batch_tokens, seed=None)
        batches = ((group, self.batch(group)) for group in groups)
        how = {"ttt_decay": self.settings.ttt_decay}
        found = simulation.evaluate(self.forward, batches, self.settings.ttt_steps, self.accelerator.device, **how)
        self.metrics.evaluated(
            acceptance_length=found.acceptance.mean_length if found.acceptance.drafts else math.nan,
            validation_loss=found.loss,
        )

    def show(self, last: bool) -> None:
        """Metrics to disk and to who watches, now and then; a watcher that raises, or returns True, stops."""
        if not self.main or not (last or time.monotonic() - self.shown > SHOW_EVERY_S):
            return
        self.shown = time.monotonic()
        frame = self.metrics.write()
        try:
            if self.watch and self.watch(frame) is True:
                self.stopping.why = self.stopping.why or "the watcher"
        except BaseException as error:  # KeyboardInterrupt, too: saved first, raised then
            self.error, self.stopping.why = error, type(error).__name__


def fit(
    settings: Eagle3Pipeline,
    accelerator: Accelerator,
    unrolled: Unrolled,
    train: Sequence[Sample],
    held_out: Sequence[Sample],
    path: Path,
    digest: str,
    *,
    source: Callable[[Batch], torch.Tensor] | None = None,
    watch: Watcher | None = None,
    stop: Flag | None = None,
) -> Loop:
    """All epochs, from the checkpoint at `path` where it has the same digest; returns the finished loop."""
    optimizer = adamw(unrolled, settings.learning_rate)
    model, optimizer = accelerator.prepare(unrolled, optimizer)
    loop = Loop(settings, accelerator, model, optimizer, train, held_out, path, digest, source=source, watch=watch)
    with Stopping(stop) as stopping:
        loop.run(stopping)
    return loop
