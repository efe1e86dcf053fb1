"""AdamW with warm-up and cosine, and what is done to gradients before a step."""

from __future__ import annotations

import math

import torch

WARMUP_SHARE = 0.05
CLIP_NORM = 1.0
ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
RECORD = {
    "optimizer": {"name": "AdamW", **ADAMW, "clip_norm": CLIP_NORM},
    "schedule": {"warmup_share": WARMUP_SHARE, "decay": "cosine to 0"},
}


def adamw(model: torch.nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """The optimiser over what trains, in one kernel (on a CPU, too, where it was a sixth of a small step)."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(wanted, lr=learning_rate, fused=True, **ADAMW)


def drop_broken(model: torch.nn.Module) -> None:
    """Zeros for a gradient that is not finite (the whole of it, after clipping), without a look at the device."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            local.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def schedule(progress: float) -> float:
    """Factor on the learning rate at a share of the training: linear warm-up, then a cosine to zero."""
    if progress < WARMUP_SHARE:
        return (progress + 1e-3) / (WARMUP_SHARE + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (progress - WARMUP_SHARE) / (1 - WARMUP_SHARE)))
