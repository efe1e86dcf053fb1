"""Everything a training needs to go on, in one safetensors file; the one before stays beside the newest."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from labkit import files

WHOLE = {"full_state_dict": True, "cpu_offload": True, "ignore_frozen_params": True}


def save(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    rows: list[dict[str, float]],
    *,
    write: bool = True,
) -> None:
    """Write trainable weights, optimiser state, random state, `state` (JSON) and the metrics' `rows`.

    Every process of a training has to call it (sharded weights are gathered); only the one with `write` writes.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    weights, slots = get_state_dict(model, optimizer, options=StateDictOptions(**WHOLE))
    if not write:
        return
    tensors = {f"model.{name}": value for name, value in weights.items()}
    for name, values in slots["state"].items():
        tensors |= {f"optimizer.{key}|{name}": torch.as_tensor(value) for key, value in values.items()}
    columns = list(rows[0]) if rows else []
    values = [[row[name] for name in columns] for row in rows]
    tensors |= {"rng": torch.get_rng_state(), "rows": torch.tensor(values, dtype=torch.float64)}
    tensors = {name: value.contiguous().cpu() for name, value in tensors.items()}
    with files.atomic(path) as temporary:
        save_file(tensors, temporary, metadata={"state": json.dumps(state), "columns": json.dumps(columns)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())  # a renamed file may be empty after a power cut otherwise
        keep(path)


def before(path: Path) -> Path:
    """Where the checkpoint before the newest lies."""
    return path.with_name(f"{path.stem}.before{path.suffix}")


def keep(path: Path) -> None:
    """Let the present checkpoint stay under its other name."""
    if path.exists():
        link = path.with_name(f".{path.name}.link")
        link.unlink(missing_ok=True)
        link.hardlink_to(path)
        link.replace(before(path))


def newest(path: Path, digest: str) -> Path | None:
    """The last readable checkpoint of a training with this digest."""
    return next((p for p in (path, before(path)) if (peek(p) or {}).get("digest") == digest), None)


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a saved training's weights, optimiser state and random state back."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    options = StateDictOptions(**WHOLE, strict=False)
    own = StateDictOptions(ignore_frozen_params=True)  # not gathered: only the names of the groups are wanted
    _weights, fresh = get_state_dict(model, optimizer, options=own)
    weights: dict[str, Any] = {}
    slots: dict[str, dict[str, torch.Tensor]] = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
            kind, _, rest = name.partition(".")
            if kind == "model":
                weights[rest] = file.get_tensor(name)
            elif kind == "optimizer":
                key, _, parameter = rest.partition("|")
                slots.setdefault(parameter, {})[key] = file.get_tensor(name)
        torch.set_rng_state(file.get_tensor("rng"))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=weights,
        optim_state_dict={"state": slots, "param_groups": fresh["param_groups"]},
        options=options,
    )


def peek(path: Path) -> dict[str, Any] | None:
    """The `state` of a checkpoint without its tensors; None where there is none that can be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads((file.metadata() or {})["state"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def rows(path: Path) -> list[dict[str, float]]:
    """The metrics up to a checkpoint, a row a step."""
    with safe_open(path, framework="pt") as file:
        columns = json.loads((file.metadata() or {})["columns"])
        return pd.DataFrame(file.get_tensor("rows").numpy(), columns=columns).to_dict("records")


def clear(path: Path) -> None:
    """Remove the checkpoints, and what a killed process left of one."""
    path.unlink(missing_ok=True)
    before(path).unlink(missing_ok=True)
    sweep(path)


def sweep(path: Path) -> None:
    """Remove what processes that were killed while writing left beside `path`."""
    for scratch in path.parent.glob(f".{path.name}.*"):
        shutil.rmtree(scratch, ignore_errors=True) if scratch.is_dir() else scratch.unlink(missing_ok=True)
