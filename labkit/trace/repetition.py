"""Steps of a trace without markers: a decode loop repeats itself, down to the order of its kernels."""

from __future__ import annotations

import numpy as np

from labkit.trace.calls import Calls
from labkit.trace.steps import Windows

LONGEST = 1 << 16  # entries from which the repetition is told
CERTAIN = 0.8  # share of the labels, or of the groups, that has to agree


def from_repetition(start: np.ndarray, end: np.ndarray, name: np.ndarray, calls: Calls) -> tuple[Windows, str]:
    """The steps that repeat, and a sentence on how they were told. No steps where nothing repeats."""
    begin, stop = np.concatenate((start, calls.start)), np.concatenate((end, calls.end))
    label = np.concatenate((name, -1 - calls.kind.astype(np.int64)))
    order = np.argsort(begin, kind="stable")
    begin, stop, label = begin[order], stop[order], label[order]
    gap = np.append(0, begin[1:] - np.maximum.accumulate(stop)[:-1])
    length, score = period(label[:LONGEST])
    groups = by_gaps(gap)
    if groups is not None and (score < CERTAIN or groups[1] % length == 0):
        first, length = groups
        how = "the pauses between them"
    elif score >= CERTAIN and length > 1:
        first = by_labels(label, gap, length)
        how = "the repetition of the kernels"
    else:
        return empty(), "and nothing repeats, so there are no steps"
    last = first + length - 1
    if not len(first):
        return empty(), "and nothing repeats, so there are no steps"
    latest = np.array([stop[a : b + 1].max() for a, b in zip(first, last, strict=True)])
    found = Windows(begin[first], latest, np.full(len(first), -1, np.int64))
    return found, f"{len(first)} steps were told apart by {how} and are taken for decode steps"


def empty() -> Windows:
    """No steps."""
    nothing = np.zeros(0, np.int64)
    return Windows(nothing, nothing, nothing)


def period(label: np.ndarray) -> tuple[int, float]:
    """The shortest lag at which the sequence repeats, and how well (0..1), every label counting the same.

    Counting labels alike matters: the layers of a model repeat too, but embedding, final norm and sampling, once a
    step each, do not fit their lag. Matches at all lags come from one autocorrelation a label.
    """
    total = len(label)
    _, code, counts = np.unique(label, return_inverse=True, return_counts=True)
    frequent = np.flatnonzero(counts >= 3)
    if total < 6 or not len(frequent):
        return 1, 0.0
    size = 1 << (2 * total - 1).bit_length()
    score = np.zeros(total // 2 + 1)
    for value in frequent[:256]:
        spectrum = np.fft.rfft(code == value, size)
        matches = np.fft.irfft(spectrum * spectrum.conj(), size)[: len(score)]
        seen = np.cumsum(code == value)
        pairs = seen[-1] - np.concatenate(([0], seen))[: len(score)]  # occurrences that could match at this lag
        score += matches / np.maximum(pairs, 1)
    score /= min(len(frequent), 256)
    score[0] = 0
    best = float(score.max())
    return int(np.argmax(score >= 0.95 * best)), best


def by_gaps(gap: np.ndarray) -> tuple[np.ndarray, int] | None:
    """First entries and size of groups that long pauses separate, where nearly all have the same size."""
    positive = np.sort(gap[1:][gap[1:] > 0])
    if len(positive) < 3:
        return None
    ratio = positive[1:] / positive[:-1]
    for cut in np.argsort(-ratio)[:8]:
        if ratio[cut] < 1.5:
            break
        first = np.append(0, np.flatnonzero(gap > positive[cut]))
        sizes = np.diff(np.append(first, len(gap)))
        inner = sizes[1:-1] if len(sizes) > 3 else sizes
        common = int(np.bincount(inner).argmax())
        if len(first) >= 3 and common > 1 and (inner == common).mean() >= CERTAIN:
            return first[sizes == common], common
    return None


def by_labels(label: np.ndarray, gap: np.ndarray, length: int) -> np.ndarray:
    """First entries of the periods, cut where the pause is longest; periods of another length are left out."""
    values, counts = np.unique(label, return_counts=True)
    anchor = values[np.argmin(np.abs(counts - len(label) / length))]  # a label that comes once a step
    at = np.flatnonzero(label == anchor)
    at = at[:-1][np.diff(at) == length]
    if not len(at):
        return at
    shifts = np.arange(length)
    inside = at[:, None] + shifts[None, :]
    shift = int(np.median(gap[inside], axis=0).argmax())
    first = at + shift
    if shift:  # the first period may begin before the first anchor
        before = first[0] - length
        first = np.append(before, first) if before >= 0 else first
    return first[first + length <= len(label)]
