"""A small process between the lab and a server: whatever ends, nothing of the server is left behind.

`python supervisor.py SPEC` reads a JSON spec (command, environment, owner process), starts the command and waits;
start it as the leader of a session of its own. It ends the server with every descendant when its owner is gone
(a notebook kernel killed with SIGKILL cannot clean up itself), on SIGTERM, or when the main process ends; engine
processes whose parent died are re-parented to the supervisor and so found. When the supervisor itself is killed
with SIGKILL, a sentinel that it forked ends what is left of its session.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# Looked up before any fork: in a forked child of a process with threads nothing may be imported or loaded.
PRCTL = ctypes.CDLL(None).prctl
POLL_S = 0.25
GRACE_S = 8.0


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies (Linux)."""
    PRCTL(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """In the child before exec: SIGKILL when its parent is killed."""
    PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def leave_sentinel() -> int:
    """Fork a process that sleeps until this one is gone, then ends the rest of its session; returns its id.

    It waits for the end of a pipe whose other end only we hold (the server's command does not inherit it).
    """
    session, ours = os.getsid(0), os.getpid()
    read_end, write_end = os.pipe()
    sentinel = os.fork()
    if sentinel:
        os.close(read_end)
        return sentinel
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.close(write_end)
    os.read(read_end, 1)
    if session == ours:  # else it is the session of somebody else
        end(lambda: members(session))
    os._exit(0)


def members(session: int) -> list[psutil.Process]:
    """The processes of a session, this one apart."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.pid != os.getpid():
                found += [process] if process.status() != psutil.STATUS_ZOMBIE else []
    return found


def ticks(pid: int) -> int:
    """When a process started, in the kernel's ticks since the boot; raises psutil.NoSuchProcess."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error
    return int(stat.rpartition(b")")[2].split()[19])


def started(pid: int) -> str:
    """What tells a process from a later one of its id: the boot, and the tick of its start.

    psutil's time of creation will not do: it moves when somebody sets the clock. Raises psutil.NoSuchProcess.
    """
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{ticks(pid)}"


def alive(pid: int, since: str) -> bool:
    """Whether the process that had this id and `started` still runs."""
    try:
        return started(pid) == since and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tree(pid: int) -> list[int]:
    """A process and all its descendants; none for 0 or a process that is gone."""
    try:
        top = psutil.Process(pid) if pid else None
        return [top.pid, *(child.pid for child in top.children(recursive=True))] if top else []
    except psutil.NoSuchProcess:
        return []


def end(processes: Callable[[], list[psutil.Process]]) -> None:
    """SIGTERM to all of these processes, SIGKILL to those that stay."""
    for how, patience in ((psutil.Process.terminate, GRACE_S), (psutil.Process.kill, GRACE_S)):
        rest = processes()
        for process in rest:
            with contextlib.suppress(psutil.NoSuchProcess):
                how(process)
        psutil.wait_procs(rest, timeout=patience)
        if not processes():
            return


def main(spec_path: str) -> int:
    """Run the spec's command until it, or its owner, ends; returns its exit code, 128 + n for signal n."""
    spec = json.loads(Path(spec_path).read_text())
    adopt_orphans()
    sentinel = leave_sentinel()
    stopping = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stopping.append(True))
    server = subprocess.Popen(spec["command"], env=os.environ | spec["environment"], preexec_fn=die_with_parent)
    try:
        while server.poll() is None and not stopping and alive(spec["owner"], spec["owner_started"]):
            time.sleep(POLL_S)
    finally:
        end(lambda: [each for each in psutil.Process().children(recursive=True) if each.pid != sentinel])
    code = server.poll() or 0
    return code if code >= 0 else 128 - code  # as a shell reports a signal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
