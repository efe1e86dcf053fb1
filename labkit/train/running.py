"""A training from data set and states to a head directory: done once, taken up where it was, on any devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from labkit import draft, extract, files
from labkit.settings import Eagle3Pipeline
from labkit.targets import Target
from labkit.targets.sources import whole
from labkit.train import checkpoint, loop, optimizer, start
from labkit.train.batches import load_samples
from labkit.train.loop import Loop, Watcher
from labkit.train.onthefly import OnTheFly
from labkit.train.stopping import Flag
from labkit.train.unroll import Unrolled
from labkit.vocab import VocabMap

if TYPE_CHECKING:
    from accelerate import Accelerator

DECIDING = (
    "epochs",
    "learning_rate",
    "ttt_steps",
    "batch_tokens",
    "seed",
    "loss",
    "ttt_decay",
    "precision",
    "states_from",
    "draft_layers",
    "lm_head",
)


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
    stop: Flag | None = None,
) -> Path:
    """Train a head and return its directory, `out_dir`/head; metrics.parquet and tensorboard/ lie beside it.

    A finished training with the same settings and inputs is returned as it is; an interrupted one goes on from
    its last checkpoint (at most 20 s old) and ends with the same weights, to the bit on a CPU. SIGTERM, SIGINT,
    `stop` (a threading.Event or anything with is_set) and `watch` (which gets the metrics now and then) returning
    True end it after the present step, saved, with Stopped. Runs on one process or, under `accelerate launch -m
    labkit.train`, on several. Raises NoTrainingData, LeakedSplit, BadStart, BadLoss, BadSamples, Diverged,
    Stopped.
    """
    layer_ids = extract.layers_of(layers or settings.aux_layers, target.geometry.num_hidden_layers)
    record = describe(settings, target, dataset_dir, vocab, layer_ids)
    head_dir, path = out_dir / "head", out_dir / "checkpoint.safetensors"
    if is_done(head_dir, record):
        checkpoint.clear(path)  # of a process that was killed after its last write
        return head_dir
    train, held_out = (load_samples(dataset_dir, hidden_dir, split) for split in ("train", "held_out"))
    accelerator = processes()
    head = start.head(settings, target, vocab, layer_ids)
    unrolled = Unrolled(head, settings.loss, compiled=settings.compiled)
    fly = settings.states_from == "on-the-fly"
    source = OnTheFly(target, layer_ids, accelerator.device) if fly else None
    done = loop.fit(
        settings,
        accelerator,
        unrolled,
        train,
        held_out,
        path,
        record["digest"],
        source=source,
        watch=watch,
        stop=stop,
    )
    head = finished(done, lambda: start.head(settings, target, vocab, layer_ids))
    if accelerator.is_main_process:
        record |= outcome(done, len(train))
        draft.export(head, head_dir, verifier_name=target.name, record=record)
        checkpoint.clear(path)
    accelerator.wait_for_everyone()
    return head_dir


def processes() -> Accelerator:
    """This process among the training's; precision is the loop's own matter."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    plain = DistributedDataParallelKwargs(broadcast_buffers=False)
    return Accelerator(mixed_precision="no", kwargs_handlers=[plain])


def finished(done: Loop, fresh: Any) -> Any:
    """The trained head, whole: gathered where each process has a shard of it (`fresh` makes its frame)."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = done.accelerator.unwrap_model(done.model)
    if not any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        return model.head
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    weights = get_model_state_dict(done.model, options=options)
    if not done.accelerator.is_main_process:
        return None
    head = fresh()
    head.load_state_dict({name.removeprefix("head."): value for name, value in weights.items()}, strict=False)
    return head


def outcome(done: Loop, samples: int) -> dict[str, Any]:
    """What training.json says of how it went."""
    return {
        "steps": done.position.step,
        "seconds": done.position.seconds,
        "samples": samples,
        "processes": done.accelerator.num_processes,
        "device": str(done.accelerator.device.type),
        "accumulate": done.settings.accumulate,
        "torch": torch.__version__,
        "skipped": done.position.bad,
    }


def describe(
    settings: Eagle3Pipeline, target: Target, dataset_dir: Path, vocab: VocabMap, layers: tuple[int, ...]
) -> dict[str, Any]:
    """Settings and inputs that decide the result, and their digest.

    Neither the number of processes nor `accumulate` is among them: a training may go on with others.
    """
    values = {name: getattr(settings, name) for name in DECIDING}
    values |= {
        "layers": list(layers),
        "draft_vocab_size": vocab.draft_vocab_size,
        "vocabulary": files.digest(vocab.d2t.tolist()),
        "dataset": files.digest_file(dataset_dir / "dataset.parquet"),
        "target": target.revision,
        "flags": draft.FLAGS,
        "start": start.identity(settings.start),
        **optimizer.RECORD,
    }
    return values | {"digest": files.digest(values)}


def is_done(head_dir: Path, record: dict[str, Any]) -> bool:
    """Whether the head there is whole and came of the same settings and inputs."""
    path = head_dir / "training.json"
    same = path.exists() and files.read_json(path).get("digest") == record["digest"]
    return same and whole(head_dir / "model.safetensors")
