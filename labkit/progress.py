"""Progress of long steps: one text line that is rewritten, in a terminal, in JupyterLab and headless alike."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


class Alone(tqdm):
    """tqdm without its watching thread: who waits for a server also forks, which is unsafe beside threads."""

    monitor_interval = 0


def bar(
    description: str, total: int | None = None, unit: str = "it", kind: type[tqdm] = tqdm, **options: Any
) -> tqdm:
    """A tqdm text bar for a step of `total` units; a widget's state would be lost in a headless run."""
    return kind(
        desc=description,
        total=total,
        unit=unit,
        file=sys.stdout,
        mininterval=1.0,
        ncols=100,
        dynamic_ncols=False,
        leave=True,
        **options,
    )


def progress(iterable: Iterable[Item], description: str, total: int | None = None) -> Iterable[Item]:
    """Iterate with a progress bar."""
    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)
    with bar(description, total) as line:
        for item in iterable:
            yield item
            line.update()


class Waiting:
    """A line that shows how long something has been waited for: call `tick()` in the waiting loop."""

    def __init__(self, description: str) -> None:
        """Show the line at once."""
        self.started = time.monotonic()
        self.line = bar(description, kind=Alone, bar_format="{desc}: {elapsed}{postfix}")

    @property
    def seconds(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self.started

    def tick(self) -> None:
        """Rewrite the line when a second has passed."""
        self.line.update()

    def done(self, word: str) -> None:
        """End the line with a word."""
        self.line.set_postfix_str(word)
        self.line.close()
