"""systemd through its own command: what a service is and does, and the commands that change it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

from labkit.engine import supervisor
from labkit.errors import LabError

QUERY_LIMIT_S = 30.0
PROPERTIES = ("LoadState", "ActiveState", "MainPID", "ControlGroup", "NeedDaemonReload", "RequiredBy", "BoundBy")
PROPERTIES += ("ConsistsOf", "TriggeredBy", "Job")


class NoService(LabError):
    """There is no such systemd service, or no systemd."""


class CommandFailed(LabError):
    """A command that changes a service did not succeed."""


Process = tuple[
    int, str
]  # id and start (supervisor.started), so that a later process with the same id is not taken for it


def runtime_dir(user: bool) -> Path:
    """Where units live that are gone after a reboot: with the variant's there, a reboot restores as well."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")) if user else Path("/run")
    return base / "systemd" / ("user" if user else "system")


def unit_name(service: str) -> str:
    """The name with its `.service`."""
    return service if service.endswith(".service") else f"{service}.service"


@dataclass(frozen=True)
class Manager:
    """How systemd is spoken to: `systemctl` as words (with sudo before it, say), the user's or the system's.

    Words before the last one (`sudo -n`) also go before the commands that install and remove the unit file.
    """

    systemctl: tuple[str, ...] = ("systemctl",)
    user: bool = False
    unit_dir: str = ""

    @property
    def folder(self) -> Path:
        """Where the variant's unit is put."""
        return Path(self.unit_dir) if self.unit_dir else runtime_dir(self.user)

    def words(self, *arguments: str) -> list[str]:
        """A systemctl command."""
        return [*self.systemctl, *(["--user"] if self.user else []), *arguments]

    def install(self, source: Path, unit: str) -> list[str]:
        """The command that puts a unit file where systemd finds it; it may hold keys: only its owner reads it."""
        return [*self.systemctl[:-1], "install", "-D", "-m", "0600", str(source), str(self.folder / unit)]

    def remove(self, unit: str) -> list[str]:
        """The command that takes the unit file away; no error where it is not there."""
        return [*self.systemctl[:-1], "rm", "-f", str(self.folder / unit)]

    def show(self, unit: str) -> dict[str, str]:
        """The properties the lab needs; raises NoService where systemctl does not answer."""
        words = self.words("show", "--no-pager", unit, f"--property={','.join(PROPERTIES)}")
        return dict(line.partition("=")[::2] for line in ask(words).splitlines() if "=" in line)

    def text(self, unit: str) -> str:
        """A unit's file with its drop-ins after it, which is how systemd reads them.

        From the unit directory that was named where the unit is there, else from systemd; raises NoService.
        """
        path = Path(self.unit_dir) / unit
        if self.unit_dir and path.is_file():
            dropins = sorted((path.parent / f"{unit}.d").glob("*.conf"), key=lambda each: each.name)
            return "\n".join(f"# {each}\n{each.read_text().rstrip()}\n" for each in (path, *dropins))
        return ask(self.words("cat", "--no-pager", unit))

    def state(self, unit: str) -> str:
        """active, activating, deactivating, inactive, failed; or not-found.

        One that waits for its turn to start (for a unit that it needs, say) is activating.
        """
        shown = self.show(unit)
        active = shown.get("ActiveState", "inactive")
        if active in ("inactive", "failed") and shown.get("Job", "0") not in ("", "0"):
            return "activating"
        return "not-found" if shown.get("LoadState") == "not-found" and active == "inactive" else active

    def processes(self, unit: str) -> list[Process]:
        """The service's processes, from its control group, else its main process and what that started."""
        shown = self.show(unit)
        group = shown.get("ControlGroup", "").strip("/")
        ids: set[int] = set()
        for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd") if group else ():
            for path in (Path(root) / group).glob("**/cgroup.procs"):
                with contextlib.suppress(OSError):  # a group below it that is gone by now
                    ids |= {int(pid) for pid in path.read_text().split()}
        main = int(shown.get("MainPID") or 0)
        return started([*ids, *supervisor.tree(main)])

    def journal(self, unit: str, lines: int = 400) -> str:
        """The end of the service's journal; empty where it cannot be read."""
        of = ["--user-unit", unit] if self.user else ["--unit", unit]
        for before in (self.systemctl[:-1], ()):
            try:
                return ask([*before, "journalctl", "--no-pager", "--output=cat", f"--lines={lines}", *of])
            except NoService:
                continue
        return ""


def started(ids: list[int]) -> list[Process]:
    """The processes of these ids that run, each once."""
    found = []
    for pid in dict.fromkeys(ids):
        try:
            found.append((pid, supervisor.started(pid)))
        except psutil.NoSuchProcess:
            continue
    return found


def ask(words: list[str]) -> str:
    """A query's output; raises NoService with what it said."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=QUERY_LIMIT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoService(
            f"{' '.join(words)} does not run: {error}", "is systemd there? --systemctl says how"
        ) from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise NoService(f"{' '.join(words)} ended with {done.returncode}: {said}", "check the service's name")
    return done.stdout


def act(words: list[str]) -> None:
    """Run a command that changes something; raises CommandFailed with what it said.

    It has no time limit: a service takes as long to stop as its own TimeoutStopSec lets it. In the guard, which
    has no threads, it dies with us, so that nothing is still being started after the one who wanted it is gone;
    beside threads (a notebook's kernel) Python code between fork and exec may hang for ever.
    """
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            preexec_fn=supervisor.die_with_parent if threading.active_count() == 1 else None,
        )
    except OSError as error:
        raise CommandFailed(f"{' '.join(words)} does not run: {error}", "check --systemctl") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise CommandFailed(
            f"{' '.join(words)} ended with {done.returncode}: {said}",
            "run it by hand; where rights are missing, use --user or --systemctl 'sudo -n systemctl'",
        )
