"""The draft's vocabulary: the most frequent target tokens, and the maps between the two numberings.

`d2t` holds offsets, as vLLM, speculators and EAGLE read it: target id = draft id + d2t[draft id].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from labkit import files
from labkit.errors import LabError

FILE = "vocab.safetensors"


class BadVocabulary(LabError):
    """A draft vocabulary that cannot be, or a mapping that contradicts itself."""


@dataclass(frozen=True, eq=False)
class VocabMap:
    """d2t int64 [draft vocabulary] offsets, target ids ascending; t2d bool [target vocabulary]."""

    d2t: torch.Tensor
    t2d: torch.Tensor

    @property
    def target_ids(self) -> torch.Tensor:
        """The target id of each draft id: int64 [draft vocabulary]."""
        return self.d2t + torch.arange(len(self.d2t))

    @property
    def draft_vocab_size(self) -> int:
        """Number of tokens that the draft can propose."""
        return len(self.d2t)

    @property
    def target_vocab_size(self) -> int:
        """Number of tokens of the target."""
        return len(self.t2d)

    def coverage(self, token_counts: np.ndarray) -> float:
        """Share of the counted tokens that the draft can propose; every other one ends a draft."""
        total = int(np.sum(token_counts))
        return float(np.asarray(token_counts)[self.t2d.numpy()].sum() / total) if total else float("nan")

    def save(self, folder: Path) -> Path:
        """Write folder/vocab.safetensors."""
        path = folder / FILE
        with files.atomic(path) as temporary:
            save_file({"d2t": self.d2t, "t2d": self.t2d}, temporary)
        return path


def load(folder: Path) -> VocabMap:
    """The map that `save` wrote; raises BrokenFile."""
    path = folder / FILE
    try:
        tensors = load_file(path)
        return VocabMap(tensors["d2t"], tensors["t2d"])
    except (OSError, SafetensorError, KeyError) as error:
        raise files.BrokenFile(f"{path} is no vocabulary map ({error})", f"delete {path} and run again") from error


def build(token_counts: np.ndarray, draft_vocab_size: int, required_ids: Iterable[int] = ()) -> VocabMap:
    """The `required_ids` and the most frequent other tokens, `draft_vocab_size` in all.

    `token_counts` [target vocabulary]. Ties go to the lower id; where fewer distinct tokens were seen than wanted,
    unseen ones fill up, lowest id first. Raises BadVocabulary with the value seen.
    """
    counts = np.asarray(token_counts)
    required = sorted({int(token) for token in required_ids})
    refuse_impossible(counts, draft_vocab_size, required)
    rank = np.lexsort((np.arange(len(counts)), -counts))
    rest = rank[~np.isin(rank, required)][: draft_vocab_size - len(required)]
    chosen = torch.from_numpy(np.sort(np.concatenate([np.array(required, dtype=np.int64), rest]))).long()
    t2d = torch.zeros(len(counts), dtype=torch.bool)
    t2d[chosen] = True
    return VocabMap(chosen - torch.arange(draft_vocab_size), t2d)


def refuse_impossible(counts: np.ndarray, draft_vocab_size: int, required: list[int]) -> None:
    """Raise BadVocabulary for sizes and ids that do not go together."""
    if counts.ndim != 1 or not len(counts) or (counts < 0).any() or not np.isfinite(counts).all():
        raise BadVocabulary(
            f"token counts of shape {counts.shape} are no counts", "give one count >= 0 for each target token"
        )
    if not 0 < draft_vocab_size <= len(counts):
        raise BadVocabulary(
            f"draft_vocab_size={draft_vocab_size} does not lie in 1..{len(counts)}, the target's vocabulary",
            "lower draft_vocab_size",
        )
    outside = [token for token in required if not 0 <= token < len(counts)]
    if outside:
        raise BadVocabulary(f"required ids {outside[:5]} lie outside 0..{len(counts) - 1}", "drop them")
    if len(required) > draft_vocab_size:
        raise BadVocabulary(
            f"{len(required)} required ids do not fit into draft_vocab_size={draft_vocab_size}",
            "raise draft_vocab_size",
        )


def problems(d2t: torch.Tensor, target_vocab_size: int) -> list[str]:
    """What is wrong with a d2t: out of range, not ascending (which holds absolute ids taken for offsets, too)."""
    ids = d2t.long() + torch.arange(len(d2t))
    found = []
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= target_vocab_size):
        found.append(
            f"d2t leads to target ids {int(ids.min())}..{int(ids.max())}, outside 0..{target_vocab_size - 1}: "
            "it has to hold offsets (target id minus draft id)"
        )
    if (ids.diff() <= 0).any():
        found.append("d2t's target ids do not ascend, so that lm_head rows and tokens do not go together")
    return found
