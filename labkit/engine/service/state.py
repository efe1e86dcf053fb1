"""How far a swap is: one JSON file, written whole, and one lock that both the lab and the guard hold."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
from pathlib import Path
from typing import Any

from labkit import files
from labkit.engine import supervisor
from labkit.engine.service.plan import SwapPlan
from labkit.errors import LabError

# begun, installing, stopping, starting: on the way; ready: the variant serves; restoring; restored, not restored
ENDED = ("restored", "not restored")


class State:
    """The state file of one service's swap; every change is on disk when the call returns."""

    def __init__(self, folder: Path) -> None:
        """The folder that is the service's in outputs/swaps."""
        self.path = folder / "state.json"

    def read(self) -> dict[str, Any]:
        """What is written; empty before the first swap."""
        return files.read_json(self.path) if self.path.exists() else {}

    def begin(self, plan: SwapPlan) -> None:
        """A new swap by this process."""
        owner = {"owner": os.getpid(), "owner_started": supervisor.started(os.getpid())}
        fresh = {"phase": "begun", "since": now(), **owner}
        files.write_json(self.path, fresh | {"error": None, "history": [["begun", now()]], "plan": plan.as_json()})

    def note(self, phase: str = "", *, must: bool = False, **more: Any) -> None:
        """Write a new phase, or more about the present one.

        A full disk or a broken file must not keep the original away: what cannot be written is passed over, but
        where it `must` be there, as somebody waits for it.
        """
        with contextlib.nullcontext() if must else contextlib.suppress(LabError, OSError):
            state = self.read()
            if phase and phase != state.get("phase"):
                state |= {"phase": phase, "since": now()}
                state["history"] = [*state.get("history", []), [phase, now()]]
            files.write_json(self.path, state | more)


def now() -> str:
    """The time, to the second, with its zone."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def lock(folder: Path) -> int | None:
    """The descriptor of the service's lock, or None where another swap has it.

    The lock belongs to the open file, so the guard that inherits the descriptor keeps it when the lab is killed,
    and the system drops it when both are gone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def runs(state: dict[str, Any], who: str) -> bool:
    """Whether the process that the state names as `owner` or `guard` still runs."""
    pid = state.get(who)
    return bool(pid) and supervisor.alive(pid, state[f"{who}_started"])
