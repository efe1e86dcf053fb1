"""What would go wrong if this head were served with this target: found before an engine starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from labkit import files, vocab
from labkit.draft.head import FLAGS
from labkit.targets import Target


def preflight(head_dir: Path, target: Target) -> list[str]:
    """The problems of serving `head_dir` over `target`, each with its effect; empty when all is well."""
    try:
        config = files.read_json(head_dir / "config.json")
        tensors = load_file(head_dir / "model.safetensors")
    except (OSError, SafetensorError, files.BrokenFile) as error:
        return [f"{head_dir} cannot be read: {error}"]
    record = files.read_json(head_dir / "training.json") if (head_dir / "training.json").exists() else {}
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict) or config.get("speculators_model_type") != "eagle3":
        return [f"{head_dir}/config.json is not in speculators' eagle3 format"]
    return [
        *flag_problems(config),
        *geometry_problems(config, layer, target),
        *layer_problems(config, record, target),
        *tensor_problems(config, layer, tensors, target),
    ]


def flag_problems(config: dict[str, Any]) -> Iterator[str]:
    """Flags that are not written out are read differently by vLLM and by speculators."""
    for name in FLAGS:
        if name not in config:
            yield f"config.json does not say {name}: vLLM and speculators then assume different values"


def geometry_problems(config: dict[str, Any], layer: dict[str, Any], target: Target) -> Iterator[str]:
    """Sizes and RoPE that have to equal the target's."""
    from speculators.models.utils import get_verifier_config

    source = get_verifier_config(str(target.path))
    for name in ("vocab_size", "hidden_size", "max_position_embeddings", "rope_parameters"):
        mine, its = layer.get(name), getattr(source, name, None)
        if name == "rope_parameters":
            mine, its = rope(layer), rope(source.to_dict())
        if mine != its:
            yield f"{name} is {mine}, the target's is {its}: acceptance falls, the more the longer the text"
    if layer.get("use_sliding_window") or "sliding_attention" in (layer.get("layer_types") or []):
        yield "the draft layer has a sliding window, which the target has not: long texts lose acceptance"
    draft_size = config.get("draft_vocab_size")
    if not isinstance(draft_size, int) or not 0 < draft_size <= source.vocab_size:
        yield f"draft_vocab_size is {draft_size}, outside 1..{source.vocab_size}"


def rope(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE parameters of a configuration, in the new or the old form."""
    values = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    values.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    values.setdefault("rope_type", values.pop("type", "default"))
    return values


def layer_problems(config: dict[str, Any], record: dict[str, Any], target: Target) -> Iterator[str]:
    """Layer ids that the target does not have, or other ones than the head was trained on."""
    layers, count = config.get("eagle_aux_hidden_state_layer_ids"), target.geometry.num_hidden_layers
    if not layers:
        yield "config.json names no eagle_aux_hidden_state_layer_ids: the engine would guess them"
        return
    if layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] > count:
        yield f"layer ids {layers} do not ascend within 0..{count}: vLLM sorts them, fc's columns stay as they are"
    trained_on = record.get("layers")
    if trained_on is not None and trained_on != layers:
        yield f"layer ids are {layers}, but the head was trained on {trained_on}: acceptance would collapse"


def tensor_problems(
    config: dict[str, Any], layer: dict[str, Any], tensors: dict[str, torch.Tensor], target: Target
) -> Iterator[str]:
    """Tensors that are missing, of the wrong shape, or not finite, and a contradictory vocabulary map."""
    for name, shape in expected_shapes(config, layer).items():
        if name not in tensors:
            effect = ": vLLM would draft with random numbers" if name == "lm_head.weight" else ""
            yield f"model.safetensors has no {name}{effect}"
        elif list(tensors[name].shape) != shape:
            yield f"{name} has shape {list(tensors[name].shape)} instead of {shape}"
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            yield f"{name} holds NaN or infinity"
    if "d2t" in tensors:
        yield from vocab.problems(tensors["d2t"], target.geometry.vocab_size)
    if "d2t" in tensors and "t2d" in tensors:
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        if sorted(ids.tolist()) != tensors["t2d"].nonzero().flatten().tolist():
            yield "d2t and t2d name different tokens"


def expected_shapes(config: dict[str, Any], layer: dict[str, Any]) -> dict[str, list[int]]:
    """Name and shape of the tensors that a head of this configuration needs."""
    hidden, width = layer.get("hidden_size", 0), layer.get("intermediate_size", 0)
    dim = layer.get("head_dim") or hidden // max(1, layer.get("num_attention_heads", 1))
    queries, keys = layer.get("num_attention_heads", 0) * dim, layer.get("num_key_value_heads", 0) * dim
    size, full = config.get("draft_vocab_size", 0), layer.get("vocab_size", 0)
    shapes = {
        "fc.weight": [hidden, hidden * len(config.get("eagle_aux_hidden_state_layer_ids") or [0, 0, 0])],
        "norm.weight": [hidden],
        "lm_head.weight": [size, hidden],
        "layers.0.self_attn.q_proj.weight": [queries, 2 * hidden],
        "layers.0.self_attn.k_proj.weight": [keys, 2 * hidden],
        "layers.0.self_attn.v_proj.weight": [keys, 2 * hidden],
        "layers.0.self_attn.o_proj.weight": [hidden, queries],
        "layers.0.mlp.down_proj.weight": [hidden, width],
        "layers.0.mlp.gate_proj.weight": [width, hidden],
        "layers.0.mlp.up_proj.weight": [width, hidden],
        "layers.0.hidden_norm.weight": [hidden],
        "layers.0.input_layernorm.weight": [hidden],
        "layers.0.post_attention_layernorm.weight": [hidden],
    }
    return shapes if size == full else shapes | {"d2t": [size], "t2d": [full]}
