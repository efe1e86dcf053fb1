"""Maps that others wrote: read, and the ways of getting d2t wrong recognised by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from labkit import files
from labkit.vocab.mapping import FILE, BadVocabulary, VocabMap

LONG = 64  # entries from which on a map that rises at every step can only hold absolute ids


def problems(d2t: torch.Tensor, target_vocab_size: int, t2d: torch.Tensor | None = None) -> list[str]:
    """What is wrong with a map, none where it is sound: `faults` and an order that speculators cannot use."""
    found = faults(d2t, target_vocab_size, t2d)
    if d2t.ndim == 1 and (targets_of(d2t).diff() <= 0).any():
        found.append(
            "d2t's target ids do not ascend: lm_head[t2d], as speculators cuts it, and d2t do not go together"
        )
    return found


def faults(d2t: torch.Tensor, target_vocab_size: int, t2d: torch.Tensor | None = None) -> list[str]:
    """What makes a map lead to wrong tokens in any engine, none where it does not; the known mistakes by name."""
    if d2t.ndim != 1 or d2t.is_floating_point() or d2t.dtype == torch.bool:
        return [f"d2t is {d2t.dtype} of shape {list(d2t.shape)}, not one whole number a draft token"]
    kind = meaning(d2t, target_vocab_size, t2d)
    if kind:
        return [kind]
    ids, found = targets_of(d2t), []
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < target_vocab_size:
        found.append(
            f"d2t leads to target ids {int(ids.min())}..{int(ids.max())}, outside 0..{target_vocab_size - 1}: "
            "it has to hold offsets (target id minus draft id)"
        )
    if len(ids.unique()) < len(ids):
        found.append(
            f"d2t leads {len(ids) - len(ids.unique())} draft tokens to a target token that another one has"
        )
    if t2d is not None and not found:
        found += disagreement(ids, t2d, target_vocab_size)
    return found


def meaning(d2t: torch.Tensor, target_vocab_size: int, t2d: torch.Tensor | None) -> str:
    """The name of the mistake where d2t holds something else than offsets, "" where it does not."""
    size, wide = len(d2t), d2t.long()
    if size < 2 or size == target_vocab_size:
        return ""
    marked = None if t2d is None or t2d.dtype != torch.bool else t2d.nonzero().flatten()
    if marked is not None and torch.equal(marked, targets_of(d2t).sort().values):
        return ""  # read as offsets it names the tokens that t2d names
    if torch.equal(wide, torch.arange(size)) and (marked is not None or size >= LONG):
        return "d2t is 0, 1, 2, ...: a default that nobody replaced; draft token i would become target token 2i"
    if not wide.any() and marked is not None:
        return "d2t is all zeros though t2d names other tokens: the map was never filled in"
    rises = bool((wide.diff() > 0).all()) and int(wide[0]) >= 0 and int(wide[-1]) < target_vocab_size
    if rises and ((marked is not None and torch.equal(marked, wide)) or (marked is None and size >= LONG)):
        return "d2t holds absolute target ids, not offsets: engines add the draft id and propose other tokens"
    return ""


def disagreement(ids: torch.Tensor, t2d: torch.Tensor, target_vocab_size: int) -> list[str]:
    """What contradicts between the target ids of d2t and t2d."""
    if t2d.dtype != torch.bool or list(t2d.shape) != [target_vocab_size]:
        return [f"t2d is {t2d.dtype} of shape {list(t2d.shape)}, not bool of [{target_vocab_size}]"]
    if not torch.equal(t2d.nonzero().flatten(), ids.sort().values):
        return ["d2t and t2d name different tokens"]
    return []


def targets_of(d2t: torch.Tensor) -> torch.Tensor:
    """The target id of each draft id, for offsets."""
    return d2t.long() + torch.arange(len(d2t))


def read(path: Path, target_vocab_size: int) -> VocabMap:
    """A map that the lab or another project saved: a safetensors file, a folder with one, or with *.npy files.

    Absolute ids are taken for what they are; anything else that is wrong raises BadVocabulary by its name. Order
    that does not ascend is refused, since lm_head rows would have to move with it.
    """
    tensors = tensors_at(path)
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        raise BadVocabulary(f"{path} has no d2t", "give a folder with d2t, or a head's model.safetensors")
    found = problems(d2t, target_vocab_size, t2d)
    if found and "absolute target ids" in found[0]:
        return VocabMap.of_targets(d2t, target_vocab_size)
    if found:
        raise BadVocabulary(f"{path}: {found[0]}", "ask its maker for the right map, or build one from counts")
    return VocabMap.of_targets(targets_of(d2t), target_vocab_size)


def tensors_at(path: Path) -> dict[str, torch.Tensor]:
    """d2t and t2d of a file or folder, as they are there; raises BrokenFile."""
    arrays = (
        {} if path.is_file() else {f.name.partition("-")[0].removesuffix(".npy"): f for f in path.glob("*.npy")}
    )
    try:
        if "d2t" in arrays:
            return {
                name: torch.from_numpy(np.load(file, allow_pickle=False))
                for name, file in arrays.items()
                if name in ("d2t", "t2d")
            }
        return load_file(path if path.is_file() else path / FILE)
    except (OSError, SafetensorError, ValueError) as error:
        raise files.BrokenFile(f"{path} holds no readable map ({error})", "give another file") from error
