"""What independent routing would touch, and how far recorded routing is from it: the reuse factor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from labkit import files, settings
from labkit.experts.routing import BadRouting, Routing


def expected_unique(num_experts: float, chosen: float, n: Any) -> Any:
    """Experts that n tokens touch if each chose k of N at random: N (1 - (1 - k/N)^n).

    Raises BadRouting where nobody could: k beyond N, or a number below nothing.
    """
    if np.any(num_experts <= 0) or np.any(chosen < 0) or np.any(chosen > num_experts) or np.any(n < 0):
        raise BadRouting(f"{n} tokens that choose {chosen} of {num_experts} experts", "give 0 <= k <= N, n from 0")
    return num_experts * (1 - (1 - chosen / num_experts) ** n)


def popularity(routing: Routing) -> np.ndarray:
    """[L, N] share of tokens that use each expert; a layer sums to k."""
    width = routing.num_experts
    counts = [np.bincount(routing.experts[:, i].ravel(), minlength=width) for i in range(len(routing.layers))]
    return np.stack(counts) / max(1, len(routing.experts))


def popularity_unique(routing: Any, num_experts: int, n: int) -> np.ndarray:
    """[L] experts that n tokens touch if each chose by popularity alone: sum over e of 1 - (1 - p_e)^n.

    At most the uniform figure: it holds the skew, not that neighbouring tokens choose alike.
    """
    return from_popularity(popularity(Routing.of(routing, num_experts)), n)


def from_popularity(shares: np.ndarray, n: int) -> np.ndarray:
    """Experts that n tokens touch under the given popularity, over the last axis."""
    return (1 - (1 - shares) ** n).sum(axis=-1)


def reuse(measured: Any, num_experts: float, chosen: float, n: Any) -> Any:
    """r in U = k + r (U_uniform - k): 1 for independent tokens, 0 for tokens that share all; NaN at n = 1."""
    extra = np.asarray(expected_unique(num_experts, chosen, n) - chosen)
    return np.divide(measured - chosen, np.where(extra > 1e-9, extra, np.nan))


def published_reuse() -> pd.DataFrame:
    """What others measured on trained models: model, n_routed_experts, num_experts_per_tok, n, unique, reuse."""
    frame = pd.DataFrame(files.read_json(settings.root() / "data" / "reuse.json"))
    counts, chosen = frame["n_routed_experts"], frame["num_experts_per_tok"]
    return frame.assign(reuse=reuse(frame["unique"], counts, chosen, frame["n"]))


def reuse_curve(frame: pd.DataFrame) -> dict[int, float]:
    """n: reuse factor of experts.unique_by_window, as costmodel.StepModel takes it."""
    known = frame.dropna(subset="reuse")
    return dict(zip(known["n"].astype(int), known["reuse"].astype(float), strict=True))


def reuse_trend(frame: pd.DataFrame, ns: Iterable[int] = range(2, 17)) -> dict[int, tuple[float, float, float]]:
    """n: (low, mid, high) of a line in log n through the reuse factors of several models.

    Figures of different models at different n do not make a curve; the band is as wide as the farthest of them.
    """
    known = frame.dropna(subset="reuse")
    lengths, factors = np.log(known["n"].to_numpy(float)), known["reuse"].to_numpy(float)
    slope, level = np.polyfit(lengths, factors, 1)
    width = np.abs(factors - (level + slope * lengths)).max()
    middles = {int(n): level + slope * float(np.log(n)) for n in ns if n > 1}
    return {n: tuple(float(np.clip(r + w, 0, 1)) for w in (-width, 0, width)) for n, r in middles.items()}
