"""The head's configuration from its target's, for a target of any family, with or without weights at hand."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import files, settings
from labkit.errors import LabError
from labkit.targets import Geometry, Target, geometry
from labkit.targets.configs import first, unwrap

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from transformers import PretrainedConfig

# All written out in config.json: vLLM's loader and speculators' class read an absent one differently.
# EAGLE-3 as published, but for norm_output (EAGLE 3.1): chosen by trials on a few hundred conversations (LOG.md).
FLAGS = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": True}
Source = Target | str | Path | Mapping[str, Any]  # a target, a name in data/models, a config.json, its content


class UnknownArchitecture(LabError):
    """There is no draft layer, or no form of head, for this configuration."""


def raw_config(source: Source) -> Mapping[str, Any]:
    """The whole config.json of a target, of a name in data/models, of a file or its folder."""
    if isinstance(source, Mapping):
        return source
    if isinstance(source, Target):
        return files.read_json(source.path / "config.json")
    shipped = settings.root() / "data" / "models" / f"{source}.json"
    path = Path(source)
    return files.read_json(shipped if shipped.is_file() else path / "config.json" if path.is_dir() else path)


def shape_of(source: Source) -> Geometry:
    """The geometry of a source."""
    return source.geometry if isinstance(source, Target) else geometry(source)


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE of a configuration in the new schema, whichever it has; of nested ones, full attention's."""
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    values = dict(values.get("full_attention", values))
    kind = values.pop("type", None) or "default"
    values.setdefault("rope_type", kind)
    values.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    return values


def both_schemas(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The same RoPE as Transformers 5 reads it and as everything before, and SGLang, reads it."""
    old = {name: value for name, value in rope.items() if name != "rope_theta"}
    scaling = None if rope["rope_type"] == "default" else old | {"type": rope["rope_type"]}
    return {"rope_parameters": dict(rope), "rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def layer_config(source: Source, num_layers: int = 1) -> PretrainedConfig:
    """The decoder layer's configuration: the target's own sizes as a Llama or Qwen3 with full attention.

    A target with MLA gets plain attention with as many heads of its values' width (Kimi-K2: 64 of 128), as
    published heads for it have.
    """
    from transformers import LlamaConfig, Qwen3Config

    config, shape = raw_config(source), shape_of(source)
    text = unwrap(config)[0]
    kind = Qwen3Config if shape.model_type.startswith("qwen3") else LlamaConfig
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    found = {name: copy.deepcopy(first((name,), text, config)) for name in names}
    made = kind(
        **{name: value for name, value in found.items() if value is not None},
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.v_head_dim if shape.is_mla else shape.head_dim,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=text.get("rms_norm_eps") or 1e-6,
        hidden_act=first(("hidden_act", "hidden_activation"), text) or "silu",
        attention_bias=bool(text.get("attention_bias")),
        rope_parameters=rope_of(text),
        num_hidden_layers=num_layers,
        tie_word_embeddings=False,
        use_sliding_window=False,
        layer_types=["full_attention"] * num_layers,
    )
    made._attn_implementation = "sdpa"  # FlexAttention has no backward pass on the CPU
    return made


def configure(
    source: Source,
    *,
    draft_vocab_size: int,
    layers: Sequence[int],
    ttt_steps: int = 3,
    num_layers: int = 1,
    **flags: bool,
) -> Eagle3SpeculatorConfig:
    """The configuration of a head over `layers` (vLLM's ids, without the last output) of a target.

    `flags` replace those of FLAGS. Raises UnknownArchitecture for flags that no engine takes together.
    """
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    unknown = set(flags) - set(FLAGS)
    if unknown:
        raise UnknownArchitecture(f"a head has no flags {sorted(unknown)}", f"use {', '.join(FLAGS)}")
    name = str(source.path) if isinstance(source, Target) else None
    try:
        return Eagle3SpeculatorConfig(
            transformer_layer_config=layer_config(source, num_layers),
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=shape_of(source).hidden_size,
            eagle_aux_hidden_state_layer_ids=list(layers),
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=ttt_steps)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=name, architectures=[shape_of(source).architecture]),
            ),
            **(FLAGS | flags),
        )
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UnknownArchitecture(f"speculators refuses this head: {reason}", "choose other flags") from error


def written_out(config: PretrainedConfig) -> dict[str, Any]:
    """The layer's configuration with nothing left to defaults, and RoPE in both schemas."""
    values = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    return values | {"sliding_window": values.get("sliding_window")} | both_schemas(rope_of(values))


def shapes(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Name and shape of the tensors that a head needs, from a config.json in speculators' form."""
    layer = config["transformer_layer_config"]
    hidden, width = layer.get("hidden_size", 0), layer.get("intermediate_size", 0)
    dim = layer.get("head_dim") or hidden // max(1, layer.get("num_attention_heads", 1))
    queries, keys = layer.get("num_attention_heads", 0) * dim, layer.get("num_key_value_heads", 0) * dim
    full = layer.get("vocab_size", 0)
    size = config.get("draft_vocab_size") or full
    inputs = len(config.get("eagle_aux_hidden_state_layer_ids") or [0, 0, 0])
    inner = config.get("target_hidden_size") or hidden
    found = {"fc.weight": [hidden, inner * inputs], "norm.weight": [hidden], "lm_head.weight": [size, hidden]}
    for number in range(layer.get("num_hidden_layers", 1)):
        wide = 2 * hidden if number == 0 else hidden
        parts = {
            "self_attn.q_proj": [queries, wide],
            "self_attn.k_proj": [keys, wide],
            "self_attn.v_proj": [keys, wide],
            "self_attn.o_proj": [hidden, queries],
            "mlp.down_proj": [hidden, width],
            "mlp.gate_proj": [width, hidden],
            "mlp.up_proj": [width, hidden],
            "input_layernorm": [hidden],
            "post_attention_layernorm": [hidden],
        }
        parts |= {"hidden_norm": [hidden]} if number == 0 else {}
        if layer.get("model_type") == "qwen3":
            parts |= {"self_attn.q_norm": [dim], "self_attn.k_norm": [dim]}
        found |= {f"layers.{number}.{name}.weight": shape for name, shape in parts.items()}
    if config.get("norm_before_fc"):
        found["input_norm.weight"] = [inner * inputs]
    if config.get("fc_norm"):
        found |= {f"fc_norm.{i}.weight": [inner] for i in range(inputs)}
    return found if size == full else found | {"d2t": [size], "t2d": [full]}
