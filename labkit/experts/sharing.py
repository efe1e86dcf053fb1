"""Which experts tokens share: with their neighbours, and with the most popular few."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from labkit.experts import counting
from labkit.experts.expected import popularity
from labkit.experts.routing import BadRouting, Routing
from labkit.experts.windows import each_layer


def overlap(routing: Any, documents: Any = None, *, distance: int = 1) -> np.ndarray:
    """[L] share of a token's experts that the token `distance` before it used, too; NaN without such pairs."""
    if distance < 1:
        raise BadRouting(f"tokens {distance} apart", "count distances from 1, the neighbour")
    given = Routing.of(routing, documents=documents)
    bounds = given.bounds
    pairs = np.maximum(np.diff(bounds) - distance, 0).sum() * given.chosen
    same = each_layer(lambda place: counting.shared(given.layer(place), bounds, distance), given)
    return np.array(same) / pairs if pairs else np.full(len(given.layers), np.nan)


def overlap_table(routing: Any, distances: Iterable[int] = (1, 2, 4, 8, 16)) -> pd.DataFrame:
    """A row a distance and layer: distance, layer, overlap, uniform, popularity (shares, 0 to 1).

    uniform: k/N, what tokens share that choose independently; popularity: sum over e of p_e^2, over k, the same
    with the measured popularity of experts.
    """
    given = Routing.of(routing)
    shares = popularity(given)
    frames = [
        pd.DataFrame(
            {
                "distance": distance,
                "layer": given.layers,
                "overlap": overlap(given, distance=distance),
                "uniform": given.chosen / given.num_experts,
                "popularity": (shares**2).sum(axis=1) / given.chosen,
            }
        )
        for distance in distances
    ]
    return pd.concat(frames, ignore_index=True)


def coverage(routing: Any, tops: Iterable[int] | None = None, num_experts: int | None = None) -> pd.DataFrame:
    """A row a layer and number of experts: layer, top, coverage, uniform (shares, 0 to 1).

    coverage: the share of all assignments that the layer's `top` most used experts hold; uniform: top/N, what
    equal use would give. `tops` are by default eight steps up to all experts.
    """
    given = Routing.of(routing, num_experts)
    total = given.num_experts
    counts = sorted({max(1, round(total * i / 8)) for i in range(1, 9)} if tops is None else set(tops))
    if not counts or counts[0] < 1 or counts[-1] > total:
        raise BadRouting(f"the top {counts} of {total} experts", f"give numbers from 1 to {total}")
    held = np.sort(popularity(given), axis=1)[:, ::-1].cumsum(axis=1) / given.chosen  # [L, N]
    rows = [
        {"layer": layer, "top": top, "coverage": held[at, top - 1], "uniform": top / total}
        for at, layer in enumerate(given.layers)
        for top in counts
    ]
    return pd.DataFrame(rows)
