"""What an extraction's folder holds: record, names of files, which rows are a worker's, which are done."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pandas as pd
from safetensors import SafetensorError

from labkit import files, targets
from labkit.errors import LabError
from labkit.extract import forms

RECORD = "extraction.json"
DECIDES = ("revision", "layers", "hidden_size")  # where these differ, files look alike and mean another thing
LOCK_LIMIT_S = 60.0


class BadShard(LabError):
    """A shard is not written as i/n with i from 1 to n."""


class ShardBusy(LabError):
    """Another process works on the same shard of the same folder."""


def states_path(out_dir: Path, row: int) -> Path:
    """The file of dataset row `row`."""
    return out_dir / f"hs_{row}.safetensors"


def bytes_needed(
    seq_lens: Sequence[int], num_states: int, hidden_size: int, item_bytes: int = 2, form: str = "bf16"
) -> int:
    """Disk space in bytes: a state of `hidden_size` numbers for each of `num_states` layers, and the token id."""
    state = num_states * hidden_size * item_bytes * forms.SIZE[form]
    return int(np.sum(seq_lens) * (state + (4 * num_states if form == "fp8" else 0) + 8))


def record_of(dataset_dir: Path, out_dir: Path, target: targets.Target, layers: Sequence[int]) -> dict[str, Any]:
    """What an extraction is of; paths are for whoever reads it, `DECIDES` for the lab."""
    geometry = target.geometry
    return {
        "dataset": os.path.relpath(dataset_dir, out_dir),
        "target": str(target.path),
        "revision": target.revision,
        "layers": [*layers, geometry.num_hidden_layers],
        "hidden_size": geometry.hidden_size,
    }


class OtherStates(LabError):
    """The folder holds states of another target or of other layers, and nobody said that they may go."""


def keep_or_clear(out_dir: Path, record: dict[str, Any], replace: bool = True) -> None:
    """Drop files of another target or of other layers: they look the same and would train a useless head.

    Raises OtherStates instead where `replace` is off.
    Safe beside other workers on the same folder: the first one clears it, the others find it theirs.
    """
    path = out_dir / RECORD
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(out_dir.with_name(f".{out_dir.name}.lock"), timeout=LOCK_LIMIT_S):
        before = files.read_record(path) if path.exists() else None
        other = [name for name in DECIDES if before and before.get(name) != record[name]]
        if other and not replace:
            told = ", ".join(f"{name} {before.get(name)} instead of {record[name]}" for name in other)
            raise OtherStates(
                f"{out_dir} holds states with {told}", "give another folder, or --force to replace them"
            )
        if other:
            shutil.rmtree(out_dir)
        if before != record:
            files.write_json(path, record)


def rows_of_shard(shard: str, rows: int) -> range:
    """Dataset rows of shard "i/n" (i from 1 to n): every n-th from the i-th; all where it is empty.

    The shards of one n are disjoint and together complete. Raises BadShard.
    """
    words = (shard or "1/1").split("/")
    try:
        part, parts = (int(word) for word in words)
    except ValueError:
        part, parts = 0, 0
    if not 1 <= part <= parts:
        raise BadShard(f"shard={shard!r} is no part of a whole", 'write it as "2/4": the second of four')
    return range(part - 1, rows, parts)


def rows_of(dataset: pd.DataFrame, shard: str, split: str = "") -> list[int]:
    """A shard's rows, those of one split where it is named."""
    mine = rows_of_shard(shard, len(dataset))
    return [row for row in mine if not split or dataset.split.iloc[row] == split]


@contextlib.contextmanager
def alone(out_dir: Path, shard: str) -> Iterator[None]:
    """Hold this shard's lock; raises ShardBusy. A killed process gives it back by itself."""
    name = (shard or "1/1").replace("/", "-of-")
    lock = filelock.FileLock(out_dir / f".shard-{name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise ShardBusy(
            f"another process extracts shard {shard or '1/1'} into {out_dir}",
            "wait for it or stop it, or give each worker a shard of its own",
        ) from None
    try:
        yield
    finally:
        lock.release()


def expected_shape(ids: Sequence[int], record: dict[str, Any]) -> list[int]:
    """[T, layers, H]."""
    return [len(ids), len(record["layers"]), record["hidden_size"]]


def finished(out_dir: Path, row: int, ids: Sequence[int], record: dict[str, Any], form: str = "bf16") -> bool:
    """Whether the row's file is whole, of this form and of these tokens; reads only header and ids."""
    try:
        found, shape, tokens = forms.form_and_shape(states_path(out_dir, row))
    except (OSError, SafetensorError, KeyError):
        return False
    return (found, shape, tokens) == (form, expected_shape(ids, record), [int(token) for token in ids])
