"""The acceptance that the engine will see, computed from held-out states without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from labkit import acceptance
from labkit.train.batches import Batch, Sample, pack, to_device
from labkit.train.order import plan
from labkit.train.unroll import BAD_STATES, Unrolled

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

Forward = Callable[..., dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Evaluated:
    """Held-out loss (nats, summed over TTT steps, a mean over tokens) and simulated acceptance."""

    loss: float
    acceptance: acceptance.Acceptance


def simulate(
    model: Eagle3DraftModel,
    samples: Sequence[Sample],
    k: int,
    *,
    batch_tokens: int = 1024,
    source: Callable[[Batch], torch.Tensor] | None = None,
) -> acceptance.Acceptance:
    """Greedy acceptance of drafts of `k` tokens over the recorded answers, walked as the engine does.

    One forward pass of k TTT steps tells for every position and depth whether the draft's token is the real one;
    a token outside the draft vocabulary never is. Depth i sees the real tokens before it, which is what the engine
    gives it wherever the tokens before it were accepted. Each answer of a conversation has a walk of its own.
    `source` (OnTheFly) computes the states; without it they are the samples' files'.
    """
    device = next(model.parameters()).device
    groups = plan(samples, batch_tokens, seed=None)
    if source:
        made = (to_device(pack(group, k, None), device) for group in groups)
        batches = ((group, batch | {"states": source(batch)}) for group, batch in zip(groups, made, strict=True))
    else:
        batches = ((group, pack(group, k)) for group in groups)
    unrolled = Unrolled(model)
    with torch.autocast(device.type, torch.bfloat16):
        return evaluate(unrolled, batches, k, device).acceptance


@torch.no_grad()
def evaluate(
    model: Forward, batches: Iterable[tuple[Sequence[Sample], Batch]], k: int, device: torch.device, **how: float
) -> Evaluated:
    """Loss and acceptance of `model` (Unrolled, perhaps wrapped) over packed conversations.

    `how` may name `ttt_decay`, the weight of each TTT step over the one before. Conversations whose states are
    not finite are left out.
    """
    sums, counts, accepted = np.zeros(k), np.zeros(k), list[int]()
    for group, batch in batches:
        answer = model(to_device(batch, device), k, drafts=True)
        sums += answer["sums"].double().cpu().numpy()
        fine = (answer["documents"] != BAD_STATES).tolist()
        drafts = answer["drafts"].cpu().numpy()
        for sample, (row, start), good in zip(group, batch["places"], fine, strict=True):
            if good:
                counts += sample.trained(k)
                accepted += steps(sample, drafts[:, row, start : start + sample.tokens - 1])
    weights = how.get("ttt_decay", 1.0) ** np.arange(k)
    loss = float((weights * sums / np.maximum(counts, 1)).sum())
    return Evaluated(loss, acceptance.from_steps([k] * len(accepted), accepted, k=k))


def steps(sample: Sample, drafts: np.ndarray) -> list[int]:
    """Accepted tokens of each draft over all answers of a conversation; `drafts` [k, T-1] target ids.

    Nothing is drafted past the end of an answer: what follows there is the template's, and no engine generates it.
    """
    accepted: list[int] = []
    for first, end in sample.spans:
        hits = drafts[:, first - 1 : end - 1] == depths(sample.input_ids[first:end], len(drafts))
        accepted += walk(hits, 0)
    return accepted


def depths(answer: np.ndarray, k: int) -> np.ndarray:
    """The real token that each row of an answer has to draft at depth i, -1 beyond its end: [k, tokens].

    Row 0 reads the answer's first token, so that its draft begins with the second.
    """
    padded = np.concatenate([answer, np.full(k + 1, -1)])
    return np.stack([padded[1 + i : 1 + i + len(answer)] for i in range(k)])


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
