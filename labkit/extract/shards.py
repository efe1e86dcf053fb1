"""One worker's part of the states: what the others' lack, and how the parts come together."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from labkit import conversations
from labkit.errors import LabError
from labkit.extract.record import rows_of, rows_of_shard, states_path


class ShardDone(LabError):
    """A worker's shard is done and others are missing: no failure, but what needs all of them cannot go on."""

    exit_code = 0


def left(dataset: pd.DataFrame, out_dir: Path, shard: str, split: str = "") -> dict[str, int]:
    """i/n: rows that have no file in `out_dir`, for each of this shard's n parts that lacks any."""
    parts = rows_of_shard(shard, 0).step
    every = {f"{part}/{parts}": rows_of(dataset, f"{part}/{parts}", split) for part in range(1, parts + 1)}
    missing = {name: sum(not states_path(out_dir, row).exists() for row in rows) for name, rows in every.items()}
    return {name: rows for name, rows in missing.items() if rows}


def done(dataset_dir: Path, out_dir: Path, shard: str, split: str = "") -> ShardDone | None:
    """What to say when a shard is finished: which are missing and how to gather all; None where none is."""
    missing = left(conversations.load(dataset_dir), out_dir, shard, split)
    if not missing:
        return None
    told = ", ".join(f"{name} ({rows} rows)" for name, rows in missing.items())
    return ShardDone(
        f"shard {shard} is done and checked; {out_dir} lacks {told}",
        f"for each of those `labkit extract {dataset_dir} OUT --shard i/n` with the same target, where OUT is "
        "this folder or one whose hs_*.safetensors are copied here; then notebook 04 of this run with shard "
        "empty, which trains",
    )
