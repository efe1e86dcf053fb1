"""Everything a training needs to go on, in one safetensors file that is replaced whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from labkit import files


def save(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Write trainable weights, optimiser state and random state; `state` (JSON) goes into the file's header."""
    tensors = {f"model.{name}": value.detach() for name, value in trainable(model).items()}
    for index, slot in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": torch.as_tensor(value) for key, value in slot.items()}
    tensors["rng"] = torch.get_rng_state()
    tensors = {name: value.contiguous().cpu() for name, value in tensors.items()}
    with files.atomic(path) as temporary:
        save_file(tensors, temporary, metadata={"state": json.dumps(state)})


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Put a saved training back into model and optimiser and return its `state`; None where there is none.

    An unreadable file counts as none: the training starts anew.
    """
    state = peek(path)
    if state is None:
        return None
    slots: dict[int, dict[str, torch.Tensor]] = {}
    with safe_open(path, framework="pt") as file, torch.no_grad():
        for name, parameter in trainable(model).items():
            parameter.copy_(file.get_tensor(f"model.{name}"))
        for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
            if name.startswith("optimizer."):
                _, index, key = name.split(".", 2)
                slots.setdefault(int(index), {})[key] = file.get_tensor(name)
        torch.set_rng_state(file.get_tensor("rng"))
    optimizer.load_state_dict(optimizer.state_dict() | {"state": slots})
    return state


def peek(path: Path) -> dict[str, Any] | None:
    """The `state` of a checkpoint without its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads((file.metadata() or {})["state"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}
