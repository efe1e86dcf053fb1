"""Tiny mixtures of experts with random weights, one of each router family that the lab records."""

from __future__ import annotations

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.5,  # random routers that differ by token
}
DEEPSEEK = SMALL | {
    "moe_intermediate_size": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 4,
    "topk_group": 2,
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def deepseek() -> DeepseekV3ForCausalLM:
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK))
    return with_bias(model)


def kimi() -> Kimi_K25ForConditionalGeneration:
    text = DEEPSEEK | {"model_type": "deepseek_v3", "n_group": 1, "topk_group": 1}
    config = Kimi_K25Config(text_config=text, vision_config=VISION, projection_hidden_size=16, image_token_id=3)
    return with_bias(Kimi_K25ForConditionalGeneration(config))


def with_bias(model: torch.nn.Module) -> torch.nn.Module:
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.3)
    return model


def qwen3_moe() -> Qwen3MoeForCausalLM:
    extra = {"moe_intermediate_size": 16, "num_experts": 12, "num_experts_per_tok": 4, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **extra, decoder_sparse_step=2))


def mixtral() -> MixtralForCausalLM:
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=6, num_experts_per_tok=2))


def gpt_oss() -> GptOssForCausalLM:
    extra = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
    return GptOssForCausalLM(GptOssConfig(**SMALL, **extra))


FAMILIES = {
    "deepseek_v3": deepseek,
    "kimi_k25": kimi,
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "gpt_oss": gpt_oss,
}
