"""The steps of a swap: stop the original, start the variant, put the original back. The guard runs them.

Each waits for what it needs and says in the state file what it waits for. Nothing here ends a process by itself:
services are stopped and started through systemctl alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from labkit.engine import diagnosis, holders, supervisor
from labkit.engine.server import answers
from labkit.engine.service.plan import SwapPlan
from labkit.engine.service.state import State
from labkit.engine.service.systemd import CommandFailed, Process, act
from labkit.errors import LabError

POLL_S = 0.25


class SwapRefused(LabError):
    """A swap that was not begun, as it could not end well."""


class VariantFailed(LabError):
    """The variant's service did not come up."""


class PortHeld(LabError):
    """Somebody else listens on the service's port."""


class ProcessesStay(LabError):
    """A stopped service's processes are still there."""


class NotRestored(LabError):
    """The original service is not back."""


class Enough(Exception):
    """The swap is to end: the lab is gone, done, or asked for it."""


Ask = Callable[[], None]  # raises Enough when the swap is to end


def wait_until(done: Callable[[], bool], limit_s: float, ask: Ask) -> bool:
    """Poll until `done`; False when the time is over."""
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            return False
        ask()
        time.sleep(POLL_S)
    return True


def apply(plan: SwapPlan, state: State, ask: Ask) -> None:
    """From the serving original to the serving variant; whatever it raises, `put_back` has to follow."""
    state.note("installing")
    for words in plan.to_install():
        act(words)
    if plan.manager.state(plan.unit) == "not-found":
        raise SwapRefused(
            f"systemd does not find {plan.unit} in {plan.manager.folder}", "name a folder it searches: --unit-dir"
        )
    ask()
    processes = plan.manager.processes(plan.service)
    expected = holders.without(pid for pid, _ in processes)
    stop, start = plan.to_start()
    state.note("stopping", memory=expected)
    act(stop)
    wait_free(plan, processes, expected, ask)
    state.note("starting")
    began = uptime()
    act(start)
    wait_serving(plan, state, plan.unit, began, ask)
    state.note("ready", must=True)


def wait_free(plan: SwapPlan, processes: list[Process], expected: holders.Memory, ask: Ask) -> None:
    """Wait until a stopped service's processes, GPU memory and port are free.

    Raises ProcessesStay, GpuMemoryHeld or PortHeld, naming who holds them.
    """

    def left() -> list[int]:
        return [pid for pid, started in processes if supervisor.alive(pid, started)]

    if not wait_until(lambda: not left(), plan.patience_s, ask):
        raise ProcessesStay(
            f"still there after systemctl stop: {'; '.join(str(holders.holder(pid)) for pid in left())}",
            "the lab ends no process that it did not start; look at KillMode= of the unit",
        )
    holders.wait_back(expected, plan.patience_s, asked_to_stop=ask)
    if not wait_until(lambda: not holders.of_port(plan.port), min(plan.patience_s, 10.0), ask):
        raise port_held(plan, holders.of_port(plan.port))


def port_held(plan: SwapPlan, who: list[holders.Holder]) -> PortHeld:
    """The error for a port that somebody else has."""
    return PortHeld(
        f"port {plan.port} of {plan.service} is held by {'; '.join(map(str, who)) or 'a process gone by now'}",
        "the lab ends no process that it did not start: end that one yourself, then run again",
    )


def strangers(plan: SwapPlan, began: float) -> list[holders.Holder]:
    """Listeners on the port that were there before the service was started (at `began`, of `uptime`)."""
    return [who for who in holders.of_port(plan.port) if who.pid is not None and older(who.pid, began)]


