"""The order of training: which conversations share an optimiser step, and which process takes which of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from labkit.train.batches import Sample

Item = TypeVar("Item")
AHEAD = 3  # batches that wait ready-made


def plan(samples: Sequence[Sample], batch_tokens: int, *, seed: int | None) -> list[list[Sample]]:
    """Groups of conversations of at most `batch_tokens` tokens (a longer one goes alone), shuffled by `seed`."""
    order = np.arange(len(samples)) if seed is None else np.random.default_rng(seed).permutation(len(samples))
    groups: list[list[Sample]] = []
    room = 0
    for index in order:
        sample = samples[int(index)]
        if not groups or sample.tokens > room:
            groups.append([])
            room = batch_tokens
        groups[-1].append(sample)
        room -= sample.tokens
    return groups


def shares(group: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """The group in `parts` parts of about as many tokens, the longest placed first; some may be empty.

    The group is the same on every machine, so one process and eight train on the same conversations at a step.
    """
    taken: list[list[int]] = [[] for _ in range(parts)]
    load = [0] * parts
    for index in sorted(range(len(group)), key=lambda i: -group[i].tokens):
        least = load.index(min(load))
        taken[least].append(index)
        load[least] += group[index].tokens
    return [[group[index] for index in sorted(part)] for part in taken]


class Ahead(Iterator[Item]):
    """Makes the items of an iterable in a thread of its own, a few ahead; `close` ends it."""

    def __init__(self, items: Iterable[Item], depth: int = AHEAD) -> None:
        """Start making items at once."""
        self.made: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.work, args=(items,), name="labkit-batches", daemon=True)
        self.thread.start()

    def work(self, items: Iterable[Item]) -> None:
        """Make items until all are made, one fails or nobody wants them."""
        try:
            for item in items:
                if not self.put("item", item):
                    return
            self.put("end", None)
        except BaseException as error:  # whatever it is belongs to the one who waits
            self.put("error", error)

    def put(self, kind: str, value: Any) -> bool:
        """Hand on; False once nobody wants it."""
        while not self.stop.is_set():
            try:
                self.made.put((kind, value), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __next__(self) -> Item:
        kind, value = self.made.get()
        if kind == "item":
            return value
        self.close()
        raise StopIteration if kind == "end" else value

    def close(self) -> None:
        """Stop making items."""
        self.stop.set()
        self.thread.join()
