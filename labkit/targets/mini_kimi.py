"""mini-kimi: a small MoE in Kimi-K2.5's architecture that labkit.pretrain trained; it ships in data/targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit import files, settings
from labkit.targets.quiet import no_progress_bars

TEXT = "language_model."  # where Kimi's checkpoint keeps the text model, its lm_head included


def shipped() -> Path:
    """Where the trained model lies in the repository."""
    return settings.root() / "data" / "targets" / "mini-kimi"


def config() -> dict[str, Any]:
    """Its configuration as in config.json: data/models/mini-kimi.json without the lab's own remarks."""
    described = files.read_json(settings.root() / "data" / "models" / "mini-kimi.json")
    return {key: value for key, value in described.items() if not key.startswith("_")}


def wrap(text_weights: Path, folder: Path, seed: int = 0) -> None:
    """Write a text model's weights (model.safetensors, DeepSeek's names) as a Kimi-K2.5 checkpoint into `folder`.

    The vision tower and its projector have weights drawn from `seed`: they are there because the wrapper has
    them, and were never trained. Raises KeyError where the text model lacks a tensor of the architecture.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Kimi_K25ForConditionalGeneration(Kimi_K25Config(**config()))
    with no_progress_bars():
        model.to(torch.bfloat16).save_pretrained(folder)
    file, text = folder / "model.safetensors", load_file(text_weights)
    tensors = {layer_name(name): tensor for name, tensor in load_file(file).items()}
    for name in tensors:
        if name.startswith(TEXT):
            tensors[name] = text[name.removeprefix(TEXT)]
    save_file(tensors, file, metadata={"format": "pt"})


def layer_name(name: str) -> str:
    """A tensor's name as Kimi-K2.5's own checkpoint has it.

    Transformers 5.19 reverses the vision tower's blocks -> layers renaming in the text model, too, and writes
    language_model.model.blocks.0; it reads either form, other tools only the checkpoint's own.
    """
    return name.replace(f"{TEXT}model.blocks.", f"{TEXT}model.layers.")
