"""MoE-Spec budgets (arXiv 2602.16052), replayed: a step that verifies n tokens may read B experts a layer.

Lossy: a verifier under a budget is not the target any more, so what it accepts need not be the target's choice.

In a layer, over the n tokens of a step, expert i has the mass s_i = sum over t of g_i(h_t), the router's scores
over *all* experts (Gate.scores says which for softmax and sigmoid routers). The B experts of most mass are the
shortlist. A step whose tokens choose at most B different experts is left alone. Otherwise, for the other experts,
- truncation: they contribute nothing, the other weights stay as they are;
- substitution: the next in the model's own ranking that are on the shortlist take their place, and the model's
  rule gives the weights; fewer than k remain where the shortlist or the model's group limit holds no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from labkit.errors import LabError
from labkit.experts.expected import expected_unique
from labkit.experts.gates import Scores
from labkit.experts.routing import Routing

if TYPE_CHECKING:
    import torch

TRUNCATION, SUBSTITUTION = "truncation", "substitution"
METHODS = (SUBSTITUTION, TRUNCATION)
SHARES = (0.4, 0.55, 0.7, 0.85, 1.0)


class BadBudget(LabError):
    """A budget, its method or its scores cannot be used with this routing."""


def check(budgets: Iterable[int], num_experts: int, n: int, methods: Iterable[str]) -> None:
    """Raise BadBudget for what cannot be."""
    wrong = [b for b in budgets if not 1 <= b <= num_experts or b != int(b)]
    unknown = [m for m in methods if m not in METHODS]
    if wrong or unknown or n < 1:
        raise BadBudget(
            f"budgets {wrong or 'fine'}, methods {unknown or 'fine'}, {n} tokens a step",
            f"give whole budgets from 1 to {num_experts}, methods of {', '.join(METHODS)}, steps from 1 token",
        )


def budgets_to_try(num_experts: int, chosen: int, n: int, shares: Iterable[float] = SHARES) -> list[int]:
    """Budgets between what one token needs and what n independent ones touch: shares of the latter, ascending."""
    whole = float(expected_unique(num_experts, chosen, n))
    return sorted({max(chosen, round(share * whole)) for share in shares})


@dataclass(frozen=True)
class Windows:
    """Steps of n consecutive tokens of one context, one after the other, in one layer; the last may be shorter.

    mass, used: [W, N] the summed mass of each expert and whether any token chose it. window: [t] of each token.
    """

    scores: Scores
    chosen: torch.Tensor
    window: torch.Tensor
    mass: torch.Tensor
    used: torch.Tensor
    rank: torch.Tensor

    @classmethod
    def of(cls, scores: Scores, chosen: torch.Tensor, n: int) -> Windows:
        """From a context's scores [t, N] and choice [t, k]."""
        import torch

        window = torch.arange(len(chosen), device=chosen.device) // n
        count = -(-len(chosen) // n)
        mass = scores.mass.new_zeros(count, scores.mass.shape[1]).index_add_(0, window, scores.mass)
        rank = mass.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return cls(scores, chosen, window, mass, touched(chosen, None, window, mass), rank)

    def readable(self, budget: int) -> torch.Tensor:
        """[W, N] the experts that each step may read: the shortlist, or all where the budget does not bind."""
        binds = self.used.sum(dim=1, keepdim=True) > budget
        return (self.rank < budget) | ~binds

    def choose(self, budget: int, method: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The experts [t, k] under the budget, which of them count [t, k], and which tokens it changed [t]."""
        import torch

        allowed = self.readable(budget)[self.window]  # [t, N]
        kept = allowed.gather(1, self.chosen)
        changed = ~kept.all(dim=1)
        if method == TRUNCATION:
            return self.chosen, kept, changed
        best = self.scores.selection.masked_fill(~allowed, float("-inf")).topk(self.chosen.shape[1], dim=1)
        row = changed.unsqueeze(1)
        chosen = torch.where(row, best.indices, self.chosen)
        return chosen, torch.where(row, best.values > float("-inf"), kept), changed


def touched(chosen: Any, kept: Any, window: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[W, N] whether any token of a step chose the expert (where `kept`, when given)."""
    counts = like.new_zeros(like.shape)
    ones = like.new_ones(chosen.shape) if kept is None else kept.to(like.dtype)
    return counts.index_put_((window.unsqueeze(1).expand_as(chosen), chosen), ones, accumulate=True) > 0


SUMS = (
    "windows",
    "tokens",
    "unique",
    "unique_budget",
    "binding",
    "dropped",
    "own",
    "held",
    "mass",
    "agreed",
    "same",
)


class Tally:
    """What a budget does, summed over the complete steps of each layer."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.sums: dict[int, np.ndarray] = {}

    def add(self, layer: int, windows: Windows, budget: int, choice: tuple[torch.Tensor, ...]) -> None:
        """Count a context's steps; a last one of fewer than n tokens is left out."""
        whole = len(windows.chosen) // self.n
        tokens = slice(whole * self.n)
        chosen, kept, changed = choice
        after = touched(chosen, kept, windows.window, windows.mass)
        own = windows.scores.mass.gather(1, windows.chosen)[tokens].double()
        agreed = windows.readable(budget)[windows.window].gather(1, windows.chosen)[tokens]
        used, mass = windows.used[:whole].sum(dim=1), windows.mass[:whole].double()
        values = (
            whole,
            whole * self.n,
            used.sum(),
            after[:whole].sum(),
            (used > budget).sum(),
            own[~agreed].sum(),
            own.sum(),
            mass[windows.rank[:whole] < budget].sum(),
            mass.sum(),
            agreed.double().mean(dim=1).sum(),
            (~changed[tokens]).sum(),
        )
        self.sums[layer] = self.sums.get(layer, np.zeros(len(SUMS))) + np.array([float(v) for v in values])

    def by_layer(self) -> pd.DataFrame:
        """A row a layer: see `budget`."""
        sums = pd.DataFrame(self.sums.values(), columns=list(SUMS))
        if not sums["windows"].min() > 0:
            raise BadBudget(f"no text of {self.n} tokens was seen", "give longer documents")
        frame = pd.DataFrame({"layer": list(self.sums), "windows": sums["windows"].astype(int)})
        frame["unique"] = sums["unique"] / sums["windows"]
        frame["unique_budget"] = sums["unique_budget"] / sums["windows"]
        frame["saved"] = 1 - frame["unique_budget"] / frame["unique"]
        frame["binding"] = sums["binding"] / sums["windows"]
        frame["mass_dropped"] = sums["dropped"] / sums["own"]
        frame["mass_held"] = sums["held"] / sums["mass"]
        frame["agreement"] = sums["agreed"] / sums["tokens"]
        frame["same_set"] = sums["same"] / sums["tokens"]
        return frame


class Replay:
    """Budgets replayed while routing is recorded, so that no scores are kept: a listener of experts.record."""

    def __init__(self, budgets: Iterable[int], n: int = 4, methods: Sequence[str] = METHODS) -> None:
        self.budgets, self.n, self.methods = sorted(set(budgets)), n, tuple(methods)
        if not self.budgets or not self.methods:
            raise BadBudget("no budget or no method to replay", "give one of each or more (budgets_to_try)")
        self.tallies = {(m, b): Tally(n) for m in self.methods for b in self.budgets}

    def __call__(self, layer: int, scores: Scores, chosen: torch.Tensor) -> None:
        """Take a context's scores [t, N] and choice [t, k] in one layer."""
        check(self.budgets, scores.mass.shape[1], self.n, self.methods)
        windows = Windows.of(scores, chosen, self.n)
        for (method, budget), tally in self.tallies.items():
            tally.add(layer, windows, budget, windows.choose(budget, method))

    def by_layer(self) -> pd.DataFrame:
        """A row a method, budget and layer; columns as in `budget`."""
        frames = []
        for (method, budget), tally in self.tallies.items():
            frame = tally.by_layer()
            for at, (name, value) in enumerate({"method": method, "budget": budget, "n": self.n}.items()):
                frame.insert(at, name, value)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    def table(self) -> pd.DataFrame:
        """A row a method and budget: the mean over layers of by_layer."""
        return (
            self.by_layer()
            .groupby(["method", "budget", "n"], sort=False, as_index=False)
            .mean()
            .drop(columns="layer")
        )


def budget(routing: Any, scores: Any, budget: int, *, n: int = 4, method: str = SUBSTITUTION) -> pd.DataFrame:
    """What a budget of B experts a layer does to recorded routing: a row a layer.

    scores: [T, L, N] probabilities of a softmax router; or Scores of two such arrays; or a function from a layer's
    place to either without the L. Steps are the consecutive runs of n tokens of each document, the rest left out.

    Columns: unique and unique_budget, experts a step reads without and with it; saved, 1 - their ratio; binding,
    share of steps that would read more than B; mass_dropped, share of the mass of the chosen experts that lies
    outside the shortlist where it binds; mass_held, share of all mass on the B experts of most mass; agreement,
    share of the chosen experts that stay; same_set, share of tokens whose experts are all unchanged.
    """
    return replayed(routing, scores, [budget], n, [method]).by_layer()


def budget_table(
    routing: Any, scores: Any, budgets: Iterable[int], n: int = 4, methods: Sequence[str] = METHODS
) -> pd.DataFrame:
    """As `budget` for several budgets: a row a method and budget, the mean over layers."""
    return replayed(routing, scores, budgets, n, methods).table()


def replayed(routing: Any, scores: Any, budgets: Iterable[int], n: int, methods: Sequence[str]) -> Replay:
    """A Replay that has seen all of the recorded routing."""
    import torch

    replay = Replay(budgets, n, methods)
    given = Routing.of(routing)
    for place, layer in enumerate(given.layers):
        chosen = torch.from_numpy(given.layer(place).astype(np.int64))
        found = of_layer(scores, place, len(given.layers))
        check_scores(found, len(chosen), given.num_experts, layer)
        for begin, end in zip(given.bounds[:-1], given.bounds[1:], strict=True):
            replay(layer, Scores(found.mass[begin:end], found.selection[begin:end]), chosen[begin:end])
    return replay


def check_scores(found: Scores, tokens: int, num_experts: int, layer: int) -> None:
    """Raise BadBudget unless a layer's scores fit the recording and can be a mass."""
    shape = tuple(found.mass.shape)
    if len(shape) != 2 or shape[0] != tokens or shape[1] < num_experts or found.selection.shape != shape:
        raise BadBudget(
            f"scores {shape} for {tokens} tokens and {num_experts} experts",
            "give the scores of the same recording, over all experts",
        )
    if not bool(((found.mass >= 0) & found.mass.isfinite()).all()) or bool(found.selection.isnan().any()):
        raise BadBudget(
            f"scores of layer {layer} that are negative, infinite or no number",
            "give probabilities over all experts, not logits",
        )


def of_layer(scores: Any, place: int, layers: int) -> Scores:
    """The scores of one layer of as many as were recorded, as tensors [T, N]; raises BadBudget."""
    import torch

    if isinstance(scores, Callable):
        found = scores(place)
    elif any(len(s.shape) != 3 or s.shape[1] != layers for s in given_arrays(scores)):
        shapes = [tuple(s.shape) for s in given_arrays(scores)]
        raise BadBudget(f"scores {shapes[0]} for {layers} layers", "give [tokens, layers, experts]")
    elif isinstance(scores, Scores):
        found = Scores(scores.mass[:, place], scores.selection[:, place])
    else:
        found = scores[:, place]
    pair = found if isinstance(found, Scores) else Scores(found, found)
    return Scores(*(torch.as_tensor(np.asarray(part)) for part in (pair.mass, pair.selection)))


def given_arrays(scores: Any) -> list[Any]:
    """The one or two arrays that scores were given as."""
    return [scores.mass, scores.selection] if isinstance(scores, Scores) else [scores]
