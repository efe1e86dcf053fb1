"""A fresh EAGLE-3 head over a target, its export as a directory that vLLM serves, and back.

The head is speculators' Eagle3DraftModel: fc over three target states, one decoder layer over [embedding, state],
norm and lm_head. Embedding and lm_head rows are the target's and stay frozen.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from labkit import files
from labkit.errors import LabError
from labkit.targets import Target
from labkit.vocab import VocabMap

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import PretrainedConfig

# All written out in config.json: vLLM's loader and speculators' class read an absent one differently.
# EAGLE-3 as published, but for norm_output (EAGLE 3.1): chosen by trials on a few hundred conversations (LOG.md).
FLAGS = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": True}
NOT_SHIPPED = ("embed_tokens.", "verifier_norm.", "verifier_lm_head.")  # vLLM shares the target's embedding


class BadHead(LabError):
    """A directory is no head that the lab or vLLM can read."""


class UnknownArchitecture(LabError):
    """speculators has no draft layer for this configuration."""


def layer_config(target: Target, num_layers: int = 1) -> PretrainedConfig:
    """The decoder layer's configuration: the target's own sizes as a Llama or Qwen3 with full attention."""
    from speculators.models.utils import get_verifier_config, resolve_draft_intermediate_size
    from transformers import LlamaConfig, Qwen3Config

    source = get_verifier_config(str(target.path))
    kind = Qwen3Config if source.model_type.startswith("qwen3") else LlamaConfig
    geometry = target.geometry
    names = ["hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps"]
    names += ["hidden_act", "rope_parameters", "pad_token_id", "bos_token_id", "eos_token_id", "attention_bias"]
    values = {
        name: copy.deepcopy(getattr(source, name)) for name in names if getattr(source, name, None) is not None
    }
    config = kind(
        **values,
        num_hidden_layers=num_layers,
        num_key_value_heads=geometry.num_key_value_heads,
        head_dim=geometry.hidden_size // geometry.num_attention_heads if geometry.is_mla else geometry.head_dim,
        intermediate_size=resolve_draft_intermediate_size(source),
        tie_word_embeddings=False,
    )
    config._attn_implementation = "sdpa"  # FlexAttention has no backward pass on the CPU
    return config


def build(
    target: Target, vocab: VocabMap, layers: Sequence[int], *, ttt_steps: int = 3, seed: int = 0, **flags: bool
) -> Eagle3DraftModel:
    """A fresh head over `layers` of the target (vLLM's ids, without the last output), fp32.

    Raises UnknownArchitecture where the target's shape has no draft layer.
    """
    from loguru import logger
    from speculators.models.eagle3 import Eagle3DraftModel

    logger.disable("speculators")
    torch.manual_seed(seed)
    try:
        model = Eagle3DraftModel.from_training_args(
            layer_config(target),
            t2d=vocab.t2d,
            d2t=vocab.d2t,
            draft_vocab_size=vocab.draft_vocab_size,
            verifier_name_or_path=str(target.path),
            target_layer_ids=list(layers),
            ttt_steps=ttt_steps,
            draft_attn_impl="sdpa",
            **(FLAGS | flags),
        )
    except (KeyError, ValueError) as error:
        raise UnknownArchitecture(
            f"speculators makes no EAGLE-3 head for {target.name}: {error}",
            "use a target with a Llama-like shape",
        ) from error
    return model.float()


def shipped_tensors(model: Eagle3DraftModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the head's file holds: everything but the target's own, floating point numbers in `dtype`."""
    return {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous().cpu()
        for name, tensor in model.state_dict().items()
        if not name.startswith(NOT_SHIPPED)
    }


def export(
    model: Eagle3DraftModel,
    head_dir: Path,
    *,
    verifier_name: str,
    dtype: torch.dtype = torch.bfloat16,
    record: dict[str, Any] | None = None,
) -> Path:
    """Write the head as a speculators-format directory, whole or not at all; `record` goes to training.json.

    `verifier_name` is what config.json calls the target: a name or hub id, since a path means nothing elsewhere.
    """
    config = model.config.to_dict()
    config["speculators_config"]["verifier"]["name_or_path"] = verifier_name
    config["transformer_layer_config"] = written_out(model.config.transformer_layer_config)
    config |= {"dtype": str(dtype).removeprefix("torch."), "tie_word_embeddings": False}
    with files.atomic(head_dir) as folder:
        folder.mkdir()
        save_file(shipped_tensors(model, dtype), folder / "model.safetensors", metadata={"format": "pt"})
        files.write_json(folder / "config.json", {key: config[key] for key in config if not key.startswith("_")})
        files.write_json(folder / "training.json", record or {})
    return head_dir


def written_out(config: PretrainedConfig) -> dict[str, Any]:
    """The layer's configuration without defaults left out, and with the RoPE base under its old name, too."""
    values = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    rope = values.get("rope_parameters") or {}
    if "rope_theta" in rope:
        values["rope_theta"] = rope["rope_theta"]  # engines from before Transformers 5 read only this
    return values


def load(head_dir: Path, target: Target) -> Eagle3DraftModel:
    """A head directory as a model in fp32, embedding and verifier weights taken from `target`.

    Raises BadHead naming what is missing.
    """
    from loguru import logger
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    logger.disable("speculators")
    try:
        config = Eagle3SpeculatorConfig.from_dict(files.read_json(head_dir / "config.json"))
        tensors = load_file(head_dir / "model.safetensors")
    except (OSError, SafetensorError, ValueError) as error:
        raise BadHead(
            f"{head_dir} is no EAGLE-3 head: {error}", "give a speculators-format head directory"
        ) from error
    config.speculators_config.verifier.name_or_path = str(target.path)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = Eagle3DraftModel(config)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    missing = [name for name in missing if not name.startswith(NOT_SHIPPED)]
    if missing or unexpected:
        raise BadHead(
            f"{head_dir} lacks {missing} and has unknown {list(unexpected)}", "run draft.preflight on it"
        )
    model.load_verifier_weights()
    return model.float()
