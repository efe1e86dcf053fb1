"""The same step, and the same collective, on every rank; how far their clocks are apart.

A collective ends on all ranks at once, so ends align clocks; what a rank's call takes longer than the fastest
rank's is waiting. (The definition of TraceLens and of Kineto's old plugin; facts/measuring.md 1a.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from labkit.trace.rank import Rank

MANY = 4096  # steps compared when ranks are aligned


@dataclass
class Matched:
    """For each collective of one rank, aligned with its Calls; NaN and -1 where it has no partner."""

    step: np.ndarray  # index into the rank's own steps, -1 outside of all
    transfer: np.ndarray  # ns: the shortest over the ranks
    wait: np.ndarray  # ns: the rest of this rank's call
    late: np.ndarray  # ns: latest start over the ranks minus own start, on aligned clocks
    call: np.ndarray  # number of the call within its step, the same on all ranks


def step_numbers(ranks: list[Rank]) -> tuple[list[np.ndarray], list[int]]:
    """For each rank a number for each of its steps, the same for the same step, and its clock's lead (ns)."""
    reference = max(range(len(ranks)), key=lambda i: len(ranks[i].steps))
    shifts, leads = [], []
    for rank in ranks:
        shift, lead = align(ranks[reference], rank)
        shifts.append(shift)
        leads.append(lead)
    first = min(shifts, default=0)
    return [np.arange(len(r.steps)) + s - first for r, s in zip(ranks, shifts, strict=True)], leads


def align(reference: Rank, rank: Rank) -> tuple[int, int]:
    """By how many steps `rank` began to record later than the reference, and by how many ns its clock leads.

    Of all shifts the one that leaves the most alike marks and the steadiest difference of the steps' ends: real
    steps differ in length, so only the right shift is steady. Where all are, the clocks decide.
    """
    theirs, ours = reference.steps, rank.steps
    if rank is reference or not len(theirs) or not len(ours):
        return 0, 0
    base = rank.base_ns - reference.base_ns
    end_a, end_b = theirs.end[:MANY], ours.end[:MANY] + base
    marks_a = [reference.names[i] if i >= 0 else "" for i in theirs.name[:MANY]]
    marks_b = [rank.names[i] if i >= 0 else "" for i in ours.name[:MANY]]
    codes = {mark: i for i, mark in enumerate(dict.fromkeys(marks_a + marks_b))}
    code_a, code_b = np.array([codes[m] for m in marks_a]), np.array([codes[m] for m in marks_b])
    best: tuple[float, ...] | None = None
    answer = (0, 0)
    typical = (float(np.median(np.diff(end_a))) if len(end_a) > 1 else 1e9) or 1.0  # 0 in a damaged trace
    for shift in range(-(len(end_b) - 1), len(end_a)):
        a0, b0 = max(0, shift), max(0, -shift)
        length = min(len(end_a) - a0, len(end_b) - b0)
        if length < min(len(end_a), len(end_b)) / 2:
            continue
        unlike = (code_a[a0 : a0 + length] != code_b[b0 : b0 + length]).mean()
        lead = end_b[b0 : b0 + length] - end_a[a0 : a0 + length]
        middle = float(np.median(lead))
        spread = float(np.median(np.abs(lead - middle)))
        near = min(abs(middle) / typical, 2.0)  # beyond two steps a nearer clock means nothing
        cost = (round(float(unlike), 2), round(spread / typical, 2), round(near, 2), -length)
        if best is None or cost < best:
            best, answer = cost, (shift, int(middle) - base)
    return answer


def in_steps(rank: Rank) -> np.ndarray:
    """The index of the step in which each collective of a rank starts; -1 outside of all."""
    if not len(rank.steps):
        return np.full(len(rank.calls), -1)
    step = np.searchsorted(rank.steps.start, rank.calls.start, "right") - 1
    return np.where((step >= 0) & (rank.calls.start < rank.steps.end[step]), step, -1)


def match(ranks: list[Rank], numbers: list[np.ndarray]) -> tuple[list[Matched], np.ndarray]:
    """Partners of every collective, step by step, and by how many ns each rank's clock leads the first one's.

    Transfer and wait stay NaN where a call has no partner.
    """
    steps = [in_steps(rank) for rank in ranks]
    results = [Matched(step, *np.full((3, len(step)), np.nan), call=np.full(len(step), -1)) for step in steps]
    members = [by_step(step, number) for step, number in zip(steps, numbers, strict=True)]
    labels = [label_of(rank) for rank in ranks]
    leads = clock_leads(ranks, members, labels)
    for number in sorted(set().union(*members)):
        here = [found.get(number, np.zeros(0, np.int64)) for found in members]
        match_step(ranks, here, labels, leads, results)
    return results, np.where(np.isnan(leads), 0, leads).astype(np.int64)


def clock_leads(ranks: list[Rank], members: list[dict[int, np.ndarray]], labels: list[np.ndarray]) -> np.ndarray:
    """Median lead (ns) of each rank's clock over the first's, from the steps in which both have the same calls."""
    leads = np.full(len(ranks), np.nan)
    leads[0] = 0
    for i in range(1, len(ranks)):
        apart = [
            ranks[i].calls.end[members[i][number]] - ranks[0].calls.end[ours]
            for number, ours in members[0].items()
            if number in members[i] and np.array_equal(labels[0][ours], labels[i][members[i][number]])
        ]
        if apart:
            leads[i] = np.median(np.concatenate(apart))
    return leads