def uptime() -> float:
    """Seconds since the boot: a time that nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def older(pid: int, began: float) -> bool:
    """Whether a process started clearly before a time of `uptime`."""
    try:
        return supervisor.ticks(pid) / os.sysconf("SC_CLK_TCK") < began - 1.0
    except psutil.NoSuchProcess:
        return False


def wait_serving(plan: SwapPlan, state: State, unit: str, began: float, ask: Ask) -> None:
    """Wait until a started service answers, its log's last line in the state file meanwhile.

    Raises VariantFailed (with the log's end) when it ends or takes too long, PortHeld for somebody else's answer.
    """
    seen, waited = "", time.monotonic()

    def serving() -> bool:
        nonlocal seen
        active = plan.manager.state(unit)
        if active in ("failed", "inactive", "not-found"):
            raise failed(plan, unit, f"ended while starting ({active}) after {time.monotonic() - waited:.0f} s")
        last = log_end(plan, unit, 1)
        if last != seen:
            seen = last
            state.note(progress=last[-200:])
        if active != "active" or not answers(plan.url):
            return False
        if strangers(plan, began):
            raise port_held(plan, strangers(plan, began))
        return True

    if not wait_until(serving, plan.load_limit_s, ask):
        raise failed(plan, unit, f"did not answer within {plan.load_limit_s:.0f} s")


def log_end(plan: SwapPlan, unit: str, lines: int) -> str:
    """The end of a service's log: of its file, else of the journal."""
    path = plan.log if unit == plan.unit else plan.original_log
    if path:
        return diagnosis.tail(Path(path), lines)
    return "\n".join(plan.manager.journal(unit, lines).splitlines()[-lines:])


def failed(plan: SwapPlan, unit: str, what: str) -> VariantFailed:
    """The error for a variant (or the original) that did not come up; its log is kept in the swap's folder."""
    log = keep_log(plan, unit)
    reason, remedy = diagnosis.cause(log)
    said = f"\nThe end of its log ({log}):\n{diagnosis.tail(log)}"
    return VariantFailed(f"{unit} {what}. Likely cause: {reason}.{said}", remedy)


def keep_log(plan: SwapPlan, unit: str) -> Path:
    """Copy the end of a service's log into the swap's folder, where it outlives unit and journal."""
    path = plan.folder / f"{unit.removesuffix('.service')}.log"
    with contextlib.suppress(OSError):  # a full disk must not keep the original from coming back
        path.write_text(log_end(plan, unit, 400) + "\n")
    return path


def put_back(plan: SwapPlan, state: State) -> None:
    """Stop the variant, remove its unit, start the original, wait until it answers. May be repeated at any time.

    Raises NotRestored, with what is in the way and the command that goes on from there.
    """
    state.note("restoring")
    try:
        stop_variant(plan)
        began = 0.0  # one that runs already is no stranger, however old
        if plan.manager.state(plan.service) not in ("active", "activating"):
            wait_for_port(plan)
            began = uptime()
            start_original(plan)
        wait_original(plan, state, began)
    except Exception as error:  # whatever it is, the state has to say that the original is not back
        what = error.what if isinstance(error, LabError) else f"{type(error).__name__}: {error}"
        state.note("not restored")
        raise NotRestored(
            f"{plan.service} is not back: {what}",
            f"{getattr(error, 'remedy', '')}\n  then: labkit swap {plan.service} --restore".lstrip(),
        ) from error
    state.note("restored")


def stop_variant(plan: SwapPlan) -> None:
    """The variant's service is stopped and unknown to systemd again; its memory and processes are gone."""
    stop, remove, reload = plan.to_restore()[:3]
    if plan.manager.state(plan.unit) not in ("not-found", "inactive", "failed"):
        processes = plan.manager.processes(plan.unit)
        expected = holders.without(pid for pid, _ in processes)
        keep_log(plan, plan.unit)
        act(stop)
        wait_until(lambda: not any(supervisor.alive(*each) for each in processes), plan.patience_s, lambda: None)
        try:
            holders.wait_back(expected, plan.patience_s)
        except holders.GpuMemoryHeld as error:  # the original is started all the same: it may well fit
            State(plan.folder).note(progress=error.what)
    act(remove)
    act(reload)
    if plan.manager.state(plan.unit) == "failed":
        act(plan.manager.words("reset-failed", plan.unit))


def wait_for_port(plan: SwapPlan) -> None:
    """Give whoever listens on the port a moment to go; the original is started all the same after that."""
    wait_until(lambda: not holders.of_port(plan.port), min(plan.patience_s, 10.0), lambda: None)


def start_original(plan: SwapPlan) -> None:
    """Start the original and what stopped with it; again where systemd refuses a start for its rate."""
    for words in plan.to_restore()[3:]:
        try:
            act(words)
        except CommandFailed:
            act(plan.manager.words("reset-failed", plan.service))
            act(words)


def wait_original(plan: SwapPlan, state: State, began: float) -> None:
    """Wait until the original itself answers; raises PortHeld for a stranger on its port, VariantFailed else."""
    since = time.monotonic()

    def in_the_way() -> None:
        if time.monotonic() - since > min(plan.patience_s, 30.0) and (who := strangers(plan, began)):
            raise port_held(plan, who)

    try:
        wait_serving(plan, state, plan.service, began, in_the_way)
    except VariantFailed as error:
        if who := strangers(plan, began):
            raise port_held(plan, who) from error
        raise


def room_for(plan: SwapPlan) -> None:
    """Raise SwapRefused unless the original serves and the programs that the swap needs are there."""
    active = plan.manager.state(plan.service)
    if active != "active":
        raise SwapRefused(
            f"{plan.service} is {active}, not active",
            f"start it first; if a swap was cut off: labkit swap {plan.service} --restore",
        )
    known = plan.manager.state(plan.unit)
    if known != "not-found":  # the lab's own, of a swap that was cut off, or somebody's, which is not overwritten
        raise SwapRefused(
            f"there is a {plan.unit} already ({known})",
            f"if a swap was cut off: labkit swap {plan.service} --restore; else rename or remove that unit",
        )
    if not answers(plan.url):
        raise SwapRefused(f"{plan.service} does not answer at {plan.url}/health", "give its address: --url")
    if shutil.which("install") is None:
        raise SwapRefused("the command `install` is missing", "install coreutils")
