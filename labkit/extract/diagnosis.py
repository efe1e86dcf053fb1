"""Why states do not give the next token: known causes are tried on a few rows, the one that fits is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from labkit.extract import heads
from labkit.extract.heads import FinalHead

ROWS, TOKENS = 6, 256  # how much each alternative is tried on
UNIT = 0.02  # relative: a normed state's mean square is the gain's, up to rounding


@dataclass(frozen=True)
class Row:
    """One conversation's states [T, layers, H], its tokens [T] and which of them the target said: bool [T]."""

    states: torch.Tensor
    ids: torch.Tensor
    said: torch.Tensor

    def agreement(self, head: FinalHead, place: int = -1, late: int = 0) -> torch.Tensor:
        """Whether each answer token is the top one of the state before it, or `late` positions after that."""
        tokens = self.said.nonzero().flatten()
        before = tokens - 1 + late
        seen = (tokens > 0) & (before >= 0) & (before < len(self.ids))
        return head.top1(self.states[before[seen], place]) == self.ids[tokens[seen]]

    def short(self) -> Row:
        """Its first tokens that the target said, and what stands before them."""
        end = int((self.said.cumsum(0) <= TOKENS).sum())
        return Row(self.states[:end], self.ids[:end], self.said[:end])


@dataclass(frozen=True)
class Cause:
    """A cause, what it explains (agreement if it is undone) and what to do."""

    name: str
    agreement: float
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} (undone, {self.agreement:.1%} agree): {self.remedy}"


def normed(head: FinalHead, states: torch.Tensor) -> bool:
    """Whether last states [T, H] come with the final norm applied: each one's scale is then the gain's."""
    gain = head.gain + head.shift
    used = gain.abs() > 0.01 * gain.abs().max()
    scale = (states.float()[:, used] / gain[used]).pow(2).mean(-1).sqrt()
    return bool(((scale - 1).abs() < UNIT).all())


NORMED = Cause(
    "the states have the final norm applied already",
    float("nan"),
    "capture the last layer's output before the norm (vLLM's id for it is the number of layers; Transformers' "
    "output_hidden_states gives it after the norm): training applies the norm itself",
)


def cause(rows: Sequence[Row], head: FinalHead, path: Path, layers: Sequence[int], limit: float) -> str:
    """The likely cause, in words: the alternative under which the states agree best, where one of them does."""
    few = [row.short() for row in rows[:ROWS]]
    as_is = mean(few, lambda row: row.agreement(head))
    found = sorted(alternatives(few, head, path, layers), key=lambda one: -one.agreement)
    if found and found[0].agreement >= min(limit, max(0.5, as_is + 0.2)):
        return str(found[0])
    if as_is > 0.1:
        return (
            f"none of the usual mistakes fits; {as_is:.0%} agree, as with a layer too early, answers that were "
            f"sampled or another revision's: check that the last layer id is the number of layers ({layers[-1]})"
        )
    return "none of the usual mistakes fits: the states are another model's, or of other tokens"


def mean(rows: Sequence[Row], agreement: Callable[[Row], torch.Tensor]) -> float:
    """The share of positions that agree, over all rows."""
    hits = torch.cat([agreement(row) for row in rows])
    return float(hits.float().mean()) if len(hits) else 0.0


def alternatives(rows: Sequence[Row], head: FinalHead, path: Path, layers: Sequence[int]) -> list[Cause]:
    """Each mistake that can be undone, with the agreement that undoing it gives."""
    found = []
    already = FinalHead(head.norm_name, head.gain, head.weight, head.eps, head.shift, normed=True)
    found.append(Cause(NORMED.name, mean(rows, lambda row: row.agreement(already)), NORMED.remedy))
    form = ("1 + w, as Gemma's", "w, as Llama's")[int(head.shift)]
    found.append(
        Cause(
            f"the final norm's gain is {form}",
            mean(rows, lambda row: row.agreement(head.other_form())),
            "the lab goes by model_type: report it; a head must be trained with this norm (speculators#1090)",
        )
    )
    for late, word in ((1, "late"), (-1, "early")):
        found.append(
            Cause(
                f"the states are shifted: each stands one token too {word}",
                mean(rows, lambda row, late=late: row.agreement(head, late=late)),
                "give the server the token ids as they are (no BOS added, none cut off) and compare token_ids",
            )
        )
    for place, layer in enumerate(layers[:-1]):
        found.append(
            Cause(
                f"the last layer's output stands in place {place}, which should hold layer {layer}",
                mean(rows, lambda row, place=place: row.agreement(head, place=place)),
                f"layers have to be in the order {list(layers)}: vLLM sorts ids, other extractors do not",
            )
        )
    for other in heads.other_norms(path, head):
        found.append(
            Cause(
                f"wrong norm tensor: {other.norm_name} fits, {head.norm_name} was read",
                mean(rows, lambda row, other=other: row.agreement(other)),
                "the wrapper keeps its text model elsewhere: tell the trainer this name (speculators#1038)",
            )
        )
    return found


def by_layer(ours: torch.Tensor, theirs: torch.Tensor) -> np.ndarray:
    """Median relative distance of states [T, H] to each of a reference's layers [T, n + 1, H]: [n + 1]."""
    wanted = theirs.float()
    apart = (ours.float()[:, None] - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-9)
    return apart.median(dim=0).values.numpy()
