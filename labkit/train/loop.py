"""The training loop over speculators' Eagle3DraftModel; whatever kills it, the next run goes on where it was.

speculators' own trainer wants an accelerator; its model and losses run anywhere. Weights are fp32 under bf16
autocast; a step is one packed row of about `batch_tokens` tokens, unrolled over `ttt_steps`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from labkit import draft, extract, files, runs
from labkit.errors import LabError
from labkit.settings import Eagle3Pipeline
from labkit.targets import Target
from labkit.train import checkpoint
from labkit.train.batches import Sample, load_samples, pack, plan
from labkit.train.simulation import simulate
from labkit.vocab import VocabMap

if TYPE_CHECKING:
    from accelerate import Accelerator
    from speculators.models.eagle3 import Eagle3DraftModel

CHECKPOINT_EVERY_S = 20.0
WARMUP_SHARE = 0.05
CLIP_NORM = 1.0
Watcher = Callable[[pd.DataFrame], None]


class Diverged(LabError):
    """The loss is no longer a number."""


@dataclass
class Training:
    """What changes while training: where it stands, and a row a step of what it measured."""

    epoch: int = 0
    group: int = 0
    step: int = 0
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def metrics(self) -> pd.DataFrame:
        """Columns step epoch loss learning_rate tokens seconds acceptance_length (at the end of an epoch)."""
        return pd.DataFrame(self.rows)


def run(
    settings: Eagle3Pipeline,
    *,
    target: Target,
    dataset_dir: Path,
    hidden_dir: Path,
    vocab: VocabMap,
    out_dir: Path,
    layers: str | tuple[int, ...] = "",
    watch: Watcher | None = None,
) -> Path:
    """Train a head and return its directory, `out_dir`/head; metrics.parquet lies beside it.

    Uses the settings' epochs, learning_rate, ttt_steps, batch_tokens and seed. A finished training with the same
    settings and inputs is returned as it is; an interrupted one goes on from its last checkpoint (at most
    20 s old) and ends with the same weights. `watch` gets the metrics now and then.
    Raises NoTrainingData, Diverged.
    """
    layer_ids = extract.layers_of(layers or settings.aux_layers, target.geometry.num_hidden_layers)
    record = describe(settings, target, dataset_dir, vocab, layer_ids)
    head_dir = out_dir / "head"
    if is_done(head_dir, record):
        return head_dir
    train, held_out = (load_samples(dataset_dir, hidden_dir, split) for split in ("train", "held_out"))
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # nothing here gains by it, and on a CPU it needs a compiler
    model = draft.build(target, vocab, layer_ids, ttt_steps=settings.ttt_steps, seed=settings.seed)
    draft.warm_start(model, target)
    training = fit(settings, model, train, held_out, out_dir / "checkpoint.safetensors", record["digest"], watch)
    files.write_parquet(out_dir / "metrics.parquet", training.metrics)
    record |= {"steps": training.step, "seconds": training.seconds, "samples": len(train)}
    draft.export(model, head_dir, verifier_name=target.name, record=record)
    (out_dir / "checkpoint.safetensors").unlink(missing_ok=True)
    return head_dir


def describe(
    settings: Eagle3Pipeline, target: Target, dataset_dir: Path, vocab: VocabMap, layers: tuple[int, ...]
) -> dict[str, Any]:
    """Settings and inputs that decide the result, and their digest."""
    names = ("epochs", "learning_rate", "ttt_steps", "batch_tokens", "seed")
    values = {name: getattr(settings, name) for name in names}
    values |= {
        "layers": list(layers),
        "draft_vocab_size": vocab.draft_vocab_size,
        "vocabulary": files.digest(vocab.d2t.tolist()),
        "dataset": files.digest_file(dataset_dir / "dataset.parquet"),
        "target": target.revision,
        "flags": draft.FLAGS,
        "start": "warm",
    }
    return values | {"digest": files.digest(values)}


def is_done(head_dir: Path, record: dict[str, Any]) -> bool:
    """Whether the head there came of the same settings and inputs."""
    path = head_dir / "training.json"
    return path.exists() and files.read_json(path).get("digest") == record["digest"]


def fit(
    settings: Eagle3Pipeline,
    model: Eagle3DraftModel,
    train: list[Sample],
    held_out: list[Sample],
    path: Path,
    digest: str,
    watch: Watcher | None,
) -> Training:
    """All epochs, from the checkpoint at `path` where it has the same digest."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    optimizer = torch.optim.AdamW(
        checkpoint.trainable(model).values(), lr=settings.learning_rate, weight_decay=0.01
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    training = resumed(path, digest, model, optimizer)
    plans = [plan(train, settings.batch_tokens, seed=settings.seed + epoch) for epoch in range(settings.epochs)]
    total = sum(map(len, plans))
    saved = started = time.monotonic()
    before = training.seconds
    for group, last in remaining(plans, training, total):
        loss = step(settings, accelerator, model, optimizer, group, training.step / total)
        training.seconds = before + time.monotonic() - started
        note(training, group, loss, optimizer.param_groups[0]["lr"])
        if last:
            length = simulate(model, held_out, settings.ttt_steps, batch_tokens=settings.batch_tokens).mean_length
            training.rows[-1]["acceptance_length"] = length
        advance(training, last)
        if last or time.monotonic() - saved > CHECKPOINT_EVERY_S:
            checkpoint.save(path, model, optimizer, {"digest": digest, **vars(training)})
            saved = time.monotonic()
            if watch:
                watch(training.metrics)
    return training


