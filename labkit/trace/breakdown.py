"""Where the time of each step goes: every instant is given to one category, so that the parts add up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from labkit.trace import names
from labkit.trace.calls import KINDS
from labkit.trace.matching import Matched
from labkit.trace.rank import Rank

INDEX = {name: i for i, name in enumerate(names.CATEGORIES)}
COMMUNICATION = [INDEX[name] for name in (*names.ALLREDUCE, names.OTHER_COMM)]
FOREVER = 1 << 61  # ns: idle lasts from here to the first activity and from the last one on


@dataclass
class Line:
    """A rank's time line: boundaries (ns), the category that owns each stretch between two, whether comm runs."""

    edge: np.ndarray
    owner: np.ndarray  # [edges]: from this edge to the next
    communicating: np.ndarray  # [edges]: whether any collective runs, hidden or not

    def spent(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Time of each category in each window: [windows, categories], ns. Idle is counted like the others."""
        length = np.diff(self.edge, append=self.edge[-1])
        parts = [self.between(length * (self.owner == c), start, end) for c in range(len(names.CATEGORIES))]
        return np.stack(parts, axis=1)

    def hidden(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Communication under compute in each window, ns."""
        length = np.diff(self.edge, append=self.edge[-1])
        return self.between(length * (self.communicating & ~np.isin(self.owner, COMMUNICATION)), start, end)

    def gaps(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Idle time between the first and the last activity of each window, ns: waiting for the next launch."""
        busy = np.flatnonzero(self.owner != INDEX[names.IDLE])
        if not len(busy):
            return np.zeros(len(start), np.int64)
        stops = self.edge[np.minimum(busy + 1, len(self.edge) - 1)]
        after, before = np.searchsorted(stops, start, "right"), np.searchsorted(self.edge[busy], end, "left") - 1
        some = after <= before
        first = np.maximum(self.edge[busy[np.minimum(after, len(busy) - 1)]], start)
        last = np.minimum(stops[np.maximum(before, 0)], end)
        length = np.diff(self.edge, append=self.edge[-1]) * (self.owner == INDEX[names.IDLE])
        return np.where(some, self.between(length, first, np.maximum(last, first)), 0)

    def between(self, length: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Sum over [start, end) of what `length` gives each stretch; windows may begin inside a stretch."""
        total = np.concatenate(([0], np.cumsum(length)))
        return self.at(total, length, end) - self.at(total, length, start)

    def at(self, total: np.ndarray, length: np.ndarray, time: np.ndarray) -> np.ndarray:
        """The running sum at a time."""
        i = np.clip(np.searchsorted(self.edge, time, "right") - 1, 0, len(self.edge) - 1)
        into = np.clip(time - self.edge[i], 0, None)
        return total[i] + np.where(length[i] > 0, np.minimum(into, length[i]), 0)


def line(rank: Rank, matched: Matched) -> Line:
    """Sweep over a rank's activities and collectives. An AllReduce waits first and transfers then."""
    start, end, category = intervals(rank, matched)
    order = np.argsort(start, kind="stable")
    start, end, category = start[order], end[order], category[order]
    if (start[1:] >= end[:-1]).all():
        return in_turn(start, end, category)
    edge = np.unique(np.concatenate((start, end, (-FOREVER, FOREVER))))
    owner = np.full(len(edge), INDEX[names.IDLE], np.int8)
    communicating = np.zeros(len(edge), bool)
    first, last = np.searchsorted(edge, start), np.searchsorted(edge, end)
    for c in sorted(set(category.tolist()), reverse=True):  # the strongest claim last, so that it stays
        mine = category == c
        change = np.bincount(first[mine], minlength=len(edge)) - np.bincount(last[mine], minlength=len(edge))
        active = np.cumsum(change) > 0
        owner[active] = c
        if c in COMMUNICATION:
            communicating |= active
    return Line(edge, owner, communicating)


def in_turn(start: np.ndarray, end: np.ndarray, category: np.ndarray) -> Line:
    """The time line of intervals of which no two overlap, as on one stream or one thread: nothing to decide."""
    edge = np.concatenate(((-FOREVER,), np.stack((start, end), axis=1).ravel(), (FOREVER,)))
    owner = np.full(len(edge), INDEX[names.IDLE], np.int8)
    owner[1:-1:2] = category
    return Line(edge, owner, np.isin(owner, COMMUNICATION))


def intervals(rank: Rank, matched: Matched) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(start, end, category) of everything that ran, AllReduces in two parts where the wait is known."""
    calls = rank.calls
    reduces = calls.kind == KINDS.index("AllReduce")
    known = reduces & ~np.isnan(matched.wait)
    turn = calls.start + np.where(known, matched.wait, 0).astype(np.int64)
    parts = [
        (rank.start, rank.end, rank.category),
        (calls.start[known], turn[known], INDEX[names.WAIT]),
        (turn[known], calls.end[known], INDEX[names.TRANSFER]),
        (calls.start[reduces & ~known], calls.end[reduces & ~known], INDEX[names.UNSPLIT]),
        (calls.start[~reduces], calls.end[~reduces], INDEX[names.OTHER_COMM]),
    ]
    starts, ends = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
    kinds = np.concatenate([np.broadcast_to(part[2], part[0].shape) for part in parts]).astype(np.int64)
    some = ends > starts
    return starts[some], ends[some], kinds[some]
