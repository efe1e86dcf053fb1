"""What is wrong with a head's tensors: missing, misshapen, not finite, not the target's where they should be."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from labkit import vocab
from labkit.draft import weights
from labkit.draft.config import shapes
from labkit.draft.forms import Head
from labkit.draft.problem import TENSORS, Problem
from labkit.targets import Target

SAMPLED = 64  # rows that are compared with the target's
BLOCK = 8192  # rows of the target's lm_head that are looked through at once
ALIKE = 0.5  # cosine from which on two embeddings are the same, trained further or not
OPTIONAL = ("embed_tokens.weight", "t2d")  # what an engine shares with the target or does not read
SAID_BY_FLAGS = ("input_norm.", "fc_norm.")  # check_config says what is wrong with these


def worthless(name: str, tensor: torch.Tensor) -> str:
    """Why nothing can be computed with a weight, or nothing comes of it; "" where it is sound."""
    if not name.endswith(".weight"):
        return ""
    if not tensor.is_floating_point():
        return f"is {str(tensor.dtype).removeprefix('torch.')}, no floating-point numbers"
    if not torch.isfinite(tensor).all():
        return "holds NaN or infinity"
    return "" if tensor.any() else "is zero throughout"


def tensor_problems(head: Head, target: Target) -> Iterator[Problem]:
    """All of them; a head whose layer is no Llama's is looked at only where all heads are alike."""
    found = head.shapes()
    needed = shapes(head.config)
    if head.form == "other":
        needed = {name: shape for name, shape in needed.items() if not name.startswith(("layers.", "norm."))}
    optional = () if head.form == "speculators" else OPTIONAL
    for name, shape in needed.items():
        if name not in found and name not in optional:
            yield missing(name, head)
        elif name in found and found[name] != shape:
            yield Problem(
                "shapes",
                f"{TENSORS}: {name}",
                f"{name} has shape {found[name]} instead of {shape}",
                "fetch it anew",
            )
    if head.form != "other":
        yield from unknown(head, found, needed)
    for name in head.places:
        tensor = head.tensor(name)
        if tensor is not None and (said := worthless(name, tensor)):
            yield Problem("finite", f"{TENSORS}: {name}", f"{name} {said}", "take an earlier checkpoint")
    if all(found.get(name) in (None, shape) for name, shape in needed.items()):
        yield from map_faults(head, target)
        yield from embedding_problems(head, target)


def missing(name: str, head: Head) -> Problem:
    """A tensor that is not there, and what that does."""
    effects = {
        "lm_head.weight": ": vLLM would draft with random numbers",
        "d2t": ": an engine would take draft tokens for the target tokens of the same number",
    }
    remedy = "export it with the head" if name in effects else "fetch or export the head anew"
    what = f"{TENSORS} has no {name}{effects.get(name, '')}"
    return Problem("missing map" if name in ("d2t", "t2d") else "missing", f"{TENSORS}: {name}", what, remedy)


def unknown(head: Head, found: dict[str, list[int]], needed: dict[str, list[int]]) -> Iterator[Problem]:
    """Tensors that no engine has a place for: another architecture, or names with a prefix."""
    rest = [name for name in found if name not in (*needed, *OPTIONAL) and not name.startswith(SAID_BY_FLAGS)]
    rest = [
        name for name in rest if name != "d2t" and not name.startswith(("verifier_norm.", "verifier_lm_head."))
    ]
    if rest:
        yield Problem(
            "unknown tensors",
            TENSORS,
            f"a head of this configuration has no place for {len(rest)} of its tensors: {', '.join(rest[:3])}",
            "export the head without a prefix, or say in config.json what it is",
        )


def map_faults(head: Head, target: Target) -> Iterator[Problem]:
    """A d2t that does not hold offsets or leads elsewhere, and lm_head rows that belong to other tokens."""
    d2t = head.tensor("d2t")
    if d2t is None:
        return
    look = vocab.problems if head.form == "speculators" else vocab.faults
    found = look(d2t, target.geometry.vocab_size, head.tensor("t2d"))
    for text in found:
        yield Problem("map", f"{TENSORS}: d2t", text, "write offsets, target id minus draft id, ascending")
    if not found:
        yield from row_problems(head, target, d2t)


