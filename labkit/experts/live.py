"""MoE-Spec budgets live: a mixture of experts in Transformers whose routers are held to B experts a step.

The extension point is PyTorch's forward hook, which may return another output for a module: here other experts and
weights for a router. Nothing is patched, and the hooks come off at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy import stats

from labkit.experts.budgets import METHODS, SUBSTITUTION, TRUNCATION, BadBudget, Tally, Windows, check
from labkit.experts.gates import Gate
from labkit.experts.recording import pieces, routers
from labkit.experts.texts import Document

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NO_BUDGET = "none"


@contextlib.contextmanager
def budgeted(
    model: PreTrainedModel, budget: int, n: int, method: str = SUBSTITUTION, tally: Tally | None = None
) -> Iterator[PreTrainedModel]:
    """The model under a budget: every run of n tokens of a forward pass is a step, from its first token on.

    One sequence a pass. A step whose experts all stay keeps the router's output itself, so a budget of all
    experts changes no bit. `tally` counts what the budget does. Raises UnknownGate for a router of another kind.
    """
    found = routers(model)
    check([budget], next(iter(found.values())).weight.shape[0], n, [method])
    hooks = [
        router.register_forward_hook(limiter(layer, Gate.of(router), budget, n, method, tally))
        for layer, router in found.items()
    ]
    try:
        yield model
    finally:
        for hook in hooks:
            hook.remove()


def limiter(layer: int, gate: Gate, budget: int, n: int, method: str, tally: Tally | None) -> Callable[..., Any]:
    """A forward hook that gives a router's output under the budget, or None to leave it as it is."""
    import torch

    def hook(_module: Any, _inputs: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        logits, weights, own = output
        gate.check(output)
        windows = Windows.of(gate.scores(logits), own, n)
        chosen, kept, changed = choice = windows.choose(budget, method)
        if tally is not None:
            tally.add(layer, windows, budget, choice)
        if not changed.any():
            return None
        new = weights * kept if method == TRUNCATION else gate.weights(logits, chosen, kept).to(weights.dtype)
        return logits, torch.where(changed.unsqueeze(1), new, weights), chosen

    return hook


@dataclass
class Quality:
    """What a model under one budget said, context by context, beside the target without one."""

    nll: list[np.ndarray] = field(default_factory=list)  # [t - 1] of each next token, in nats
    greedy: list[np.ndarray] = field(default_factory=list)  # [t] the most likely next token


def live_budget(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    documents: Iterable[Document | Sequence[int] | str],
    budgets: Iterable[int],
    *,
    n: int = 4,
    methods: Sequence[str] = METHODS,
    max_length: int = 512,
) -> pd.DataFrame:
    """Quality against budget on recorded text: a row a method and budget, the first one without a budget.

    Each document is fed as it stands (teacher forcing), in contexts of max_length, and all of it is budgeted in
    steps of n tokens; where an engine verifies, the prompt is not, and a step also holds rejected drafts.

    Columns: perplexity; perplexity_ratio with low and high, over no budget, geometric mean over contexts with a
    95% interval by Student's t; greedy_agreement, share of positions where the most likely next token is the
    target's; acceptance_length, bonus included, of a draft that proposes the text's own next n - 1 tokens, each
    step of n tokens on its own; acceptance_length_target, the same of a draft that proposes what the target
    itself would say at these positions (n without a budget: all it loses is due to the budget); unique,
    unique_budget, saved, mass_dropped, agreement as in experts.budget, counted live.
    """
    texts = [piece for document in documents for piece in pieces(encoded(document, tokenizer), max_length)]
    texts = [piece for piece in texts if len(piece) >= max(n, 2)]
    if not texts:
        raise BadBudget(f"no text of {max(n, 2)} tokens", "give longer documents")
    settings = [(method, budget) for method in methods for budget in sorted(set(budgets))]
    total = next(iter(routers(model).values())).weight.shape[0]
    check([budget for _method, budget in settings], total, n, methods)
    target, found = Quality(), {setting: (Quality(), Tally(n)) for setting in settings}
    bare = Tally(n)
    for piece in texts:
        with budgeted(model, total, n, SUBSTITUTION, bare):
            read(model, piece, target)
        for (method, budget), (quality, tally) in found.items():
            with budgeted(model, budget, n, method, tally):
                read(model, piece, quality)
    rows = [{"method": NO_BUDGET, "budget": total} | compared(target, target, texts, n) | counted(bare)]
    for (method, budget), (quality, tally) in found.items():
        rows.append({"method": method, "budget": budget} | compared(quality, target, texts, n) | counted(tally))
    return pd.DataFrame(rows)


def encoded(document: Document | Sequence[int] | str, tokenizer: PreTrainedTokenizerBase | None) -> Sequence[int]:
    """The tokens of a document; a text goes through the tokenizer."""
    if isinstance(document, str):
        if tokenizer is None:
            raise BadBudget("a text was given, and no tokenizer", "give token ids, or the target's tokenizer")
        return tokenizer(document, add_special_tokens=False)["input_ids"]
    return document.tokens if isinstance(document, Document) else document


def read(model: PreTrainedModel, piece: list[int], quality: Quality) -> None:
    """One pass over a context: what each next token costs, and what the model would say instead."""
    import torch

    tokens = torch.tensor([piece], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0].float()  # [t, V]
        costs = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:], reduction="none")
    quality.nll.append(costs.cpu().numpy())
    quality.greedy.append(logits.argmax(dim=-1).cpu().numpy())


