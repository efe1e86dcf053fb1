"""How a router turns logits into a choice and weights: the rule that budgets have to follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.errors import LabError

if TYPE_CHECKING:
    import torch

SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN = "sigmoid", "softmax", "softmax of the chosen"


class UnknownGate(LabError):
    """A router's weights do not follow from its logits by any rule that the lab knows."""


@dataclass(frozen=True)
class Scores:
    """Router scores of tokens over all experts, both [t, N].

    mass: what a budget sums, at least 0, a token's N together are 1. selection: what the model ranks experts by;
    minus infinity where the model may not choose.
    """

    mass: Any
    selection: Any


ScoreListener = Callable[[int, Scores, "torch.Tensor"], None]  # layer, scores, chosen experts [t, k]


@dataclass(frozen=True)
class Gate:
    """A router's rule. kind: "sigmoid" (DeepSeek-V3, Kimi), "softmax" (Qwen3-MoE, Mixtral) or "softmax of the
    chosen" (GPT-OSS). The rest is as in the model's configuration.
    """

    kind: str
    bias: Any = None
    n_group: int = 1
    topk_group: int = 1
    normalised: bool = True
    scale: float = 1.0

    @classmethod
    def of(cls, router: torch.nn.Module) -> Gate:
        """The rule of one of Transformers' routers."""
        if hasattr(router, "e_score_correction_bias"):
            return cls(
                SIGMOID,
                router.e_score_correction_bias,
                router.num_group,
                router.topk_group,
                router.norm_topk_prob,
                router.routed_scaling_factor,
            )
        if getattr(router, "bias", None) is not None:  # of the five families only GPT-OSS has it
            return cls(SOFTMAX_OF_CHOSEN)
        return cls(SOFTMAX, normalised=getattr(router, "norm_topk_prob", True))

    def scores(self, logits: torch.Tensor) -> Scores:
        """Mass and selection scores from the router's logits [t, N].

        Softmax routers: both are the probabilities. Sigmoid routers, which MoE-Spec does not treat: the mass is
        the *unbiased* sigmoid over its sum, for it is what weighs an expert's output, and the selection score is
        the model's own, with the correction bias and the group limit.
        """
        if self.kind != SIGMOID:
            mass = logits.float().softmax(dim=-1)
            return Scores(mass, mass)
        scores = logits.float().sigmoid()
        return Scores(scores / scores.sum(dim=-1, keepdim=True), self.limited(scores + self.bias))

    def limited(self, selection: torch.Tensor) -> torch.Tensor:
        """Selection scores with minus infinity outside the topk_group groups of the best two experts' sum."""
        if self.n_group == self.topk_group:
            return selection
        groups = selection.unflatten(-1, (self.n_group, -1))  # [t, groups, N / groups]
        best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(self.topk_group, dim=-1).indices
        allowed = best.new_zeros(groups.shape[:2], dtype=bool).scatter(-1, best, True)
        return groups.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)

    def weights(self, logits: torch.Tensor, chosen: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """The weights [t, k] that the model gives to these experts; those not kept get 0 and count for nothing."""
        if self.kind == SOFTMAX_OF_CHOSEN:
            among = logits.float().gather(1, chosen).masked_fill(~kept, float("-inf"))
            return among.softmax(dim=-1).nan_to_num(0.0)  # a token that keeps none has only infinities
        scores = logits.float().sigmoid() if self.kind == SIGMOID else logits.float().softmax(dim=-1)
        weights = scores.gather(1, chosen) * kept
        if self.normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.scale

    def check(self, output: tuple[torch.Tensor, ...]) -> None:
        """Raise UnknownGate unless the rule gives the router's own weights from its logits and choice."""
        import torch

        logits, weights, chosen = output
        own = self.weights(logits, chosen, torch.ones_like(chosen, dtype=bool))
        if own.shape != weights.shape or not torch.allclose(own.float(), weights.float(), rtol=2e-2, atol=1e-4):
            raise UnknownGate(
                f"a {self.kind} rule gives a token {own[0].tolist()}, its router {weights[0].tolist()}",
                "budgets know the routers of deepseek_v3, kimi_k25, qwen3_moe, mixtral and gpt_oss",
            )
