"""The text model of a multimodal checkpoint alone, as engines serve it that cannot take the wrapper."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from labkit import files
from labkit.targets.configs import BrokenConfig, unwrap

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")


def export(source: Path, folder: Path, wrapper: str) -> None:
    """Write the text model of the checkpoint in `source` into `folder`: config, weights, tokenizer.

    `wrapper` is where the checkpoint keeps it ("language_model.model"). Tensors keep their bits and types; what
    lies outside the wrapper (vision tower, projector) is left out. A tied lm_head is written out and untied:
    vLLM's DeepSeek class knows no tying, its head would be zeros. Raises BrokenConfig for an unknown family.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    config, _wrapped = unwrap(files.read_json(source / "config.json"))
    untied = {"architectures": [text_class(dict(config))], "tie_word_embeddings": False}
    files.write_json(folder / "config.json", dict(config) | untied)
    index = source / "model.safetensors.index.json"
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            kept = {new: tensors.get_tensor(old) for old in tensors.keys() if (new := text_name(old, wrapper))}  # noqa: SIM118
        if config.get("tie_word_embeddings") and EMBEDDING in kept:
            kept[HEAD] = kept[EMBEDDING].clone()
        if kept:
            save_file(kept, folder / file.name, metadata={"format": "pt"})
    if index.exists():
        listed = files.read_json(index)
        names = {new: at for old, at in listed["weight_map"].items() if (new := text_name(old, wrapper))}
        names |= {HEAD: names[EMBEDDING]} if config.get("tie_word_embeddings") else {}
        files.write_json(folder / index.name, listed | {"weight_map": names})
    for pattern in TOKENIZER:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def text_name(name: str, wrapper: str) -> str:
    """A tensor's name without the wrapper; "" for one that is no part of the text model."""
    for head in ("lm_head.", f"{wrapper.removesuffix('.model')}.lm_head."):
        if name.startswith(head):
            return name.replace(head, "lm_head.", 1)
    return name.replace(wrapper, "model", 1) if name.startswith(f"{wrapper}.") else ""


def text_class(config: dict[str, Any]) -> str:
    """The Transformers class of a bare text model with this configuration."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = str(config.get("model_type", ""))
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise BrokenConfig(f"the text model's model_type is {kind!r}", "give a model that Transformers knows")
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
