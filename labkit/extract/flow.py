"""Work on rows side by side: so many at a time, and no more than the disk has room for."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from labkit import files

MARGIN = 50_000_000  # bytes that stay free for logs, checkpoints and whoever else writes there
Work = Callable[[int], None]


class Room:
    """Whether the disks can take more: files under way count with all that they may still need."""

    def __init__(self, places: Sequence[Path], needs: Mapping[int, int]) -> None:
        """`places`: folders that are written to; `needs`: bytes that a row may take while it is under way."""
        self.places, self.needs = places, needs

    def short(self, rows: Sequence[int]) -> Path | None:
        """The first folder without room for these rows at once; None where there is room."""
        needed = sum(self.needs[row] for row in rows) + MARGIN
        return next((place for place in self.places if free(place) < needed), None)


def free(place: Path) -> int:
    """Bytes free where a folder is or will be."""
    return shutil.disk_usage(next(p for p in [place, *place.parents] if p.exists())).free


def side_by_side(rows: Sequence[int], work: Work, limit: int, room: Room) -> Iterator[int]:
    """Do `work(row)` for each row in order, at most `limit` at a time; yields each row as it is done.

    A row starts only while the disks have room for it and for those under way; with too little room it waits for
    them, and when none is left raises DiskFull. The first failure stops the rest and is raised.
    """
    pool = ThreadPoolExecutor(limit, thread_name_prefix="labkit-extract")
    running: dict[Future[None], int] = {}
    try:
        for number, row in enumerate(rows):
            while running and (len(running) >= limit or room.short([*running.values(), row])):
                yield from finished(running)
            place = room.short([row])
            if place is not None:
                raise files.disk_full(place, sum(room.needs[left] for left in rows[number:]))
            running[pool.submit(work, row)] = row
        while running:
            yield from finished(running)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def finished(running: dict[Future[None], int]) -> list[int]:
    """Wait until one or more are done, take them out and give their rows; raises what one of them raised."""
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    rows = [running.pop(future) for future in done]
    for future in done:
        future.result()
    return rows
