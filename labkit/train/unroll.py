"""The head unrolled over its own drafts (training-time test), and its losses, with no work that nothing needs.

The same numbers as speculators' Eagle3DraftModel.forward (tests compare them). What differs is cost: rows of
bounded length instead of one row with a mask that grows with the square of the batch, logits only where a loss
counts, the target's logits once for all TTT steps, and no wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from labkit.errors import LabError
from labkit.train.batches import Batch

if TYPE_CHECKING:
    from speculators.losses import LossConfig
    from speculators.models.eagle3 import Eagle3DraftModel

GOOD, BAD_STATES, BAD_LOSS = 0, 1, 2  # what became of a document


class BadLoss(LabError):
    """A loss that speculators does not have."""


def loss_config(name: str, device_type: str = "cpu") -> LossConfig:
    """speculators' loss of this name, or its weighted sum as JSON; fused (Triton) kernels on a GPU.

    Raises BadLoss with the names that there are, or for weights below 0, not finite, or all 0.
    """
    from speculators.losses import resolve_loss_config

    known = 'kl_div, rkl, jsd, ce, tv, nla, lk_hybrid, or {"ce": 0.1, "tv": 0.9}'
    try:
        found = resolve_loss_config(name, "fused" if device_type == "cuda" else "eager")
    except ValueError as error:
        raise BadLoss(f"loss={name!r} is unknown", f"use {known}") from error
    weights = [weight for _, weight in found.values()]
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise BadLoss(f"loss={name!r} has weights that teach nothing or the wrong way", f"use {known}")
    return found


class Unrolled(torch.nn.Module):
    """A head with its losses: one forward pass is all TTT steps, so DDP and FSDP can wrap it."""

    def __init__(self, head: Eagle3DraftModel, loss: str = "kl_div", *, compiled: bool = False) -> None:
        """`loss` as `loss_config` takes it; `compiled` lets torch.compile have each step of the head."""
        super().__init__()
        self.head = head
        self.loss = loss
        loss_config(loss)  # an unknown one fails here
        self.one_step = torch.compile(one_step, dynamic=True) if compiled else one_step

    def forward(self, batch: Batch, ttt_steps: int, *, drafts: bool = False) -> dict[str, torch.Tensor]:
        """`sums` [ttt_steps]: losses summed over the rows that count, nats.

        `documents` [of the batch]: GOOD, or BAD_STATES or BAD_LOSS where a number is not finite; those with bad
        states add nothing. With `drafts` also `drafts` [ttt_steps, B, L]: the target ids that each row drafts.
        """
        head = self.head
        states, found = finite(batch)
        if not torch.is_autocast_enabled(states.device.type):
            states = states.to(head.fc.weight.dtype)
        trained, owners = batch["trained"], batch["document_ids"].flatten()
        with torch.no_grad():
            last = states[:, :, -1].flatten(0, 1)[trained + 1]
            targets = head.verifier_lm_head(head.verifier_norm(last))  # [N, draft vocabulary]
        sums, guesses = [], []
        outputs = unroll(head, states[:, :, :-1].flatten(2), batch, ttt_steps, self.one_step)
        for step, normed in enumerate(outputs):
            reach = batch["reach"][step]
            if not len(reach):  # a part without a row so deep: nothing to learn, and kernels refuse nothing
                sums.append(normed.sum() * 0.0)
                guesses += [to_target(head, head.lm_head(normed).argmax(-1))] if drafts else []
                continue
            owner = owners[trained[reach]]
            rows = normed.flatten(0, 1).index_select(0, trained[reach] - step)
            losses = self.losses(head.lm_head(rows), targets if len(reach) == len(trained) else targets[reach])
            with torch.no_grad():
                late = torch.where(torch.isfinite(losses), 0, BAD_LOSS)
                found = found.scatter_reduce(0, owner, late.to(found.dtype), "amax")
            sums.append(torch.where(found[owner] == BAD_STATES, 0.0, losses).sum())
            if drafts:
                guesses.append(to_target(head, head.lm_head(normed).argmax(-1)))
        answer = {"sums": torch.stack(sums), "documents": found}
        return answer | ({"drafts": torch.stack(guesses)} if drafts else {})

    def losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of each row [N] from logits of draft and target [N, draft vocabulary]."""
        terms = loss_config(self.loss, logits.device.type).values()
        return sum(weight * function(logits[None], targets[None])[0] for function, weight in terms)


