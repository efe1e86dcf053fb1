"""Swap a systemd service for a variant while an experiment runs, and have the original back whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from labkit import settings
from labkit.engine import holders, server, urls, variants
from labkit.engine.service import steps, systemd
from labkit.engine.service.plan import SwapPlan
from labkit.engine.service.state import ENDED, State, lock, now, runs
from labkit.errors import LabError
from labkit.progress import Waiting

POLL_S = 0.2


class SwapBusy(LabError):
    """Another swap of the service is under way."""


class SwapEnded(LabError):
    """A swap was ended from outside while the block ran."""


class GuardDied(LabError):
    """The process that watches over a swap was killed."""


class NoSwap(LabError):
    """There is no record of a swap of a service."""


KINDS: dict[str, type[LabError]] = {
    cls.__name__: cls
    for cls in (
        steps.SwapRefused,
        steps.VariantFailed,
        steps.PortHeld,
        steps.ProcessesStay,
        steps.NotRestored,
        holders.GpuMemoryHeld,
        systemd.CommandFailed,
        systemd.NoService,
    )
}


def swap(plan: SwapPlan, apply: bool = False) -> contextlib.AbstractContextManager[server.Server]:
    """A context in which the variant serves, instead of the original service; afterwards the original is back.

    Without `apply` the plan itself is returned, which shows what would be done. The original comes back after an
    error, Ctrl-C, SIGTERM, SIGHUP, kill -9 of this process, and when the variant does not start.
    Raises SwapRefused, SwapBusy, VariantFailed, PortHeld, GpuMemoryHeld, ProcessesStay, NotRestored, GuardDied;
    SwapEnded where somebody restored the original, before the block or in it.
    """
    return applied(plan) if apply else plan


@contextlib.contextmanager
def applied(plan: SwapPlan) -> Iterator[server.Server]:
    """The swap itself."""
    held = locked(plan.folder, plan.service)
    try:
        steps.room_for(plan)
        state = State(plan.folder)
        state.begin(plan)
        with signals_end_the_block():
            read_end, write_end = os.pipe()
            guard = None
            try:
                guard = start_guard(plan, read_end, held)
                os.close(read_end)
                wait_for(state, guard, f"swapping {plan.service} for {plan.unit}", ("ready", *ENDED))
                yield served(plan, state, guard)
                check_served(plan, state)
            finally:
                dismiss(write_end)
                if guard is not None:
                    finish(plan, state, guard)
    finally:
        os.close(held)


def dismiss(write_end: int) -> None:
    """Tell the guard that the block is over. It takes the pipe's end as such, too, which comes with our death, but
    not while a process that was forked in the block (a data loader's worker, say) holds the pipe open.
    """
    with contextlib.suppress(BrokenPipeError):  # the guard was killed
        os.write(write_end, b".")
    os.close(write_end)


def locked(folder: Path, service: str) -> int:
    """The service's lock; raises SwapBusy, naming who has it."""
    held = lock(folder)
    if held is None:
        state = State(folder).read()
        raise SwapBusy(
            f"a swap of {service} is under way: {state.get('phase', 'beginning')} "
            f"since {state.get('since', 'just now')}, by pid {state.get('owner', 'unknown')}",
            f"wait for it, or end it: labkit swap {service} --restore"
            if runs(state, "guard")
            else f"wait for it, or end that process: it puts {service} back",
        )
    return held


@contextlib.contextmanager
def signals_end_the_block() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit in the block, where they would end the process at once."""

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    mine = []
    if threading.current_thread() is threading.main_thread():
        mine = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def start_guard(plan: SwapPlan, read_end: int, held: int) -> subprocess.Popen[bytes]:
    """Start the guard in a session of its own; what it may have to say beyond the state file is in guard.log."""
    words = [sys.executable, "-m", "labkit.engine.service.guard", str(plan.folder), str(read_end), str(held)]
    with (plan.folder / "guard.log").open("wb") as log:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(read_end, held),
        )


def wait_for(state: State, guard: subprocess.Popen[bytes], what: str, phases: tuple[str, ...]) -> None:
    """Wait for a phase, the service's last log line beside the clock; returns also when the guard is gone."""
    waiting = Waiting(what)
    while True:
        gone = guard.poll() is not None
        seen = state.read()
        if gone or seen["phase"] in phases:
            waiting.done(seen["phase"])
            return
        waiting.line.set_postfix_str(f"{seen['phase']} {seen.get('progress', '')[-60:]}", refresh=False)
        waiting.tick()
        time.sleep(POLL_S)


def served(plan: SwapPlan, state: State, guard: subprocess.Popen[bytes]) -> server.Server:
    """The variant's server; raises what kept it from serving."""
    phase = state.read()["phase"]
    if phase != "ready":
        raise_stored(state)
        if phase in ENDED or guard.poll() is None:
            raise SwapEnded(
                f"the swap of {plan.service} for {plan.unit} was ended before the block began; it is {phase}",
                "nothing was measured: run it again",
            )
        raise GuardDied(
            f"the guard of the swap of {plan.service} ended before {plan.unit} served",
            f"the original was put back; {plan.folder / 'guard.log'} may say why",
        )
    base = urls.base_url(plan.url)
    names = server.models_at(base)
    return server.Server(
        base,
        names[0] if names else plan.model,
        plan.variant,
        variants.options_of(plan.variant, plan.options),
        Path(plan.log) if plan.log else None,
    )


def check_served(plan: SwapPlan, state: State) -> None:
    """Raise SwapEnded or VariantFailed unless the variant served to the end of the block.

    Without it, figures of the original would pass for the variant's.
    """
    phase = state.read().get("phase")
    if phase != "ready":
        raise SwapEnded(
            f"the swap of {plan.service} for {plan.unit} was ended while the block ran; it is {phase}",
            "what was measured is not the variant's alone: run it again",
        )
    if plan.manager.state(plan.unit) != "active":
        raise steps.failed(plan, plan.unit, "ended by itself")


def finish(plan: SwapPlan, state: State, guard: subprocess.Popen[bytes]) -> None:
    """Wait until the guard has put the original back, or do it here when the guard was killed."""
    wait_for(state, guard, f"putting {plan.service} back", ENDED)
    guard.wait()
    if state.read()["phase"] not in ENDED:
        steps.put_back(plan, state)
    elif state.read()["phase"] == "not restored":
        raise_stored(state)


def raise_stored(state: State) -> None:
    """Raise the error that the guard left in the state file, if there is one."""
    if stored := state.read().get("error"):
        raise KINDS.get(stored["kind"], steps.NotRestored)(stored["what"], stored["remedy"])


def folder_of(service: str) -> Path:
    """Where a service's swaps are recorded."""
    return settings.outputs() / "swaps" / systemd.unit_name(service).removesuffix(".service")


def recorded(service: str) -> tuple[SwapPlan, State]:
    """The last swap of a service; raises NoSwap."""
    state = State(folder_of(service))
    stored = state.read()
    if not stored:
        raise NoSwap(f"no swap of {service} is recorded in {state.path.parent}", "there is nothing to put back")
    return SwapPlan.of_json(stored["plan"]), state


def restore(service: str, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Put a service back after a swap that was cut off, or end one that is under way; returns its status.

    May be called at any time and repeated. Raises NoSwap, NotRestored, SwapBusy.
    """
    plan, state = recorded(service)
    held = lock(plan.folder)
    if held is None:
        stored = state.read()
        if not runs(stored, "guard"):
            held = locked(plan.folder, service)  # somebody restores already: say who
        else:
            say(f"asking the guard, pid {stored['guard']}, to put {plan.service} back")
            os.kill(stored["guard"], signal.SIGTERM)
            steps.wait_until(lambda: not runs(stored, "guard"), plan.load_limit_s, lambda: None)
            held = lock(plan.folder)
    try:
        if held is not None:
            steps.put_back(plan, state)
            state.note(error=None)
        elif state.read()["phase"] != "restored":
            raise_stored(state)
    finally:
        if held is not None:
            os.close(held)
    return status(service)


def status(service: str) -> dict[str, Any]:
    """How a service and its last swap are now: phase, both services' states, whether the address answers."""
    plan, state = recorded(service)
    stored = state.read()
    return {
        "service": plan.service,
        "phase": stored["phase"],
        "since": stored["since"],
        "now": now(),
        "original": plan.manager.state(plan.service),
        "variant": f"{plan.unit}: {plan.manager.state(plan.unit)}",
        "answers": server.answers(plan.url),
        "under_way": runs(stored, "owner") and stored["phase"] not in ENDED,
        "guard": stored.get("guard") if runs(stored, "guard") else None,
        "progress": stored.get("progress", ""),
        "error": (stored.get("error") or {}).get("what", ""),
        "folder": str(plan.folder),
    }
