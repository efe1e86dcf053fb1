"""Two heads of one training line as one: their weights averaged, over a draft vocabulary that both can have.

A head that is trained on gets better at the new text and worse at what the first stage had and the second lacks;
somewhere between the two lies one that keeps both (LOG.md has what it was worth for the shipped head).
"""

from __future__ import annotations

from pathlib import Path

import torch

from labkit.draft import weights
from labkit.draft.export import basis, explicit, refuse_place, write
from labkit.draft.forms import BadHead, Head, read
from labkit.errors import LabError
from labkit.targets import Target
from labkit.vocab import VocabMap

MAPS = ("d2t", "t2d")
HEAD_ROWS = "lm_head.weight"


class BadShare(LabError):
    """A share is none."""


class Unlike(LabError):
    """Two heads are no stages of one training: there is nothing between them."""


def average(
    first: Path, second: Path, out_dir: Path, *, target: Target, vocab: VocabMap, share: float = 0.5
) -> Path:
    """Write the head whose weights are `share` of the second's and the rest of the first's.

    Rows of lm_head for tokens of `vocab` that a head cannot propose are the target's own. Raises BadShare, Unlike
    (shapes, flags, layers or positions differ), BadHead, Occupied, MissingWeights.
    """
    if not 0 <= share <= 1:
        raise BadShare(
            f"share={share} is no part of a whole", "give a number from 0 (the first) to 1 (the second)"
        )
    refuse_place(first, out_dir)
    refuse_place(second, out_dir)
    heads = [read(first), read(second)]
    refuse_unlike(*heads)
    one, two = (moved(head, target, vocab) for head in heads)
    mixed = {
        name: (share * two[name].float() + (1 - share) * one[name].float()).to(two[name].dtype) for name in two
    }
    config = explicit(heads[1]) | {"draft_vocab_size": vocab.draft_vocab_size}
    record = heads[1].record | {"vocabulary": vocab.digest, "averaged": {"share": share, "first": heads[0].record}}
    return write(out_dir, heads[1].form, config, mixed | {"d2t": vocab.d2t, "t2d": vocab.t2d}, record)


def refuse_unlike(one: Head, two: Head) -> None:
    """Raise Unlike where two heads differ in more than their weights and vocabularies."""
    skipped = (*MAPS, HEAD_ROWS)
    shapes = [{name: shape for name, shape in head.shapes().items() if name not in skipped} for head in (one, two)]
    bases = [basis(explicit(head)) for head in (one, two)]
    for what, (mine, others) in {"tensors": shapes, "config.json": bases}.items():
        if mine != others:
            name = next(name for name in {**mine, **others} if mine.get(name) != others.get(name))
            raise Unlike(
                f"{what}: {name} is {mine.get(name)} in {one.path} and {others.get(name)} in {two.path}",
                "average a head with one that was trained on from it",
            )


def moved(head: Head, target: Target, vocab: VocabMap) -> dict[str, torch.Tensor]:
    """A head's weights with lm_head over the target ids of `vocab`: its own rows, else the target's."""
    tensors = head.tensors()
    if HEAD_ROWS not in tensors:
        raise BadHead(f"{head.path} has no {HEAD_ROWS}", "add the target's rows")
    own = tensors[HEAD_ROWS]
    table = weights.own(target, "lm_head").to(own.dtype)
    table[head.target_ids().sort().values] = own  # `tensors` has them ascending
    return {name: tensor for name, tensor in tensors.items() if name not in MAPS} | {
        HEAD_ROWS: table[vocab.target_ids]
    }
