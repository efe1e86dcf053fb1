"""From token counts to the draft's vocabulary, and what each size of it would cover."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from labkit import files
from labkit.vocab.mapping import BadVocabulary, VocabMap

SIZES = (1024, 2048, 4096, 8192, 16384, 32768)
CHUNK_ROWS = 4096  # rows counted at once: one bincount over all their tokens


def count(input_ids: Iterable[Sequence[int]], loss_masks: Iterable[Sequence[bool]], vocab_size: int) -> np.ndarray:
    """How often each token is trained on: int64 [vocab_size], over rows of ids and their loss masks.

    Raises BadVocabulary for an id outside the vocabulary (another tokenizer's data) and for unequal lengths.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    rows = zip(input_ids, loss_masks, strict=True)
    while chunk := list(itertools.islice(rows, CHUNK_ROWS)):
        ids = np.concatenate([np.asarray(row, dtype=np.int64) for row, _ in chunk])
        mask = np.concatenate([np.asarray(mask, dtype=bool) for _, mask in chunk])
        if len(ids) != len(mask):
            raise BadVocabulary(f"{len(ids)} tokens have {len(mask)} mask entries", "make the data set anew")
        ids = ids[mask]
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise BadVocabulary(
                f"token ids {int(ids.min())}..{int(ids.max())} do not lie in 0..{vocab_size - 1}",
                "the data were made with another tokenizer: make them anew with this target",
            )
        counts += np.bincount(ids, minlength=vocab_size)
    return counts


def build(
    token_counts: np.ndarray, draft_vocab_size: int, required_ids: Iterable[int] = (), *, tokens: int = 0
) -> VocabMap:
    """The `required_ids` and the most frequent other tokens, `draft_vocab_size` in all.

    `token_counts` [target vocabulary]; `tokens`: how many of those the tokenizer has, where the embedding is
    padded beyond it (0: all). Ties go to the lower id; where fewer distinct tokens were seen than wanted, unseen
    ones fill up, lowest id first (padding last), and the map's `filled` says how many.
    Raises BadVocabulary with the value seen.
    """
    counts = np.asarray(token_counts)
    required = sorted({int(token) for token in required_ids})
    refuse_impossible(counts, draft_vocab_size, required)
    if tokens and counts[tokens:].any():
        beyond = tokens + int(np.flatnonzero(counts[tokens:])[0])
        raise BadVocabulary(
            f"token {beyond} was counted, but the tokenizer has {tokens} tokens",
            "count with this target's tokenizer",
        )
    free = np.ones(len(counts), dtype=bool)
    free[required] = False
    candidates = np.flatnonzero(free)
    rank = np.argsort(-counts[candidates], kind="stable")
    rest = candidates[rank[: draft_vocab_size - len(required)]]
    chosen = torch.from_numpy(np.concatenate([np.array(required, dtype=np.int64), rest]))
    made_from = fingerprint(counts, draft_vocab_size, required)
    return VocabMap.of_targets(chosen, len(counts), fingerprint=made_from, filled=int((counts[rest] == 0).sum()))


def fingerprint(token_counts: np.ndarray, draft_vocab_size: int, required_ids: Iterable[int] = ()) -> str:
    """Sixteen hex digits of all that decides a map: counts, size, required ids."""
    counts = np.ascontiguousarray(token_counts, dtype="<i8")
    required = sorted({int(token) for token in required_ids})
    return files.digest([len(counts), draft_vocab_size, required, hashlib.sha256(counts).hexdigest()])


def refuse_impossible(counts: np.ndarray, draft_vocab_size: int, required: Sequence[int]) -> None:
    """Raise BadVocabulary for sizes and ids that do not go together."""
    if counts.ndim != 1 or not len(counts) or (counts < 0).any() or not np.isfinite(counts).all():
        raise BadVocabulary(
            f"token counts of shape {counts.shape} are no counts", "give one count >= 0 for each target token"
        )
    if not 0 < draft_vocab_size <= len(counts):
        raise BadVocabulary(
            f"draft_vocab_size={draft_vocab_size} does not lie in 1..{len(counts)}, the target's vocabulary",
            f"lower draft_vocab_size; {len(counts)} itself is a head over the whole vocabulary, without maps",
        )
    outside = [token for token in required if not 0 <= token < len(counts)]
    if outside:
        raise BadVocabulary(f"required ids {outside[:5]} lie outside 0..{len(counts) - 1}", "drop them")
    if len(required) > draft_vocab_size:
        raise BadVocabulary(
            f"{len(required)} required ids do not fit into draft_vocab_size={draft_vocab_size}",
            "raise draft_vocab_size",
        )


def coverage_curve(
    token_counts: np.ndarray,
    required_ids: Iterable[int] = (),
    *,
    sizes: Iterable[int] = SIZES,
    measured: np.ndarray | None = None,
) -> pd.DataFrame:
    """Share of tokens that a draft vocabulary of each size holds: draft_vocab_size coverage filled.

    The vocabularies come from `token_counts`; the share is of `measured` (say, held-out counts) where given. Sizes
    that cannot be (below the required ids, above the target's vocabulary) are left out.
    """
    counts, required = np.asarray(token_counts), sorted({int(token) for token in required_ids})
    maps = [build(counts, size, required) for size in sorted(set(sizes)) if len(required) <= size <= len(counts)]
    of = counts if measured is None else np.asarray(measured)
    rows = [
        {"draft_vocab_size": one.draft_vocab_size, "coverage": one.coverage(of), "filled": one.filled}
        for one in maps
    ]
    return pd.DataFrame(rows, columns=["draft_vocab_size", "coverage", "filled"])


def summary(mapping: VocabMap, token_counts: np.ndarray) -> dict[str, Any]:
    """What to say of a map: sizes, coverage, distinct tokens seen and left out, tokens only filled up with."""
    counts = np.asarray(token_counts)
    return {
        "draft_vocab_size": mapping.draft_vocab_size,
        "target_vocab_size": mapping.target_vocab_size,
        "coverage": mapping.coverage(counts),
        "tokens_seen": int((counts > 0).sum()),
        "tokens_left_out": int((counts[~mapping.t2d.numpy()] > 0).sum()),
        "filled": mapping.filled,
        "fingerprint": mapping.fingerprint,
    }
