"""The guard of a swap: a process in its own session that swaps, waits for the lab to end, and puts back.

`python -m labkit.engine.service.guard FOLDER PIPE LOCK`. It alone changes the system, so whatever happens to the
lab, at whatever moment, one process knows how far things are. PIPE is the read end of a pipe that the lab holds
open: a byte means that the lab is done, end of file that it is done or dead. LOCK is the inherited descriptor of
the service's lock.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

from labkit.engine import supervisor
from labkit.engine.service import steps
from labkit.engine.service.plan import SwapPlan
from labkit.engine.service.state import State, runs
from labkit.engine.service.systemd import CommandFailed, NoService
from labkit.errors import LabError

POLL_S = 0.25
ATTEMPTS, PAUSE_S = 3, 5.0
asked: list[int] = []  # signals that asked for the end


def main(folder: str, pipe: int) -> int:
    """Carry the swap in `folder` through; 0 when the original is back."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: asked.append(received))
    state = State(Path(folder))
    state.note(guard=os.getpid(), guard_started=supervisor.started(os.getpid()), must=True)
    stored = state.read()
    plan = SwapPlan.of_json(stored["plan"])

    def ask() -> None:
        if asked or select.select([pipe], [], [], 0)[0] or not runs(stored, "owner"):
            raise steps.Enough

    try:
        ask()
        steps.apply(plan, state, ask)
        while True:
            ask()
            time.sleep(POLL_S)
    except steps.Enough:
        pass
    except Exception as error:  # whatever it is, the original has to come back first
        with contextlib.suppress(Exception):  # even when it cannot be written down
            note_error(state, error)
    return restore(plan, state)


def restore(plan: SwapPlan, state: State) -> int:
    """Put the original back; 1, with the reason in the state, when that fails. A busy systemd is asked again."""
    for attempt in range(ATTEMPTS):
        try:
            steps.put_back(plan, state)
            return 0
        except steps.NotRestored as error:
            if attempt + 1 == ATTEMPTS or not isinstance(error.__cause__, (CommandFailed, NoService)):
                note_error(state, error)
                return 1
        time.sleep(PAUSE_S)
    return 1


def note_error(state: State, error: Exception) -> None:
    """What happened, as the state file holds it: the lab raises it again. An earlier failure stays named."""
    what = error.what if isinstance(error, LabError) else f"{type(error).__name__}: {error}"
    if earlier := state.read().get("error"):
        what = f"{what}\n(before that, {earlier['kind']}: {earlier['what']})"
    state.note(error={"kind": type(error).__name__, "what": what, "remedy": getattr(error, "remedy", "")})


if __name__ == "__main__":
    os.chdir("/")
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
