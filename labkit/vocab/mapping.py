"""The pair of maps, and their file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from labkit import files
from labkit.errors import LabError

FILE = "vocab.safetensors"


class BadVocabulary(LabError):
    """A draft vocabulary that cannot be, or a mapping that contradicts itself."""


class StaleVocabulary(LabError):
    """A mapping that was made from other data, another size or another target than asked for."""


@dataclass(frozen=True, eq=False)
class VocabMap:
    """d2t int64 [draft vocabulary] offsets, target ids ascending; t2d bool [target vocabulary].

    `fingerprint` tells from which counts, size and required ids it was made ("" where nobody knows); `filled` is
    how many of its tokens were neither seen nor required.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor
    fingerprint: str = ""
    filled: int = 0

    @classmethod
    def of_targets(
        cls, target_ids: torch.Tensor, target_vocab_size: int, *, fingerprint: str = "", filled: int = 0
    ) -> VocabMap:
        """The map that proposes `target_ids` (any order, no duplicates)."""
        chosen = target_ids.long().sort().values
        t2d = torch.zeros(target_vocab_size, dtype=torch.bool)
        t2d[chosen] = True
        return cls(chosen - torch.arange(len(chosen)), t2d, fingerprint, filled)

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
        """Number of rows of the target's embedding."""
        return len(self.t2d)

    @property
    def digest(self) -> str:
        """Sixteen hex digits of the map itself; training.json and checkpoints carry it."""
        return files.digest(self.d2t.tolist())

    def coverage(self, token_counts: np.ndarray) -> float:
        """Share of the counted tokens that the draft can propose; every other one ends a draft."""
        total = int(np.sum(token_counts))
        return float(np.asarray(token_counts)[self.t2d.numpy()].sum() / total) if total else float("nan")

    def save(self, folder: Path) -> Path:
        """Write folder/vocab.safetensors; the fingerprint goes into its header."""
        path = folder / FILE
        header = {"fingerprint": self.fingerprint, "filled": str(self.filled)}
        with files.atomic(path) as temporary:
            save_file({"d2t": self.d2t, "t2d": self.t2d}, temporary, metadata=header)
        return path


def load(folder: Path, fingerprint: str = "") -> VocabMap:
    """The map that `save` wrote.

    Raises BrokenFile, and StaleVocabulary where `fingerprint` is given and the map was made from something else.
    """
    path = folder / FILE
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            found = VocabMap(
                file.get_tensor("d2t"),
                file.get_tensor("t2d"),
                header.get("fingerprint", ""),
                int(header.get("filled", 0)),
            )
    except (OSError, SafetensorError, ValueError) as error:
        raise files.BrokenFile(f"{path} is no vocabulary map ({error})", f"delete {path} and run again") from error
    if fingerprint and found.fingerprint != fingerprint:
        raise StaleVocabulary(
            f"{path} was made from data {found.fingerprint or 'unknown'}, not from {fingerprint}",
            f"delete {path.parent} and what was trained with it, then run again",
        )
    return found