def resumed(path: Path, digest: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    """A fresh training, or the one that the checkpoint holds."""
    if (checkpoint.peek(path) or {}).get("digest") != digest:
        return Training()
    state = checkpoint.load(path, model, optimizer) or {}
    state.pop("digest", None)
    return Training(**state)


def remaining(
    plans: list[list[list[Sample]]], training: Training, total: int
) -> Iterator[tuple[list[Sample], bool]]:
    """The groups not trained yet, each with whether it ends its epoch, under a progress bar."""
    rest = [
        (group, number == len(groups) - 1)
        for epoch, groups in enumerate(plans)
        for number, group in enumerate(groups)
        if (epoch, number) >= (training.epoch, training.group)
    ]
    yield from runs.progress(rest, f"training ({total} steps)", total=len(rest))


def step(
    settings: Eagle3Pipeline,
    accelerator: Accelerator,
    model: Eagle3DraftModel,
    optimizer: torch.optim.Optimizer,
    group: list[Sample],
    progress: float,
) -> float:
    """One optimiser step on one packed group; returns the loss summed over TTT steps (nats)."""
    from speculators.losses import resolve_loss_config

    model.train()
    for parameters in optimizer.param_groups:
        parameters["lr"] = settings.learning_rate * schedule(progress)
    batch = {name: tensor.to(accelerator.device) for name, tensor in pack(group).items()}
    with accelerator.autocast():
        _, loss, _ = model(
            **batch, ttt_steps=settings.ttt_steps, loss_config=resolve_loss_config("kl_div", "eager")
        )
    if not math.isfinite(loss.item()):
        raise Diverged(f"the loss is {loss.item()} at {progress:.0%} of the training", "lower learning_rate")
    optimizer.zero_grad(set_to_none=True)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(checkpoint.trainable(model).values(), CLIP_NORM)
    optimizer.step()
    return loss.item()


def schedule(progress: float) -> float:
    """Factor on the learning rate at a share of the training: linear warm-up, then a cosine to zero."""
    if progress < WARMUP_SHARE:
        return (progress + 1e-3) / (WARMUP_SHARE + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (progress - WARMUP_SHARE) / (1 - WARMUP_SHARE)))


def note(training: Training, group: list[Sample], loss: float, learning_rate: float) -> None:
    """Add the step's row."""
    training.rows.append(
        {
            "step": training.step,
            "epoch": training.epoch,
            "loss": loss,
            "learning_rate": learning_rate,
            "tokens": sum(sample.rows for sample in group),
            "seconds": training.seconds,
            "acceptance_length": math.nan,
        }
    )


def advance(training: Training, last: bool) -> None:
    """Move to the next group, or to the next epoch's first."""
    training.step += 1
    training.group = 0 if last else training.group + 1
    training.epoch += int(last)