def finite(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The states with zeros for what is not finite, and a mark for each document that had such."""
    states, documents = batch["states"], batch["document_ids"]
    bad = ~torch.isfinite(states.flatten(2)).all(-1)  # [B, L]
    marks = torch.where(bad & (documents >= 0), BAD_STATES, GOOD).flatten().to(torch.int32)
    found = torch.zeros(len(batch["places"]), dtype=torch.int32, device=states.device)
    found = found.scatter_reduce(0, documents.flatten().clamp(min=0), marks, "amax")
    return torch.where(bad[..., None, None], 0.0, states).to(states.dtype), found


def unroll(
    head: Eagle3DraftModel, aux: torch.Tensor, batch: Batch, ttt_steps: int, step: Any = None
) -> Iterator[torch.Tensor]:
    """The normed output of every TTT step [B, L, H] over aux states [B, L, layers * H].

    Step i sees at row t the true token t + 1 + i and the output of step i - 1 at row t; it attends to the first
    step's rows up to t and to row t of the steps between.
    """
    from transformers import DynamicCache

    state = head.fc(normed_aux(head, aux))
    masks = attention_masks(head, batch["document_ids"], ttt_steps)
    cache, length = DynamicCache(), aux.shape[1]
    for number in range(ttt_steps):
        with torch.no_grad():
            embedded = head.embed_tokens(batch["token_ids"].roll(-1 - number, dims=1))
        seen = [mask[..., : (number + 1) * length] for mask in masks]
        state, normed = (step or one_step)(head, embedded, state, batch["position_ids"] + 1 + number, seen, cache)
        yield normed


def one_step(
    head: Eagle3DraftModel,
    embedded: torch.Tensor,
    state: torch.Tensor,
    positions: torch.Tensor,
    masks: list[torch.Tensor],
    cache: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All layers once: the state that the next step reads, and the normed output."""
    hidden = torch.cat([embedded, state], dim=-1)
    rotary = head.rotary_emb(hidden, positions)
    for layer, mask in zip(head.layers, masks, strict=True):
        hidden = layer(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            position_embeddings=rotary,
        )
    normed = head.norm(hidden)
    return (normed if head.config.norm_output else hidden), normed


def normed_aux(head: Eagle3DraftModel, aux: torch.Tensor) -> torch.Tensor:
    """The aux states as fc reads them: with the norms before it that the head has."""
    if head.input_norm is not None:
        aux = head.input_norm(aux)
    if head.fc_norm is not None:
        parts = aux.chunk(len(head.fc_norm), dim=-1)
        aux = torch.cat([norm(part) for norm, part in zip(head.fc_norm, parts, strict=True)], dim=-1)
    return aux


def attention_masks(head: Eagle3DraftModel, documents: torch.Tensor, ttt_steps: int) -> list[torch.Tensor]:
    """What each layer may attend to, for all steps: bool [B, 1, L, ttt_steps * L], one tensor a kind of layer."""
    length = documents.shape[1]
    place = torch.arange(length, device=documents.device)
    same = (documents[:, :, None] == documents[:, None, :]) & (place[:, None] >= place)
    own = torch.eye(length, dtype=torch.bool, device=documents.device).repeat(1, ttt_steps - 1)

    def mask(first: torch.Tensor) -> torch.Tensor:
        return torch.cat([first, own.expand(len(documents), -1, -1)], dim=-1)[:, None]

    whole = mask(same)
    if not head.sliding_window_indices:
        return [whole] * len(head.layers)
    near = mask(same & (place > place[:, None] - head.sliding_window))
    return [near if index in head.sliding_window_indices else whole for index in range(len(head.layers))]


def to_target(head: Eagle3DraftModel, draft_ids: torch.Tensor) -> torch.Tensor:
    """Draft ids as the target's."""
    return draft_ids if head.d2t is None else draft_ids + head.d2t[draft_ids]
