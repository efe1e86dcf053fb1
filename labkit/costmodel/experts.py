"""How many experts a step reads: from reuse, streams and the kernel's regime."""

from __future__ import annotations

import numpy as np
from scipy import stats

from labkit.experts.windows import expected_unique
from labkit.targets import Geometry


def loaded(
    geometry: Geometry, n: int, streams: int, reuse: np.ndarray, pairwise: bool, budget: float = 0
) -> np.ndarray:
    """Expert reads a layer of a step with `streams` requests of n tokens each, for each reuse factor.

    Within a request tokens reuse experts by r: U = k + r (U_uniform(n) - k); requests are taken as independent of
    each other. Pairwise, every token reads its own k. A budget caps unique experts (MoE-Spec's truncation).
    """
    total, chosen = geometry.n_routed_experts, geometry.num_experts_per_tok
    if not total:
        return np.zeros_like(reuse)
    if pairwise:
        return np.full_like(reuse, n * streams * chosen)
    one = chosen + reuse * (expected_unique(total, chosen, n) - chosen)
    unique = total * (1 - (1 - one / total) ** streams)
    return np.minimum(unique, budget) if budget else unique


def fullest_rank(unique: np.ndarray, experts: int, ranks: int) -> np.ndarray:
    """Expected experts on the rank that holds most of those read, when whole experts are dealt out to ranks.

    Each rank's count is hypergeometric; ranks are taken as independent, so P(max <= x) = P(X <= x)^ranks.
    """
    own = experts // ranks
    counts = np.arange(own + 1)
    below = np.floor(unique).astype(int)

    def expected(drawn: np.ndarray) -> np.ndarray:
        shares = stats.hypergeom.cdf(counts[None, :], experts, own, drawn[:, None])
        return (1 - shares**ranks).sum(axis=1)

    low, high = expected(below), expected(np.minimum(below + 1, experts))
    return low + (unique - below) * (high - low)
