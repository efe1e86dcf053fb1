"""How the engine's fused MoE kernel reads experts, which decides what a step of several tokens costs."""

from __future__ import annotations

from typing import NamedTuple

from labkit.costmodel.weights import grouped_int
from labkit.targets import Geometry

UNIQUE, PAIRWISE, DENSE = "unique", "pairwise", "dense"
SPARSITY_FACTOR = 4  # of vLLM's rule: tokens x k x 4 <= N


class Regime(NamedTuple):
    """`loading`: "unique" (an expert once), "pairwise" (once for each token that chose it) or "dense"; and why."""

    loading: str
    why: str


def regime(geometry: Geometry, tokens: int, *, device: str = "cuda", expert_parallel: bool = False) -> Regime:
    """How vLLM reads routed experts in a step of `tokens` tokens.

    Source: `_prepare_expert_assignment` in vLLM 0.24 to 0.32 (Triton experts), measured on an H200 for Kimi-K2.5's
    layer (moe.md section 6). Marlin, which serves grouped INT4, and the CPU's fused MoE always sort tokens by
    expert. Other backends (FlashInfer, DeepGEMM, CUTLASS) have rules of their own: measure t(n), `which_regime`.
    """
    experts, chosen = geometry.n_routed_experts, geometry.num_experts_per_tok
    if not geometry.is_moe:
        return Regime(DENSE, "the model does not route")
    if device == "cpu":
        return Regime(UNIQUE, "the CPU's fused MoE sorts tokens by expert")
    if expert_parallel:
        return Regime(UNIQUE, "expert parallelism needs tokens sorted by expert")
    if grouped_int(geometry):
        return Regime(UNIQUE, "grouped int4 or int8 weights: tokens are sorted by expert at any size")
    pairs = tokens * chosen * SPARSITY_FACTOR
    told = f"{tokens} tokens x {chosen} experts x {SPARSITY_FACTOR} = {pairs}"
    if pairs <= experts:
        return Regime(
            PAIRWISE, f"{told} <= {experts} experts: vLLM skips sorting and reads an expert for each pair"
        )
    return Regime(UNIQUE, f"{told} > {experts} experts: tokens are sorted by expert")


def pairwise_limit(geometry: Geometry) -> int:
    """The most tokens of a step that a kernel under vLLM's rule reads pair by pair; 0 where it never does."""
    if not geometry.is_moe or grouped_int(geometry):
        return 0
    return geometry.n_routed_experts // (geometry.num_experts_per_tok * SPARSITY_FACTOR)
