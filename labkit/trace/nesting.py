"""Operators nest on a CPU: each instant belongs to the innermost one, and is counted once."""

from __future__ import annotations

import numpy as np

from labkit.trace import names
from labkit.trace.calls import Calls
from labkit.trace.parse import Events


def main_lane(events: Events, marked: int) -> int:
    """The thread that runs the model: the one with the step markers, else the busiest; -1 where there is none."""
    if marked >= 0:
        return marked
    operators = events.of_category("cpu_op")
    if not operators.any():
        return -1
    return int(np.bincount(events.lane[operators], weights=events.dur[operators]).argmax())


def own_time(events: Events, lane: int, calls: Calls, category: np.ndarray) -> tuple[np.ndarray, ...]:
    """What ran on a thread: (start, end, name, category, first) of stretches that do not overlap, in order.

    `first` marks an operator's first stretch, so that operators can be counted.

    `category` by name. What runs inside attention, MoE or sampling is part of it; what runs inside a collective is
    left out, because the collective is counted whole.
    """
    overhead = names.CATEGORIES.index(names.OVERHEAD)
    wrappers = events.of_category("user_annotation") & (category[events.name] == overhead)
    mine = np.flatnonzero((events.of_category("cpu_op") | wrappers) & (events.lane == lane))
    mine = mine[np.lexsort((-events.dur[mine], events.start[mine]))]
    kind = category[events.name[mine]].astype(np.int64)
    kind[np.isin(mine, calls.event)] = COLLECTIVE
    owner, start, end, kinds = sweep(events.start[mine], events.start[mine] + events.dur[mine], kind)
    keep = kinds != COLLECTIVE
    first = np.zeros(len(owner), bool)
    first[np.unique(owner, return_index=True)[1]] = True
    return start[keep], end[keep], events.name[mine[owner[keep]]], kinds[keep], first[keep]


COLLECTIVE = -1
STRONG = frozenset((COLLECTIVE, *(names.CATEGORIES.index(name) for name in names.STRONG)))


def sweep(start: np.ndarray, end: np.ndarray, kind: np.ndarray) -> tuple[np.ndarray, ...]:
    """Own time of nested intervals, sorted by start, longest first: owner, start, end, kind of each stretch."""
    owners: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    stack: list[int] = []
    until = end.tolist()
    kinds = kind.tolist()
    cursor = -(1 << 62)

    def emit(owner: int, stop: int) -> None:
        nonlocal cursor
        if stop > cursor:
            owners.append(owner)
            starts.append(cursor)
            ends.append(stop)
            cursor = stop

    for i, begin in enumerate(start.tolist()):
        while stack and until[stack[-1]] <= begin:
            done = stack.pop()
            emit(done, until[done])
        if stack:
            parent = stack[-1]
            emit(parent, begin)
            until[i] = min(until[i], until[parent])  # rounding can make a child end after its parent
            if kinds[parent] in STRONG:
                kinds[i] = kinds[parent]
        cursor = max(cursor, begin)
        stack.append(i)
    while stack:
        done = stack.pop()
        emit(done, until[done])
    owner = np.array(owners, np.int64)
    return owner, np.array(starts, np.int64), np.array(ends, np.int64), np.array(kinds, np.int64)[owner]
