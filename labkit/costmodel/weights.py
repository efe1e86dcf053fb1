"""Which weights one step reads on one rank, by part, from a geometry and its quantization."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from labkit.errors import LabError
from labkit.targets import Geometry

DTYPE_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0}
EVERY_RANK = 1 << 30  # a part that any number of ranks can share


class UnknownQuantization(LabError):
    """A quantization_config is of a kind whose bytes the cost model does not know."""


@dataclass(frozen=True)
class Part:
    """Weights read for one token; `ways` is over how many ranks they can be split (1: a copy on each)."""

    name: str
    weights: int
    module: str  # how the checkpoint calls one of them, for the quantization's ignore list
    ways: int = EVERY_RANK
    quantizable: bool = True


def weights(geometry: Geometry, tensor_parallel_size: int = 1) -> pd.DataFrame:
    """A row a part that a one-token step reads: part, weights, bytes_per_weight, replicated, gb_per_rank.

    The embedding is left out (one row of it is read), norms are too small to count. Source of the split:
    vLLM's DeepSeek-V3 and Llama classes (low-rank input projections and the router are not sharded).
    """
    rows = [
        {
            "part": part.name,
            "weights": part.weights,
            "bytes_per_weight": bytes_per_weight(geometry, part),
            "replicated": part.ways == 1,
            "gb_per_rank": part.weights
            * bytes_per_weight(geometry, part)
            / min(part.ways, tensor_parallel_size)
            / 1e9,
        }
        for part in parts(geometry)
        if part.weights
    ]
    return pd.DataFrame(rows)


def parts(g: Geometry) -> Iterator[Part]:
    """The parts of a model, with the weights that one token reads in all layers."""
    h, moe = g.hidden_size, g.num_moe_layers
    yield from attention(g)
    yield Part("dense feed-forward", (g.num_hidden_layers - moe) * 3 * h * g.intermediate_size, mlp("gate_proj"))
    yield Part("router", moe * h * g.n_routed_experts, mlp("gate"), ways=1, quantizable=False)
    shared = moe * 3 * h * g.shared_expert_intermediate_size
    yield Part("shared experts", shared, mlp("shared_experts.gate_proj"))
    routed = moe * g.num_experts_per_tok * 3 * h * g.moe_intermediate_size
    yield Part("routed experts", routed, EXPERT_MODULE)
    yield Part("output head", h * g.vocab_size, "lm_head", quantizable=False)


def mlp(module: str) -> str:
    """The name of a module in a layer's feed-forward part."""
    return f"model.layers.1.mlp.{module}"


EXPERT_MODULE = mlp("experts.0.gate_proj")


def attention(g: Geometry) -> Iterator[Part]:
    """The attention weights of all layers: latent (MLA) or grouped-query."""
    h, layers, heads = g.hidden_size, g.num_hidden_layers, g.num_attention_heads
    module = "model.layers.1.self_attn.o_proj"
    if not g.is_mla:
        yield Part("attention", layers * 2 * h * heads * g.head_dim, module)
        keys = layers * 2 * h * g.num_key_value_heads * g.head_dim
        yield Part("attention, keys and values", keys, module, ways=g.num_key_value_heads)
        return
    query = heads * (g.qk_nope_head_dim + g.qk_rope_head_dim)
    low = h * (g.q_lora_rank + g.kv_lora_rank + g.qk_rope_head_dim)
    high = (g.q_lora_rank or h) * query
    high += g.kv_lora_rank * heads * (g.qk_nope_head_dim + g.v_head_dim) + heads * g.v_head_dim * h
    yield Part("attention, low-rank inputs", layers * low, module, ways=1)
    yield Part("attention", layers * high, module)


def expert_bytes(g: Geometry) -> float:
    """Bytes of one routed expert in one layer, all ranks together; 0 for a dense model."""
    one = Part("expert", 3 * g.hidden_size * g.moe_intermediate_size, EXPERT_MODULE)
    return one.weights * bytes_per_weight(g, one)


def kv_bytes_per_token(g: Geometry, tensor_parallel_size: int = 1) -> float:
    """Bytes of cache that one rank reads for each token of context (bf16); MLA's latent is on every rank."""
    if g.is_mla:
        return 2.0 * g.num_hidden_layers * (g.kv_lora_rank + g.qk_rope_head_dim)
    heads = g.num_key_value_heads / min(tensor_parallel_size, g.num_key_value_heads)
    return 2.0 * g.num_hidden_layers * 2 * heads * g.head_dim


def bytes_per_weight(g: Geometry, part: Part) -> float:
    """Stored bytes of a weight, scales included; raises UnknownQuantization."""
    config = g.quantization_config
    plain = DTYPE_BYTES.get(g.dtype, 2.0)
    if not config or not part.quantizable or ignored(g, part.module):
        return plain
    method = config.get("quant_method", "")
    if method == "fp8":
        block = config.get("weight_block_size")
        return 1.0 + (4.0 / (block[0] * block[1]) if block else 0.0)
    if method == "mxfp4":
        return 0.5 + 1.0 / 32
    if method in ("gptq", "awq"):  # fp16 scale and a packed zero point a group
        bits, group = config["bits"], config["group_size"]
        return bits / 8 + (2 + bits / 8) / group if group > 0 else bits / 8
    if method == "compressed-tensors" and config.get("config_groups"):
        scheme = next(iter(config["config_groups"].values()))["weights"]
        scale = 1.0 if scheme.get("type") == "float" and scheme["num_bits"] == 4 else 2.0
        return scheme["num_bits"] / 8 + (scale / scheme["group_size"] if scheme.get("group_size") else 0.0)
    raise UnknownQuantization(
        f"{g.name}: quantization_config is of kind {method!r}",
        "the cost model knows fp8, mxfp4, gptq, awq and compressed-tensors",
    )


def ignored(g: Geometry, module: str) -> bool:
    """Whether the quantization leaves a module in the model's own type."""
    config = g.quantization_config
    names = [*(config.get("ignore") or ()), *(config.get("modules_to_not_convert") or ())]
    return any(names_module(name, module) for name in names)


def names_module(name: str, module: str) -> bool:
    """Whether an entry of an ignore list means a module, or one that holds it.

    "re:" marks a regular expression. Otherwise whole parts of the dotted name count ("gate" is a router, never a
    gate_proj), and an asterisk stands for any layer (GPT-OSS: "model.layers.*.self_attn").
    """
    if name.startswith("re:"):
        return re.match(name.removeprefix("re:"), module) is not None
    parts = re.escape(name.strip(".")).replace(r"\*", ".*")
    return re.search(rf"(^|\.){parts}(\.|$)", module) is not None


def grouped_int(g: Geometry) -> bool:
    """Whether the routed experts are stored as int4 or int8 in groups, for which vLLM sorts tokens by expert."""
    config = g.quantization_config
    if not config or ignored(g, EXPERT_MODULE):
        return False
    if config.get("quant_method") in ("gptq", "awq"):
        return config.get("group_size", -1) > 0
    schemes = [group["weights"] for group in (config.get("config_groups") or {}).values()]
    return any(s.get("type") == "int" and (s.get("group_size") or 0) > 0 for s in schemes)
