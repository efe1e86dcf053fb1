"""How many experts a step reads: from reuse, streams and the kernel's regime."""

from __future__ import annotations

import functools

import numpy as np
from scipy import special

from labkit.experts.expected import expected_unique
from labkit.targets import Geometry


def loaded(
    geometry: Geometry, n: int, streams: int, reuse: np.ndarray, pairwise: bool, budget: float = 0
) -> np.ndarray:
    """Expert reads a layer of a step with `streams` requests of n tokens each, for each reuse factor.

    Within a request tokens reuse experts by r: U = k + r (U_uniform(n) - k); requests are taken as independent of
    each other, and no more experts are touched than tokens choose. Pairwise, every token reads its own k. A budget
    caps unique experts (MoE-Spec's truncation).
    """
    total, chosen = geometry.n_routed_experts, geometry.num_experts_per_tok
    if not total:
        return np.zeros_like(reuse)
    if pairwise:
        return np.full_like(reuse, n * streams * chosen)
    one = chosen + reuse * (expected_unique(total, chosen, n) - chosen)
    one = np.minimum(one, min(total, n * chosen))
    unique = total * (1 - (1 - one / total) ** streams)
    return np.minimum(unique, budget) if budget else unique


def fullest_rank(unique: np.ndarray, experts: int, ranks: int) -> np.ndarray:
    """Expected experts on the rank that holds most of those read, when whole experts are dealt out to ranks."""
    below = np.floor(unique).astype(int)
    low = np.array([expected_fullest(int(n), experts, ranks) for n in below])
    high = np.array([expected_fullest(min(int(n) + 1, experts), experts, ranks) for n in below])
    return low + (unique - below) * (high - low)


@functools.lru_cache(maxsize=4096)
def expected_fullest(unique: int, experts: int, ranks: int) -> float:
    """`fullest_rank` of a whole number of experts, each set of them as likely as another.

    E[max] = sum over x of P(max > x); P(max <= x) counts the sets with at most x on each rank: the coefficient of
    z^unique in the product over ranks of (sum over j <= x of C(own, j) z^j). Where ranks do not divide the
    experts, the first ones own one more, as in vLLM.
    """
    owned = [experts // ranks + (rank < experts % ranks) for rank in range(ranks)]
    ways, every = [special.comb(own, np.arange(own + 1)) for own in owned], special.comb(experts, unique)
    expected = 0.0
    for most in range(min(owned[0], unique)):
        sets = np.ones(1)
        for mine in ways:
            sets = np.convolve(sets, mine[: most + 1])[: unique + 1]
        expected += 1 - (sets[unique] / every if len(sets) > unique else 0.0)
    return expected
