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
    data, rows = out_dir / "speculators", conversations.load(dataset_dir)
    if write:
        for_speculators(dataset_dir, data, vocab)
    ids = extract.layers_of(layers or settings.aux_layers, target.geometry.num_hidden_layers)
    flags = options(settings, target.path, data, hidden_dir.absolute(), vocab.draft_vocab_size, ids)
    train = int((rows.split == "train").sum())
    flags["train_data_ratio"] = (train + 0.5) / len(rows)  # it takes the whole part of the product
    if "from_pretrained" not in flags:
        flags["draft_arch"] = draft.config.layer_config(target).model_type
    return shlex.join(words(flags, processes))


def options(
    settings: Eagle3Pipeline, verifier: Path | str, data: Path, hidden: Path, size: int, layers: Sequence[int]
) -> dict[str, Any]:
    """Flags by speculators' own names, as far as settings, places and the draft vocabulary's size say them.

    What its defaults would set otherwise is written out, the norms too.
    """
    flags: dict[str, Any] = {
        "verifier_name_or_path": verifier,
        "speculator_type": "eagle3",
        "data_path": data,
        "hidden_states_path": hidden,
        "on_missing": "raise",
        "total_seq_len": settings.batch_tokens,
        "hidden_states_dtype": "bfloat16" if settings.precision == "bf16" else "float32",
        "d2t_path": data / f"d2t-{size}.npy",
        "t2d_path": data / f"t2d-{size}.npy",
        "draft_vocab_size": size,
        "target_layer_ids": layers,
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
        **draft.FLAGS,
    }
    if settings.start not in (start.WARM, start.SCRATCH):
        return flags | {"from_pretrained": Path(settings.start).absolute()}
    count = settings.draft_layers
    return flags | {"num_layers": count, "full_attention_indices": range(count)}


def words(flags: dict[str, Any], processes: int) -> list[str]:
    """The command on so many GPUs; a switch that is off stands in its negative form, which --fc-norm has not."""
    found = ["torchrun", "--standalone", f"--nproc_per_node={processes}", "-m", "speculators.train"]
    found = found if processes > 1 else ["speculators", "train"]
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found += [f"--{flag}"] if value else [f"--no-{flag}"] if name != "fc_norm" else []
        else:
            several = isinstance(value, (list, tuple, range))
            found += [f"--{flag}", *(map(str, value) if several else [str(value)])]
    return found