def by_step(step: np.ndarray, numbers: np.ndarray) -> dict[int, np.ndarray]:
    """The collectives of each step, in order, by the step's number."""
    inside = np.flatnonzero(step >= 0)
    if not len(inside):
        return {}
    inside = inside[np.argsort(step[inside], kind="stable")]
    found, first = np.unique(step[inside], return_index=True)
    return {int(numbers[s]): part for s, part in zip(found, np.split(inside, first[1:]), strict=True)}


def match_step(
    ranks: list[Rank], here: list[np.ndarray], labels: list[np.ndarray], leads: np.ndarray, results: list[Matched]
) -> None:
    """Match the collectives of one step, `here` by rank, and fill in the results."""
    reference = max(range(len(here)), key=lambda i: len(here[i]))
    ours = here[reference]
    start, end = np.zeros((2, len(ranks), len(ours)), np.int64)
    index = np.full((len(ranks), len(ours)), -1)
    for i, theirs in enumerate(here):
        if not len(theirs):
            continue
        a, b = pair(
            ranks[reference], ours, labels[reference], ranks[i], theirs, labels[i], leads[i] - leads[reference]
        )
        index[i, a] = theirs[b]
        start[i, a], end[i, a] = ranks[i].calls.start[theirs[b]], ranks[i].calls.end[theirs[b]]
    known = index >= 0
    together = known.sum(0) >= 2
    lead = np.zeros(len(ranks), np.int64)  # of this step alone: clocks may drift
    for i in range(len(ranks)):
        if i != reference and (both := known[i] & together).any():
            lead[i] = int(np.median(end[i, both] - end[reference, both]))
    aligned = start - lead[:, None]
    shortest = np.where(known, end - start, np.iinfo(np.int64).max).min(0, initial=np.iinfo(np.int64).max)
    latest = np.where(known, aligned, np.iinfo(np.int64).min).max(0, initial=np.iinfo(np.int64).min)
    for i, result in enumerate(results):
        result.call[index[i, known[i]]] = np.flatnonzero(known[i])
        has = known[i] & together
        mine = index[i, has]
        result.transfer[mine] = shortest[has]
        result.wait[mine] = (end[i] - start[i] - shortest)[has]
        result.late[mine] = (latest - aligned[i])[has]


def label_of(rank: Rank) -> np.ndarray:
    """For each collective what has to be the same for two ranks' calls to be one: kind and group."""
    groups = np.array([hash(group) & 0x7FFFFFFF for group in rank.calls.groups] or [0])
    return rank.calls.kind.astype(np.int64) + 64 * groups[rank.calls.group]


def pair(
    a: Rank, ours: np.ndarray, label_a: np.ndarray, b: Rank, theirs: np.ndarray, label_b: np.ndarray, lead: float
) -> tuple[np.ndarray, np.ndarray]:
    """Positions of partners in `ours` and `theirs`: in order where both have the same calls, else by their ends.

    `lead` (ns) is b's clock over a's, NaN where unknown.
    """
    if np.array_equal(label_a[ours], label_b[theirs]):
        return np.arange(len(ours)), np.arange(len(ours))
    end_a, end_b = a.calls.end[ours], b.calls.end[theirs]
    edges = {int(end_b[i] - end_a[j]) for i in (0, -1) for j in (0, -1)}
    offsets = edges if np.isnan(lead) else {int(lead)}
    tried = [align_sequences(end_a, label_a[ours], end_b - offset, label_b[theirs]) for offset in sorted(offsets)]
    return min(tried, key=lambda found: found[0])[1]


def align_sequences(
    end_a: np.ndarray, label_a: np.ndarray, end_b: np.ndarray, label_b: np.ndarray
) -> tuple[float, tuple[np.ndarray, np.ndarray]]:
    """Cost and positions of the cheapest alignment; leaving a call out costs half a typical distance of ends."""
    n, m = len(end_a), len(end_b)
    ends = np.sort(end_a)
    skip = float(np.median(np.diff(ends))) / 2 if n > 1 else 1e6
    cost = np.abs(end_a[:, None] - end_b[None, :]).astype(float)
    cost[label_a[:, None] != label_b[None, :]] = np.inf
    table = np.full((n + 1, m + 1), np.inf)
    table[0] = np.arange(m + 1) * skip
    table[:, 0] = np.arange(n + 1) * skip
    move = np.zeros((n + 1, m + 1), np.int8)
    for i in range(1, n + 1):
        for j in range(1, m + 1):
            options = (table[i - 1, j - 1] + cost[i - 1, j - 1], table[i - 1, j] + skip, table[i, j - 1] + skip)
            move[i, j] = int(np.argmin(options))
            table[i, j] = options[move[i, j]]
    pairs, i, j = [], n, m
    while i and j:
        if move[i, j] == 0:
            pairs.append((i - 1, j - 1))
        i, j = i - (move[i, j] != 2), j - (move[i, j] != 1)
    positions = np.array(pairs[::-1], np.int64).reshape(-1, 2)
    return float(table[n, m]), (positions[:, 0], positions[:, 1])