def row_problems(head: Head, target: Target, d2t: torch.Tensor) -> Iterator[Problem]:
    """lm_head rows that are the target's, but those of other tokens than d2t says (stale map, or cut by offsets).

    Trained rows are no target's rows any more and say nothing.
    """
    lm_head = head.tensor("lm_head.weight")
    if lm_head is None:
        return
    chosen = spread(len(d2t))
    ids = (d2t[chosen] + torch.tensor(chosen)).tolist()
    right = weights.rows(target.path, weights.names(target)["lm_head"], ids)
    if right is None or right.shape[1] != lm_head.shape[1]:
        return
    mine = lm_head[chosen].to(torch.float32)
    if alike(mine, right).median() > 1 - 1e-3:
        return
    wrong = weights.rows(target.path, weights.names(target)["lm_head"], d2t[chosen].tolist())
    if wrong is not None and alike(mine, wrong).median() > 1 - 1e-3:
        yield Problem(
            "lm_head rows",
            f"{TENSORS}: lm_head.weight",
            "its rows are the target's rows at the offsets of d2t, not at the tokens that d2t leads to",
            "cut lm_head anew at d2t + arange",
        )
    elif alike(mine, right).median() < ALIKE and copied(mine, target):
        yield Problem(
            "stale map",
            f"{TENSORS}: d2t",
            "rows of lm_head are the target's rows of other tokens than d2t leads to: another training's map",
            "take d2t, t2d and lm_head from one and the same training",
        )


def copied(mine: torch.Tensor, target: Target) -> bool:
    """Whether most of the first few of these rows stand somewhere in the target's lm_head as they are."""
    few = torch.nn.functional.normalize(mine[:8], dim=1)
    best = torch.full((len(few),), -1.0)
    size = target.geometry.vocab_size
    for start in range(0, size, BLOCK):  # a trillion-parameter target's lm_head is 5 GB in fp32
        ids = range(start, min(start + BLOCK, size))
        part = weights.rows(target.path, weights.names(target)["lm_head"], ids)
        if part is None:
            return False
        best = torch.maximum(best, (few @ torch.nn.functional.normalize(part, dim=1).T).max(dim=1).values)
    return float(best.median()) > 1 - 1e-3


def embedding_problems(head: Head, target: Target) -> Iterator[Problem]:
    """An embedding shipped with the head that is not the target's: random in TorchSpec's exports (#38)."""
    found = head.shapes().get("embed_tokens.weight")
    if found is None:
        return
    where = f"{TENSORS}: embed_tokens.weight"
    remedy = "leave embed_tokens out: engines then share the target's"
    if found != [target.geometry.vocab_size, target.geometry.hidden_size]:
        shape = [target.geometry.vocab_size, target.geometry.hidden_size]
        yield Problem("embedding", where, f"it has shape {found}, the target's {shape}", remedy)
        return
    chosen = spread(target.geometry.vocab_size)
    its = weights.rows(target.path, weights.names(target)["embed"], chosen)
    if its is None:
        return
    mine = head.tensor("embed_tokens.weight")[chosen].to(torch.float32)
    cosine = float(alike(mine, its).median())
    if cosine < ALIKE:
        yield Problem(
            "embedding",
            where,
            f"its rows are not the target's (median cosine {cosine:.2f}): vLLM takes them, SGLang the target's",
            remedy,
        )


def spread(size: int) -> list[int]:
    """Up to SAMPLED numbers spread evenly over 0..size-1."""
    return sorted({int(i) for i in torch.linspace(0, size - 1, min(SAMPLED, size)).tolist()})


def alike(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Cosine of each pair of rows: [rows]; rows of zeros, as padding has, count as alike."""
    zero = (a.norm(dim=1) == 0) & (b.norm(dim=1) == 0)
    return torch.where(zero, 1.0, torch.nn.functional.cosine_similarity(a, b, dim=1))
