"""Any family's config.json, in a multimodal wrapper or not, to one set of names: DeepSeek's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit import files
from labkit.errors import LabError

WRAPPED = ("text_config", "llm_config", "language_config", "thinker_config")

# Our name: what other families call it, best first.
ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "n_routed_experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "num_experts_per_tok": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "top_k_experts",
        "moe_k",
        "moe_topk",
    ),
    "n_shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_intermediate_size"),
    "shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
    "first_k_dense_replace": ("first_k_dense_replace",),
    "moe_layer_freq": ("moe_layer_freq", "decoder_sparse_step"),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "num_nextn_predict_layers": ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
}
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")


class BrokenConfig(LabError):
    """A config.json is unreadable, lacks a figure, or contradicts itself."""


def read_config(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; raises BrokenConfig."""
    try:
        config = files.read_json(file)
    except files.BrokenFile as error:
        raise BrokenConfig(error.what, "restore the model's config.json") from error
    if not isinstance(config, dict):
        raise BrokenConfig(f"{file} holds {type(config).__name__}, not an object", "restore config.json")
    return config


def checkpoint_wrapper(folder: Path) -> dict[str, str]:
    """Where the checkpoint in `folder` keeps its text model, from the names of its tensors; {} if unknown."""
    index, weights = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        names = list(files.read_json(index).get("weight_map", {}))
    elif weights.is_file():
        names = tensor_names(weights)
    else:
        return {}
    tail = ".embed_tokens.weight"
    return next(({"_wrapper": name.removesuffix(tail)} for name in names if name.endswith(tail)), {})


def tensor_names(weights: Path) -> list[str]:
    """The names in a safetensors file; none when it is damaged, which others report."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="numpy") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError):
        return []


def normalise(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The figures of a configuration under Geometry's names; raises BrokenConfig naming what is wrong."""
    text, wrapped = unwrap(config)
    values = {ours: first(names, text) for ours, names in ALIASES.items()}
    check_figures(values, where)
    known = {ours: value for ours, value in values.items() if value is not None}
    known["mlp_only_layers"] = tuple(text.get("mlp_only_layers") or ()) + flagged_dense(known)
    fill_in(known)
    routed, chosen = known.get("n_routed_experts", 0), known.get("num_experts_per_tok", 0)
    if routed and not 0 < chosen <= routed:
        raise BrokenConfig(f"{where}: {chosen} experts a token of {routed}", "restore config.json")
    architecture = (first(("architectures",), config, text) or [""])[0]
    wrapper = str(config.get("_wrapper") or wrapper_path(architecture)) if wrapped else ""
    return known | {
        "model_type": str(text.get("model_type", "")),
        "architecture": architecture,
        "wrapper": wrapper,
        "tie_word_embeddings": bool(first(("tie_word_embeddings",), text, config)),
        "dtype": str(first(("dtype", "torch_dtype"), text, config) or "bfloat16"),
        "quantization_config": dict(first(("quantization_config",), config, text) or {}),
        "source": str(config.get("_source") or where),
    }


def check_figures(values: Mapping[str, Any], where: str) -> None:
    """Raise BrokenConfig naming the figures that are missing, no whole numbers or out of range."""
    for name, value in values.items():
        smallest = 1 if name in REQUIRED else 0
        flags = name == "moe_layer_freq" and isinstance(value, list)
        right = flags or (isinstance(value, int) and value >= smallest)
        if not right and (value is not None or name in REQUIRED):
            raise BrokenConfig(f"{where}: {name} is {value!r}, not a whole number", "restore config.json")


def unwrap(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """The text model's part of a configuration, and whether it lay in a wrapper."""
    inner = next((config[key] for key in WRAPPED if isinstance(config.get(key), Mapping)), None)
    return (config, False) if inner is None else (unwrap(inner)[0], True)


def wrapper_path(architecture: str) -> str:
    """Where a multimodal class keeps its text model: Kimi's own and older wrappers nest it the other way."""
    older = ("KimiK25", "KimiVL", "InternVL")
    return "language_model.model" if architecture.startswith(older) else "model.language_model"


def first(names: tuple[str, ...], *configs: Mapping[str, Any]) -> Any:
    """The first of `names` that is set, in the first configuration that sets one."""
    return next((c[name] for c in configs for name in names if c.get(name) is not None), None)


def flagged_dense(known: dict[str, Any]) -> tuple[int, ...]:
    """The dense layers of a family that gives one flag a layer instead of a stride; takes the flags out."""
    if not isinstance(known.get("moe_layer_freq"), list):
        return ()
    return tuple(i for i, routed in enumerate(known.pop("moe_layer_freq")) if not routed)


def fill_in(known: dict[str, Any]) -> None:
    """Set what families leave out because it follows from other figures."""
    heads = known["num_attention_heads"]
    known.setdefault("num_key_value_heads", heads)
    known.setdefault("head_dim", known["hidden_size"] // heads)
    known["moe_layer_freq"] = max(1, int(known.get("moe_layer_freq", 1)))
    if not known.get("n_routed_experts"):
        moe = ("num_experts_per_tok", "n_shared_experts", "moe_intermediate_size", "first_k_dense_replace")
        for name in (*moe, "shared_expert_intermediate_size"):
            known.pop(name, None)
        return
    # Mixtral and gpt-oss have no dense layers and call the experts' width intermediate_size.
    known.setdefault("moe_intermediate_size", known["intermediate_size"])
    shared = known.setdefault("n_shared_experts", int("shared_expert_intermediate_size" in known))
    known.setdefault("shared_expert_intermediate_size", shared * known["moe_intermediate_size"])
