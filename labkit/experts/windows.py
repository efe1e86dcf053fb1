"""How many different experts n consecutive tokens touch, measured and expected."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from labkit.experts import counting
from labkit.experts.expected import expected_unique, from_popularity, popularity, reuse
from labkit.experts.routing import BadRouting, Routing

BLOCKS = 20  # windows overlap, so intervals come from the means of this many stretches


def unique(routing: Any, n: int, documents: Any = None) -> np.ndarray:
    """Different experts of every run of n consecutive tokens, [windows, L]; none crosses a document.

    routing: a Routing, or an array or tensor [T, L, k] of expert indices with `documents` [T].
    """
    given = Routing.of(routing, documents=documents)
    check_windows([n])
    inside = starts(given, n)
    counts = np.empty((len(inside), len(given.layers)), np.uint16)

    def fill(place: int) -> None:
        counts[:, place] = counting.by_start(given.layer(place), given.bounds, given.num_experts, n)[inside]

    each_layer(fill, given)
    return counts


def each_layer(work: Callable[[int], Any], routing: Routing) -> list[Any]:
    """What `work` gives for each layer's place; layers side by side, for the counting releases the GIL."""
    with ThreadPoolExecutor(min(os.cpu_count() or 1, max(1, len(routing.layers)))) as pool:
        return list(pool.map(work, range(len(routing.layers))))


def check_windows(ns: Sequence[int]) -> None:
    """Raise BadRouting unless there are windows, each of a whole number of tokens."""
    if min(ns, default=0) < 1 or any(n != int(n) for n in ns):
        raise BadRouting(f"windows of {list(ns)} tokens", "count whole tokens, from 1")


def starts(routing: Routing, n: int) -> np.ndarray:
    """Where a run of n tokens may start so that it ends in the same context."""
    bounds = routing.bounds
    room = [np.arange(begin, end - n + 1) for begin, end in itertools.pairwise(bounds)]
    return np.concatenate(room) if room else np.zeros(0, np.intp)


def unique_table(routing: Any, num_experts: int | None = None, ns: Iterable[int] = range(1, 17)) -> pd.DataFrame:
    """A row a window length and layer: n, layer, unique_mean, low, high, uniform, popularity, reuse.

    low and high bound the mean with 95% confidence (batch means over BLOCKS stretches of the recording, since
    windows overlap); uniform and popularity are what independent choice would give. Lengths that no document
    holds are left out.
    """
    given = Routing.of(routing, num_experts)
    lengths, sums, windows = block_means(given, sorted(set(ns)))
    shares = popularity(given)
    rows = [
        {
            "n": n,
            "layer": layer,
            **interval(sums[i, :, at], windows[i]),
            "popularity": from_popularity(shares[at], n),
        }
        for i, n in enumerate(lengths)
        for at, layer in enumerate(given.layers)
    ]
    return with_uniform(pd.DataFrame(rows), given)


def unique_by_window(
    routing: Any, num_experts: int | None = None, ns: Iterable[int] = range(1, 17)
) -> pd.DataFrame:
    """As unique_table, the mean over layers: a row a window length, with its own interval."""
    given = Routing.of(routing, num_experts)
    lengths, sums, windows = block_means(given, sorted(set(ns)))
    shares = popularity(given)
    rows = [
        {"n": n, **interval(sums[i].mean(axis=1), windows[i]), "popularity": from_popularity(shares, n).mean()}
        for i, n in enumerate(lengths)
    ]
    return with_uniform(pd.DataFrame(rows), given)


def unique_by_category(routing: Routing, ns: Iterable[int] = (4,)) -> pd.DataFrame:
    """As unique_by_window, for each kind of text that was recorded: category and tokens come first."""
    if not routing.categories:
        raise BadRouting(f"{routing.source or 'the routing'} names no kinds of text", "use unique_by_window")
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


def block_means(routing: Routing, ns: Sequence[int]) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The lengths that fit, sums of unique experts [lengths, stretches, L] and windows [lengths, stretches].

    Stretches are equal parts of the recording; a window belongs to the one that it starts in.
    """
    check_windows(ns)
    tokens, longest = len(routing.experts), max(ns)
    bounds, width = routing.bounds, routing.num_experts
    found = each_layer(
        lambda place: counting.window_sums(routing.layer(place), bounds, width, longest, BLOCKS), routing
    )
    where = {n: starts(routing, n) * BLOCKS // max(1, tokens) for n in ns}
    fitting = [n for n in ns if len(where[n])]
    windows = np.stack([np.bincount(where[n], minlength=BLOCKS) for n in fitting]) if fitting else np.zeros((0, 1))
    return fitting, np.stack(found, axis=2).transpose(1, 0, 2)[fitting], windows


def interval(sums: np.ndarray, windows: np.ndarray) -> dict[str, float]:
    """The mean over all windows with its 95% interval from the means of stretches; NaN bounds from one stretch.

    By Student's t on the stretches' means, each weighing as much as it has windows.
    """
    held = windows > 0
    means, shares = sums[held] / windows[held], windows[held] / windows.sum()
    mean, count = float(sums.sum() / windows.sum()), int(held.sum())
    if count < 2:
        return {"unique_mean": mean, "low": np.nan, "high": np.nan}
    error = np.sqrt(count / (count - 1) * (shares**2 * (means - mean) ** 2).sum())
    half = stats.t.ppf(0.975, count - 1) * error
    return {"unique_mean": mean, "low": mean - half, "high": mean + half}
