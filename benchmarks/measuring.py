"""A program run in a process of its own: how long it took by its own clock, and the memory of its process tree."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

EVERY_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """What a program reported on its last line, and its peak memory (PSS of all its processes)."""

    report: dict[str, Any]
    peak_mb: float

    @property
    def seconds(self) -> float:
        """The time that it measured itself: imports are not in it."""
        return float(self.report["seconds"])


@dataclass
class Sampler:
    """Samples the memory of a process and its descendants until told to stop."""

    pid: int
    peak: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Sample until done."""
        while not self.done.wait(EVERY_S):
            self.peak = max(self.peak, self.now())

    def now(self) -> int:
        """Bytes at this moment; pages that processes share count once."""
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    total += process.memory_full_info().pss
        return total


def run(command: Sequence[str], environment: dict[str, str]) -> Outcome:
    """Run a program whose last line of output is a JSON object with `seconds`; raises RuntimeError otherwise."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        sampler = Sampler(process.pid)
        thread = threading.Thread(target=sampler.run)
        thread.start()
        try:
            out, err = process.communicate()
        finally:  # an interrupt, too: a thread that nobody stops keeps the interpreter alive
            sampler.done.set()
            thread.join()
    lines = out.strip().splitlines()
    if process.returncode or not lines:
        raise RuntimeError(f"{command[:3]} ended with {process.returncode}:\n{err[-2000:]}")
    return Outcome(json.loads(lines[-1]), sampler.peak / 1e6)


def spread(values: Sequence[float]) -> str:
    """Median, and the range where there are several."""
    reach = f" [{min(values):.2f}, {max(values):.2f}]" if len(values) > 1 else ""
    return f"{statistics.median(values):.2f}{reach}"
