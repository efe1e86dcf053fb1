"""The acceptance that the engine will see, computed from held-out states without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from labkit import acceptance
from labkit.train.batches import Batch, Sample, pack, plan

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel


def simulate(
    model: Eagle3DraftModel, samples: Sequence[Sample], k: int, *, batch_tokens: int = 1024
) -> acceptance.Acceptance:
    """Greedy acceptance of drafts of `k` tokens over the recorded answers, walked as the engine does.

    One forward pass of k TTT steps tells for every position and depth whether the draft's token is the real one;
    a token outside the draft vocabulary never is. Depth i sees the real tokens before it, which is what the engine
    gives it wherever the tokens before it were accepted.
    """
    accepted: list[int] = []
    for group in plan(samples, batch_tokens, seed=None):
        hits = matches(model, group, k)
        start = 0
        for sample in group:
            own = hits[:, start : start + sample.rows]
            accepted += walk(own, first=sample.prompt_tokens - 1)
            start += sample.rows
    return acceptance.from_steps([k] * len(accepted), accepted, k=k)


@torch.inference_mode()
def matches(model: Eagle3DraftModel, group: Sequence[Sample], k: int) -> np.ndarray:
    """Whether the token that row t drafts at depth i is the real token t + 2 + i: bool [k, rows of the group]."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16):
        return matches_of(model, pack(group), group, k)


def matches_of(model: Eagle3DraftModel, batch: Batch, group: Sequence[Sample], k: int) -> np.ndarray:
    """`matches` of a packed batch, in whatever precision the caller set."""
    device = next(model.parameters()).device
    inputs = {
        name: tensor.to(device) for name, tensor in batch.items() if not name.startswith(("verifier", "loss"))
    }
    drafted = model(**inputs, ttt_steps=k)  # k times [1, rows], draft ids
    offsets = model.d2t if model.d2t is not None else torch.zeros(model.draft_vocab_size, dtype=torch.long)
    guesses = torch.stack([ids[0] + offsets[ids[0]] for ids in drafted]).cpu()
    real = torch.cat([depths(sample, k) for sample in group], dim=1)
    return (guesses == real).numpy()


def depths(sample: Sample, k: int) -> torch.Tensor:
    """The real token that row t has to draft at depth i, -1 beyond the end: int64 [k, T-1]."""
    ids = torch.from_numpy(sample.input_ids)
    padded = torch.cat([ids, ids.new_full((k + 1,), -1)])
    return torch.stack([padded[2 + i : 2 + i + sample.rows] for i in range(k)])


def walk(hits: np.ndarray, first: int) -> list[int]:
    """Accepted tokens of each draft: from row `first`, on by the accepted tokens and the bonus, to the end.

    `hits` [k, rows]; a draft is made as long as a token is left to generate after the one it starts from.
    """
    runs = np.cumprod(hits, axis=0).sum(axis=0)  # [rows]: matches before the first miss
    accepted, row = [], first
    while row < hits.shape[1] - 1:
        accepted.append(int(runs[row]))
        row += accepted[-1] + 1
    return accepted
