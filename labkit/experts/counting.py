"""Counting the experts of all windows in one pass: how long ago was an expert last used?

An assignment of an expert to token p is the first of that expert in a window exactly when the window starts after
the expert's last use. With the last use d tokens ago, that holds for the windows of n tokens that start in
p - min(n, d) + 1 .. p, so min(n, d) of them. One pass over a layer therefore serves every n; only near the ends of
a context and of a stretch are the windows that exist counted one length at a time.
"""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(nogil=True, cache=True)
def window_sums(experts: np.ndarray, bounds: np.ndarray, width: int, longest: int, blocks: int) -> np.ndarray:
    """Unique experts summed over the windows of n tokens that start in each stretch, [blocks, longest + 1].

    experts: [T, k] of one layer, below `width`. bounds: [contexts + 1] starts of contexts, and T; no window
    crosses one. Stretch j holds the starts s with s * blocks // T = j. Column n holds windows of n tokens.
    """
    tokens = experts.shape[0]
    last = np.full(width, -1, np.int64)
    distances = np.zeros((blocks, longest + 1), np.int64)
    sums = np.zeros((blocks, longest + 1), np.int64)
    for context in range(len(bounds) - 1):
        begin, end = bounds[context], bounds[context + 1]
        for p in range(begin, end):
            block, earliest = p * blocks // tokens, p - longest + 1
            inside = earliest >= begin and p + longest <= end and earliest * blocks // tokens == block
            for slot in range(experts.shape[1]):
                expert = experts[p, slot]
                ago = min(p - last[expert], longest) if last[expert] >= begin else longest
                last[expert] = p
                if inside:
                    distances[block, ago] += 1
                else:
                    add_by_length(sums, begin, end, p, ago, blocks, tokens)
    for block in range(blocks):
        for n in range(1, longest + 1):
            for ago in range(1, longest + 1):
                sums[block, n] += distances[block, ago] * min(n, ago)
    return sums


@numba.njit(nogil=True, cache=True)
def add_by_length(sums: np.ndarray, begin: int, end: int, p: int, ago: int, blocks: int, tokens: int) -> None:
    """Add what token p's assignment gives to the windows of each length that exist."""
    for n in range(1, sums.shape[1]):
        first, final = max(begin, p - min(n, ago) + 1), min(p, end - n)
        if first > final:
            continue
        block = first * blocks // tokens
        if block == final * blocks // tokens:
            sums[block, n] += final - first + 1
        else:
            for start in range(first, final + 1):
                sums[start * blocks // tokens, n] += 1


@numba.njit(nogil=True, cache=True)
def by_start(experts: np.ndarray, bounds: np.ndarray, width: int, n: int) -> np.ndarray:
    """Unique experts of the window of n tokens that starts at each token, [T]; 0 where none fits."""
    last = np.full(width, -1, np.int64)
    steps = np.zeros(experts.shape[0] + 1, np.int64)
    for context in range(len(bounds) - 1):
        begin, end = bounds[context], bounds[context + 1]
        for p in range(begin, end):
            for slot in range(experts.shape[1]):
                expert = experts[p, slot]
                ago = min(p - last[expert], n) if last[expert] >= begin else n
                last[expert] = p
                first, final = max(begin, p - ago + 1), min(p, end - n)
                if first <= final:
                    steps[first] += 1
                    steps[final + 1] -= 1
    return np.cumsum(steps)[:-1]


@numba.njit(nogil=True, cache=True)
def shared(experts: np.ndarray, bounds: np.ndarray, distance: int) -> int:
    """Pairs of equal experts of tokens `distance` apart in one context, summed over tokens."""
    found = 0
    for context in range(len(bounds) - 1):
        for p in range(bounds[context] + distance, bounds[context + 1]):
            for slot in range(experts.shape[1]):
                for other in range(experts.shape[1]):
                    found += experts[p, slot] == experts[p - distance, other]
    return found
