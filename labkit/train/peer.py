"""The same training with speculators' own trainer: our data in its form, and its command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from labkit import conversations, draft, extract, files
from labkit.errors import LabError
from labkit.settings import Eagle3Pipeline
from labkit.targets import Target
from labkit.train import optimizer, start
from labkit.vocab import VocabMap

COLUMNS = {"input_ids": int, "loss_mask": bool}


class UnorderedSplits(LabError):
    """The data set's rows are not those of training first, then held-out ones."""


def for_speculators(dataset_dir: Path, out_dir: Path, vocab: VocabMap) -> Path:
    """Write the data set as speculators reads it and return the folder.

    An Arrow data set (input_ids, loss_mask, seq_len) in the same order, so that row i's states are hs_<i>, and
    d2t-<n>.npy and t2d-<n>.npy. Raises UnorderedSplits, since speculators splits by position.
    """
    from datasets import Dataset

    frame = conversations.load(dataset_dir)
    held_out = (frame.split != "train").to_numpy()
    if (np.diff(held_out.astype(int)) < 0).any():
        raise UnorderedSplits(
            f"{dataset_dir} has training rows after held-out ones", "speculators takes the last rows to validate"
        )
    columns = {name: [list(map(kind, row)) for row in frame[name]] for name, kind in COLUMNS.items()}
    rows = Dataset.from_dict(columns | {"seq_len": frame.seq_len.tolist()}).with_format("torch")
    with files.atomic(out_dir) as folder:
        rows.save_to_disk(str(folder))
        np.save(folder / f"d2t-{vocab.draft_vocab_size}.npy", vocab.d2t.numpy())
        np.save(folder / f"t2d-{vocab.draft_vocab_size}.npy", vocab.t2d.numpy())
    return out_dir


def speculators_command(
    settings: Eagle3Pipeline,
    *,
    target: Target,
    dataset_dir: Path,
    hidden_dir: Path,
    vocab: VocabMap,
    out_dir: Path,
    layers: Sequence[int] = (),
    processes: int = 1,
    write: bool = True,
) -> str:
    """The `speculators train` command that trains the same head on the same data, for a GPU machine.

    Writes the data in speculators' form into `out_dir`/speculators first, unless `write` is off. What it does not
    share: the warm start (it begins at random, or with `start`'s head), step packing, and the lab's checkpoints.
    """
    data = out_dir / "speculators"
    if write:
        for_speculators(dataset_dir, data, vocab)
    flags = options(settings, target, dataset_dir, hidden_dir, vocab, data)
    flags["target_layer_ids"] = extract.layers_of(layers or settings.aux_layers, target.geometry.num_hidden_layers)
    words = ["torchrun", f"--nproc_per_node={processes}", "-m", "speculators.train"]
    words = words if processes > 1 else ["speculators", "train"]
    for name, value in flags.items():
        words.append(f"--{name.replace('_', '-')}")
        words += [str(item) for item in value] if isinstance(value, (list, tuple, range)) else [str(value)]
    return shlex.join([*words, *switches()])


def options(
    settings: Eagle3Pipeline, target: Target, dataset_dir: Path, hidden_dir: Path, vocab: VocabMap, data: Path
) -> dict[str, Any]:
    """Flags with a value, by speculators' own names."""
    rows = conversations.load(dataset_dir)
    train = int((rows.split == "train").sum())
    flags: dict[str, Any] = {
        "verifier_name_or_path": target.path,
        "speculator_type": "eagle3",
        "data_path": data,
        "hidden_states_path": hidden_dir.absolute(),
        "on_missing": "raise",
        "train_data_ratio": (train + 0.5) / len(rows),  # it takes the whole part of the product
        "total_seq_len": settings.batch_tokens,
        "hidden_states_dtype": "bfloat16" if settings.precision == "bf16" else "float32",
        "d2t_path": data / f"d2t-{vocab.draft_vocab_size}.npy",
        "t2d_path": data / f"t2d-{vocab.draft_vocab_size}.npy",
        "draft_vocab_size": vocab.draft_vocab_size,
        "loss_fn": settings.loss,
        "ttt_steps": settings.ttt_steps,
        "ttt_step_loss_decay": settings.ttt_decay,
        "optimizer": "adamw",
        "lr": settings.learning_rate,
        "weight_decay": optimizer.ADAMW["weight_decay"],
        "scheduler_type": "cosine",
        "scheduler_warmup_ratio": optimizer.WARMUP_SHARE,
        "epochs": settings.epochs,
        "seed": settings.seed,
        "save_path": data / "checkpoints",
    }
    if settings.start not in (start.WARM, start.SCRATCH):
        return flags | {"from_pretrained": Path(settings.start).absolute()}
    arch = draft.config.layer_config(target).model_type
    count = settings.draft_layers
    return flags | {"num_layers": count, "full_attention_indices": range(count), "draft_arch": arch}


def switches() -> list[str]:
    """The norm flags written out: speculators' defaults are others than the lab's."""
    plain = {name: value for name, value in draft.FLAGS.items() if name != "fc_norm"}
    fc_norm = ["--fc-norm"] if draft.FLAGS["fc_norm"] else []  # has no negative form
    return fc_norm + [f"--{'' if value else 'no-'}{name.replace('_', '-')}" for name, value in plain.items()]