def compared(quality: Quality, target: Quality, texts: list[list[int]], n: int) -> dict[str, float]:
    """The columns of quality of live_budget."""
    costs = np.concatenate(quality.nll).astype(np.float64)  # an untrained model overflows fp32
    differences = np.array([(a - b).mean() for a, b in zip(quality.nll, target.nll, strict=True)])
    half = np.nan
    if len(differences) > 1:
        half = stats.t.ppf(0.975, len(differences) - 1) * differences.std(ddof=1) / len(differences) ** 0.5
    mean = differences.mean()
    greedy, own = np.concatenate(quality.greedy), np.concatenate(target.greedy)
    text = [np.array(piece[1:]) for piece in texts]
    return {
        "n": n,
        "tokens": len(greedy),
        "perplexity": float(np.exp(costs.mean())),
        "perplexity_ratio": float(np.exp(mean)),
        "perplexity_ratio_low": float(np.exp(mean - half)),
        "perplexity_ratio_high": float(np.exp(mean + half)),
        "greedy_agreement": float((greedy == own).mean()),
        "acceptance_length": accepted(quality.greedy, text, n),
        "acceptance_length_target": accepted(quality.greedy, target.greedy, n),
    }


def accepted(said: list[np.ndarray], drafted: list[np.ndarray], n: int) -> float:
    """Mean over steps of n tokens of the leading positions, of n - 1, where both agree, plus the bonus token."""
    lengths = []
    for own, draft in zip(said, drafted, strict=True):
        whole = len(own) // n
        right = [own[i : whole * n : n] == draft[i : whole * n : n] for i in range(n - 1)]
        run = np.cumprod(right, axis=0).sum(axis=0) if right else np.zeros(whole)
        lengths.append(run + 1)
    return float(np.concatenate(lengths).mean())


def counted(tally: Tally) -> dict[str, float]:
    """What the budget did, the mean over layers."""
    names = ["unique", "unique_budget", "saved", "binding", "mass_dropped", "mass_held", "agreement", "same_set"]
    return tally.by_layer()[names].mean().to_dict()


def pareto(frame: pd.DataFrame, cost: str = "unique_budget", quality: str = "greedy_agreement") -> pd.DataFrame:
    """The rows that no other beats: at most their cost and at least their quality, and better in one of them."""
    costs, values = frame[cost].to_numpy(), frame[quality].to_numpy()
    no_worse = (costs[None, :] <= costs[:, None]) & (values[None, :] >= values[:, None])
    better = (costs[None, :] < costs[:, None]) | (values[None, :] > values[:, None])
    return frame[~(no_worse & better).any(axis=1)].sort_values(cost)
