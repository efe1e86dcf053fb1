"""Heads written as directories that engines serve, and turned from one form into the other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from labkit import files
from labkit.draft.config import FLAGS, rope_of, written_out
from labkit.draft.forms import FORMS, BadHead, Head, read, to_llama
from labkit.draft.head import NOT_SHIPPED
from labkit.errors import LabError

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel


HEAD_FILES = {"config.json", "model.safetensors", "training.json"}


class Occupied(LabError):
    """A head cannot be written where other files lie."""


class UnknownForm(LabError):
    """A name is no form that a head can be written in."""


def export(
    model: Eagle3DraftModel,
    head_dir: Path,
    *,
    verifier_name: str,
    dtype: torch.dtype = torch.bfloat16,
    record: dict[str, Any] | None = None,
    form: str = "speculators",
) -> Path:
    """Write the head as a directory, whole or not at all: `form` "speculators" (vLLM) or "llama" (vLLM, SGLang).

    `verifier_name` is what config.json calls the target: a name or hub id, since a path means nothing elsewhere.
    `record` goes to training.json, with what the head was trained with, which `preflight` compares later.
    """
    config = model.config.to_dict()
    config["speculators_config"]["verifier"]["name_or_path"] = verifier_name
    config["transformer_layer_config"] = written_out(model.config.transformer_layer_config)
    config |= {"dtype": str(dtype).removeprefix("torch."), "tie_word_embeddings": False}
    config = {key: value for key, value in config.items() if not key.startswith("_")}
    return write(
        head_dir, form, config, shipped_tensors(model, dtype), (record or {}) | {"trained_with": basis(config)}
    )


def shipped_tensors(model: Eagle3DraftModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the head's file holds: everything but the target's own, floating point numbers in `dtype`."""
    return {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous().cpu()
        for name, tensor in model.state_dict().items()
        if not name.startswith(NOT_SHIPPED)
    }


def basis(config: dict[str, Any]) -> dict[str, Any]:
    """What a head must be served with as it was trained: flags, layers, RoPE, positions, attention."""
    layer = config["transformer_layer_config"]
    return {name: config.get(name) for name in FLAGS} | {
        "eagle_aux_hidden_state_layer_ids": config.get("eagle_aux_hidden_state_layer_ids"),
        "rope_parameters": rope_of(layer),
        "max_position_embeddings": layer.get("max_position_embeddings"),
        "layer_types": layer.get("layer_types"),
    }


def convert(head_dir: Path, out_dir: Path, form: str) -> Path:
    """Write a head of either form into `out_dir` in `form`; tensors stay bit for bit the same.

    Raises BadHead, UnknownForm, UnknownArchitecture (a Qwen3 draft layer has no llama form), Occupied.
    """
    refuse_place(head_dir, out_dir)
    head = read(head_dir)
    tensors = head.tensors()
    if "lm_head.weight" not in tensors:
        raise BadHead(f"{head_dir} has no lm_head.weight", "add the target's rows: engines would draft at random")
    return write(out_dir, form, explicit(head), tensors, head.record)


def refuse_place(head_dir: Path, out_dir: Path) -> None:
    """Raise Occupied where writing would cost something: the head itself, or a folder with more than a head."""
    if out_dir.resolve() == head_dir.resolve():
        raise Occupied(f"{out_dir} is the head itself", "give another directory: the head stays as it is")
    if out_dir.exists() and not out_dir.is_dir():
        raise Occupied(f"{out_dir} is a file", "give a directory that is not there yet")
    others = {path.name for path in out_dir.glob("*")} - HEAD_FILES if out_dir.is_dir() else set()
    if others:
        raise Occupied(
            f"{out_dir} holds other files, as {min(others)}, which would be lost",
            "give a directory that is not there yet, or an earlier conversion's",
        )


def explicit(head: Head) -> dict[str, Any]:
    """A head's configuration in speculators' form with everything said that its own form leaves to defaults."""
    from transformers import LlamaConfig, Qwen3Config

    kind = Qwen3Config if head.layer.get("model_type") == "qwen3" else LlamaConfig
    layer = written_out(kind(**head.layer))
    # An unsaid norm_before_residual is True in vLLM's reading of speculators' form, and False everywhere else.
    unsaid = dict.fromkeys(FLAGS, False) | {"norm_before_residual": head.form == "speculators"}
    config = head.speculator_config().to_dict() | {"transformer_layer_config": layer}
    config = {key: value for key, value in config.items() if not key.startswith("_")}
    return (
        config
        | {name: head.config.get(name, unsaid[name]) for name in FLAGS}
        | {
            "dtype": head.config.get("dtype"),
            "tie_word_embeddings": False,
        }
    )


def write(
    head_dir: Path, form: str, config: dict[str, Any], tensors: dict[str, torch.Tensor], record: dict[str, Any]
) -> Path:
    """The directory of a head in `form`; configuration and tensors are given in speculators' form."""
    if form not in FORMS:
        raise UnknownForm(f"{form!r} is no form of a head", f"use one of {', '.join(FORMS)}")
    if form == "llama":
        config = to_llama(config)
        tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
    with files.atomic(head_dir) as folder:
        folder.mkdir()
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
        files.write_json(folder / "config.json", config)
        files.write_json(folder / "training.json", record)
    return head_dir
