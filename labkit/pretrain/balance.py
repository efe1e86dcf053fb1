"""Load balancing by a bias on the choice of experts, as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Balance:
    """Counts what the routers choose and, after each step, moves their biases towards an even load.

    An expert that served fewer tokens than the mean gets `speed` more bias, one that served more gets less.
    The bias takes part in the choice alone, not in the weights, so there is no auxiliary loss.
    """

    def __init__(self, model: PreTrainedModel, speed: float = 0.001) -> None:
        """Listen to every router of `model` (a module that has e_score_correction_bias)."""
        self.routers = [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]
        self.speed = speed
        experts, device = len(self.routers[0].e_score_correction_bias), next(model.parameters()).device
        self.load = torch.zeros(len(self.routers), experts, device=device)  # [L, N] since the last step
        self.hooks = [
            router.register_forward_hook(self.counter(number)) for number, router in enumerate(self.routers)
        ]

    def counter(self, number: int) -> Any:
        """A hook that adds a router's choices to its row; a padded place counts like any other."""

        def count(router: torch.nn.Module, _inputs: Any, output: Any) -> None:
            if router.training:
                chosen = output[2].flatten()
                self.load[number].scatter_add_(0, chosen, torch.ones_like(chosen, dtype=self.load.dtype))

        return count

    @torch.no_grad()
    def step(self, *, frozen: bool = False) -> torch.Tensor:
        """Move the biases (unless frozen) and forget the counts; returns max/mean load a layer, [L]."""
        mean = self.load.mean(1, keepdim=True)
        if not frozen:
            for router, move in zip(self.routers, torch.sign(mean - self.load) * self.speed, strict=True):
                router.e_score_correction_bias.add_(move)
        uneven = self.load.amax(1) / mean.squeeze(1).clamp(min=1)
        self.load.zero_()
        return uneven

    def close(self) -> None:
        """Stop listening."""
        for hook in self.hooks:
            hook.remove()
