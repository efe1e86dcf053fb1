"""Who holds a port or a GPU's memory, and waiting until a stopped server has given its memory back."""

from __future__ import annotations

import csv
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

from labkit.errors import LabError

TOLERANCE_MIB = 512  # a driver's context comes and goes
MEMORY_LIMIT_S = 120.0
POLL_S = 0.5
Memory = dict[int, int]  # MiB in use by GPU index


class GpuMemoryHeld(LabError):
    """A GPU's memory is not back where it was before the server that ended."""


@dataclass(frozen=True)
class Holder:
    """A process that holds something; `pid` None where the system does not say which."""

    pid: int | None
    command: str = ""
    user: str = ""
    mib: int = 0

    def __str__(self) -> str:
        memory = f", {self.mib} MiB" if self.mib else ""
        if self.pid is None:
            return "a process of another user (run as root to see which)"
        return f"pid {self.pid} ({self.command or 'command unknown'}; user {self.user or 'unknown'}{memory})"


def holder(pid: int | None, mib: int = 0) -> Holder:
    """Who a process is, as far as we may see it."""
    if pid is None:
        return Holder(None)
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline()) or process.name()
        return Holder(pid, command[:200], process.username(), mib)
    except psutil.Error:
        return Holder(pid, mib=mib)


def of_port(port: int) -> list[Holder]:
    """The processes that listen on a TCP port of this machine, on any address."""
    found = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
    }
    return [holder(pid) for pid in found]


def ask(query: str) -> list[list[str]]:
    """Rows of an nvidia-smi query; none where there is no nvidia-smi or it does not answer."""
    words = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines())]
    return rows if done.returncode == 0 else []


def used() -> Memory:
    """MiB in use on each GPU; empty without GPUs."""
    return {int(row[0]): int(row[1]) for row in ask("--query-gpu=index,memory.used") if row[-1].isdigit()}


def of_memory() -> list[tuple[int, Holder]]:
    """(GPU index, process) for each process that computes on a GPU."""
    index = {uuid: int(number) for number, uuid in ask("--query-gpu=index,uuid")}
    rows = [row for row in ask("--query-compute-apps=gpu_uuid,pid,used_memory") if len(row) == 3]
    return [
        (index[uuid], holder(int(pid), int(mib) if mib.isdigit() else 0))
        for uuid, pid, mib in rows
        if uuid in index
    ]


def without(pids: Iterable[int]) -> Memory:
    """MiB that will be in use on each GPU when these processes are gone; empty without GPUs."""
    going, left = set(pids), used()
    for gpu, process in of_memory() if left else []:
        if process.pid in going:
            left[gpu] -= process.mib
    return left


def wait_back(
    expected: Memory, limit_s: float = MEMORY_LIMIT_S, *, asked_to_stop: Callable[[], None] = lambda: None
) -> None:
    """Wait until no GPU uses more than `expected`, nor frees memory still; raises GpuMemoryHeld, naming who."""
    deadline, before = time.monotonic() + limit_s, dict[int, int]()
    while expected:
        now = used()
        over = [gpu for gpu, mib in now.items() if mib > expected.get(gpu, mib) + TOLERANCE_MIB]
        falling = any(before.get(gpu, mib) - mib > TOLERANCE_MIB for gpu, mib in now.items())
        if before and not over and not falling:
            return
        if over and time.monotonic() > deadline:
            raise held(over[0], now[over[0]], expected[over[0]], limit_s)
        before = now
        asked_to_stop()
        time.sleep(POLL_S)


def held(gpu: int, mib: int, expected: int, limit_s: float) -> GpuMemoryHeld:
    """The error for memory that did not come back."""
    names = (
        "; ".join(str(process) for index, process in of_memory() if index == gpu) or "no process that can be seen"
    )
    return GpuMemoryHeld(
        f"GPU {gpu} uses {mib} MiB, {limit_s:.0f} s after its server ended; {expected} MiB were expected. "
        f"On it: {names}",
        "the lab ends no process that it did not start: end that one, or wait for it, then run again",
    )


class Between:
    """What the last server of this process has to have given back before the next one starts."""

    def __init__(self) -> None:
        """Nothing to wait for yet."""
        self.expected: Memory = {}

    def leaving(self, pids: Iterable[int]) -> None:
        """Call before these processes are ended."""
        self.expected = without(pids)

    def settle(self) -> None:
        """Wait until the memory is back; raises GpuMemoryHeld, once."""
        expected, self.expected = self.expected, {}
        wait_back(expected, MEMORY_LIMIT_S)
