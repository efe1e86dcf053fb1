"""Every figure that goes into a step model, with its uncertainty and where it is from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from labkit.costmodel.hardware import FIGURES
from labkit.costmodel.ranges import Range
from labkit.costmodel.weights import expert_bytes, kv_bytes_per_token

if TYPE_CHECKING:
    from labkit.costmodel.step import StepModel

COLUMNS = ["name", "low", "mid", "high", "unit", "source"]
# Geometry's names are config.json's own.
CONFIG_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
MOE_KEYS = (
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "moe_intermediate_size",
    "first_k_dense_replace",
)


def inputs_of(model: StepModel) -> pd.DataFrame:
    """A row a figure: config keys, what follows from them, hardware, and what the caller gave."""
    rows = [*config_rows(model), *derived_rows(model), *hardware_rows(model), *given_rows(model)]
    return pd.DataFrame(rows, columns=COLUMNS)


def row(name: str, value: Any, unit: str, source: str) -> dict[str, Any]:
    """One row."""
    low, mid, high = Range.of(value)
    return {"name": name, "low": low, "mid": mid, "high": high, "unit": unit, "source": source}


def config_rows(model: StepModel) -> list[dict[str, Any]]:
    """The configuration's keys that decide bytes and collectives."""
    g = model.geometry
    keys = CONFIG_KEYS + (MLA_KEYS if g.is_mla else ("num_key_value_heads", "head_dim"))
    keys += MOE_KEYS if g.is_moe else ()
    return [row(key, getattr(g, key), "", f"config key {key}: {g.source}") for key in keys]


def derived_rows(model: StepModel) -> list[dict[str, Any]]:
    """What follows from the configuration and the number of ranks."""
    g, ranks = model.geometry, model.tensor_parallel_size
    rows = [row("tensor_parallel_size", ranks, "ranks", "given" if ranks != model.hardware.gpus else "all GPUs")]
    rows.append(
        row("context_tokens", model.context_tokens, "tokens", model.sources.get("context_tokens", "given"))
    )
    kv = kv_bytes_per_token(g, ranks)
    told = "MLA's latent, on every rank" if g.is_mla else "keys and values of a rank's heads"
    rows.append(row("kv_bytes_per_token", kv, "B", f"{told}; bf16"))
    if g.is_moe:
        kind = g.quantization_config.get("quant_method", g.dtype)
        rows.append(row("expert_bytes", expert_bytes(g), "B", f"config keys and quantization_config ({kind})"))
    source = model.measured.get("source", "") if "allreduces" in model.measured else "vLLM's model code: 2 L + 1"
    return [*rows, row("allreduces", model.allreduces, "a step", source)]


def hardware_rows(model: StepModel) -> list[dict[str, Any]]:
    """The hardware's figures that are known, and the measured step that the residual is taken from."""
    hardware, rows = model.hardware, []
    for name, (unit, _what) in FIGURES.items():
        if name == "other_ms" or name not in hardware.sources:
            continue
        rows.append(row(name, getattr(hardware, name), unit, hardware.sources[name]))
    if model.leaves_over:
        measured = model.measured
        rows.append(row("measured_step_ms", measured["step_ms"], "ms", measured.get("source", "measured")))
    return rows


def given_rows(model: StepModel) -> list[dict[str, Any]]:
    """Reuse, drafting and the rest, with the caller's sources."""
    told = model.sources
    rows = []
    if model.geometry.is_moe:
        independent = "independent routing assumed (no reuse known)" if model.reuse == 1.0 else "given"
        rows = [
            row(f"reuse r({n})" if len(model.curve) > 1 else "reuse", r, "", told.get("reuse", independent))
            for n, r in model.curve.items()
        ]
    if model.leaves_over:
        rest = Range.over(model.other(model.values))
        rows.append(row("other_ms", rest, "ms", "RESIDUAL: what the measured step leaves over, a fit"))
    else:
        source = model.hardware.sources.get("other_ms", "none given") if model.other_ms is None else "given"
        rows.append(row("other_ms", model.figures["other_ms"], "ms", told.get("other_ms", source)))
    rows += [row(name, getattr(model, name), "ms", told.get(name, "given")) for name in ("draft_ms", "host_ms")]
    return rows
