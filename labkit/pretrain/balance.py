"""Load balancing by a bias on the choice of experts, as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2)."""

from __future__ import annotations

from typing import Any

import torch


class Balance:
    """Counts what the routers choose and, after each step, moves their biases towards an even load.

    An expert that served fewer tokens than the mean gets a little more bias, one that served more gets less.
    The bias takes part in the choice alone, not in the weights, so there is no auxiliary loss.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Listen to every router of `model` (a module that has e_score_correction_bias)."""
        self.routers = [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]
        bias = self.routers[0].e_score_correction_bias
        self.load = bias.new_zeros(len(self.routers), len(bias))  # [L, N] tokens since the last step
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
    def step(self, speed: float) -> torch.Tensor:
        """Move each bias by `speed` (0 at the end of training), forget the counts; returns max/mean load, [L].

        DeepSeek-V3 moves by 0.001 at a learning rate of 2.2e-4; routers that learn faster need more.
        """
        mean = self.load.mean(1, keepdim=True)
        for router, move in zip(self.routers, torch.sign(mean - self.load) * speed, strict=True):
            router.e_score_correction_bias.add_(move)
        uneven = self.load.amax(1) / mean.squeeze(1).clamp(min=1e-9)
        self.load.zero_()
        return uneven

    def close(self) -> None:
        """Stop listening."""
        for hook in self.hooks:
            hook.remove()
