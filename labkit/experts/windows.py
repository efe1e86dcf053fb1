"""How many different experts n consecutive tokens touch, measured and expected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from labkit import files, settings
from labkit.experts.routing import BadRouting, Routing

WORD = 64
BLOCKS = 20  # windows overlap, so intervals come from the means of this many stretches


def unique(routing: Any, n: int, documents: Any = None) -> np.ndarray:
    """Different experts of every run of n consecutive tokens, [windows, L]; none crosses a document.

    routing: a Routing, or an array or tensor [T, L, k] of expert indices with `documents` [T].
    """
    given = Routing.of(routing, documents=documents)
    check_windows([n])
    inside = starts(given, n)
    counts = np.zeros((len(inside), len(given.layers)), np.uint16)
    for layer in range(len(given.layers) if len(inside) else 0):
        for _length, count in sliding(bitset(given, layer), [n]):
            counts[:, layer] = count[inside]
    return counts


def check_windows(ns: Iterable[int]) -> None:
    """Raise BadRouting for a window below one token."""
    if min(ns, default=0) < 1:
        raise BadRouting(f"windows of {list(ns)} tokens", "count tokens from 1")


def starts(routing: Routing, n: int) -> np.ndarray:
    """Where a run of n tokens may start so that it ends in the same context."""
    contexts = routing.contexts
    if n > len(contexts):
        return np.zeros(0, np.intp)
    return np.flatnonzero(contexts[: len(contexts) - n + 1] == contexts[n - 1 :])


def bitset(routing: Routing, layer: int) -> np.ndarray:
    """[words, T] the experts of each token in one layer, a bit an expert."""
    tokens = np.arange(len(routing.experts))
    bits = np.zeros((max(1, -(-routing.num_experts // WORD)), len(tokens)), np.uint64)
    for slot in range(routing.chosen):
        expert = routing.experts[:, layer, slot].astype(np.uint64)
        bits[expert // WORD, tokens] |= np.uint64(1) << (expert % np.uint64(WORD))
    return bits


def sliding(bits: np.ndarray, ns: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """(n, experts set in the union of n consecutive columns [T - n + 1]) for each of `ns`, ascending.

    The union for n tokens is that for n - 1 with one more column, so the longest window costs no more than
    all of them; a layer of a million tokens needs twice its bits, 100 MB for 384 experts.
    """
    union = bits.copy()
    for n in range(1, min(max(ns), bits.shape[1]) + 1):
        if n > 1:
            union = union[:, :-1]
            union |= bits[:, n - 1 :]
        if n in ns:
            yield n, np.bitwise_count(union).sum(axis=0, dtype=np.uint16)


def expected_unique(num_experts: float, chosen: float, n: Any) -> Any:
    """Experts that n tokens touch if each chose at random: N (1 - (1 - k/N)^n)."""
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


def overlap(routing: Any, documents: Any = None) -> np.ndarray:
    """[L] share of a token's experts that the token before it used, too."""
    given = Routing.of(routing, documents=documents)
    return 2 - unique(given, 2).mean(axis=0) / given.chosen


def unique_table(routing: Any, num_experts: int | None = None, ns: Iterable[int] = range(1, 17)) -> pd.DataFrame:
    """A row a window length and layer: n, layer, unique_mean, low, high, uniform, popularity, reuse.

    low and high bound the mean with 95% confidence (batch means over BLOCKS stretches of the recording, since
    windows overlap); uniform and popularity are what independent choice would give. Lengths that no document
    holds are left out.
    """
    given = Routing.of(routing, num_experts)
    lengths, means = block_means(given, sorted(set(ns)))
    shares = popularity(given)
    rows = [
        {"n": n, "layer": layer, **interval(means[i, :, at]), "popularity": from_popularity(shares[at], n)}
        for i, n in enumerate(lengths)
        for at, layer in enumerate(given.layers)
    ]
    return with_uniform(pd.DataFrame(rows), given)


def unique_by_window(
    routing: Any, num_experts: int | None = None, ns: Iterable[int] = range(1, 17)
) -> pd.DataFrame:
    """As unique_table, the mean over layers: a row a window length, with its own interval."""
    given = Routing.of(routing, num_experts)
    lengths, means = block_means(given, sorted(set(ns)))
    shares = popularity(given)
    rows = [
        {"n": n, **interval(means[i].mean(axis=1)), "popularity": from_popularity(shares, n).mean()}
        for i, n in enumerate(lengths)
    ]
    return with_uniform(pd.DataFrame(rows), given)


def unique_by_category(routing: Routing, ns: Iterable[int] = (4,)) -> pd.DataFrame:
    """As unique_by_window, for each kind of text that was recorded: category and tokens come first."""
    frames = []
    for category in dict.fromkeys(routing.categories):
        part = routing.of_category(category)
        frame = unique_by_window(part, ns=ns)
        frame.insert(0, "category", category)
        frame.insert(1, "tokens", len(part.experts))
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def with_uniform(frame: pd.DataFrame, routing: Routing) -> pd.DataFrame:
    """The frame with the uniform expectation and the reuse factor beside the measured mean."""
    if frame.empty:
        raise BadRouting(f"no document of {len(routing.experts)} tokens holds such a window", "record more text")
    frame["uniform"] = expected_unique(routing.num_experts, routing.chosen, frame["n"])
    frame["reuse"] = reuse(frame["unique_mean"], routing.num_experts, routing.chosen, frame["n"])
    return frame


def block_means(routing: Routing, ns: Sequence[int]) -> tuple[list[int], np.ndarray]:
    """The lengths that fit and the mean of each stretch of windows, [lengths, stretches, L]."""
    check_windows(ns)
    inside = {n: starts(routing, n) for n in ns if n <= len(routing.experts)}
    fitting = [n for n, where in inside.items() if len(where)]
    stretches = max(1, min(BLOCKS, *(len(inside[n]) for n in fitting))) if fitting else 1
    means = np.empty((len(fitting), stretches, len(routing.layers)))
    for layer in range(len(routing.layers) if fitting else 0):
        for n, count in sliding(bitset(routing, layer), fitting):
            parts = np.array_split(count[inside[n]], stretches)
            means[fitting.index(n), :, layer] = [part.mean() for part in parts]
    return fitting, means


def interval(means: np.ndarray) -> dict[str, float]:
    """The mean of batch means with its 95% interval by Student's t; NaN bounds from one batch."""
    mean, count = float(means.mean()), len(means)
    if count < 2:
        return {"unique_mean": mean, "low": np.nan, "high": np.nan}
    half = stats.t.ppf(0.975, count - 1) * means.std(ddof=1) / count**0.5
    return {"unique_mean": mean, "low": mean - half, "high": mean + half}


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
