"""A stand-in for systemctl and systemd: starts and stops real processes from unit files. Own code, no labkit.

STANDIN is a folder: units/ (searched), state/ (a JSON file for each running service), on-stop (run after a stop).
As with systemd, a job goes on when the systemctl that asked for it is killed, the jobs of a unit come one after
the other, and what outlives SIGTERM for TimeoutStopSec gets SIGKILL. A session stands for a control group.
"""

import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HOME = Path(os.environ["STANDIN"])


def unit_text(unit: str) -> str | None:
    path = HOME / "units" / unit
    if not path.exists():
        return None
    parts = [path, *sorted((HOME / "units" / f"{unit}.d").glob("*.conf"))]
    return "\n".join(f"# {part}\n{part.read_text()}" for part in parts)


def value_of(text: str, key: str, default: str = "") -> str:
    found = re.findall(rf"^{key}=(.*)$", text.replace("\\\n", " "), re.MULTILINE)
    return found[-1] if found else default


def stat(pid: int | str) -> list[str]:
    """State, parent, group, session and so on of a process that runs; empty for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] == "Z" else fields


def born(pid: int) -> str | None:
    fields = stat(pid)
    return fields[19] if fields else None


def members(session: int) -> list[int]:
    ids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in ids if stat(pid)[3:4] == [str(session)]]


def record(unit: str) -> dict | None:
    path = HOME / "state" / unit
    return json.loads(path.read_text()) if path.exists() else None


def write(unit: str, known: dict) -> None:
    whole = HOME / "state" / f".{unit}.new"
    whole.write_text(json.dumps(known))
    whole.rename(HOME / "state" / unit)


def active(unit: str) -> str:
    known = record(unit)
    if known is None:
        return "inactive"
    if known.get("stopping"):
        return "deactivating"
    return "active" if born(known["pid"]) == known["born"] else "failed"


def lock_file(unit: str):
    return (HOME / "state" / f".{unit}.lock").open("w")


def taken(lock, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def job(work: Callable[[str], None], unit: str, *, wait: bool) -> None:
    """Do the work in a process of its own, after the unit's earlier jobs; it inherits the lock if it is free."""
    lock = lock_file(unit)
    taken(lock)
    if child := os.fork():
        if wait:
            os.waitpid(child, 0)
        return
    try:
        os.setsid()
        for descriptor in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        fcntl.flock(lock, fcntl.LOCK_EX)
        work(unit)
    finally:
        os._exit(0)


def start(unit: str) -> None:
    if active(unit) == "active":
        return
    text = unit_text(unit)
    environment = dict(os.environ)
    for line in re.findall(r"^Environment=(.*)$", text, re.MULTILINE):
        environment |= dict(word.partition("=")[::2] for word in shlex.split(line))
    with Path(value_of(text, "StandardOutput").removeprefix("append:")).open("ab") as log:
        process = subprocess.Popen(
            shlex.split(value_of(text, "ExecStart")),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    write(unit, {"pid": process.pid, "born": born(process.pid)})


def stop(unit: str) -> None:
    known = record(unit)
    if known and active(unit) == "active":
        write(unit, known | {"stopping": True})
        kill(known["pid"], unit_text(unit) or "")
    (HOME / "state" / unit).unlink(missing_ok=True)
    if (HOME / "on-stop").exists():
        subprocess.run([HOME / "on-stop", unit], check=True)


def kill(main: int, text: str) -> None:
    alone = value_of(text, "KillMode") == "process"
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + float(value_of(text, "TimeoutStopSec", "90"))
        while (left := [pid for pid in members(main) if pid == main or not alone]) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(0.02)


def show(unit: str) -> None:
    busy = taken(lock := lock_file(unit), fcntl.LOCK_SH)
    lock.close()
    load = "loaded" if unit_text(unit) is not None else "not-found"
    known = record(unit) or {}
    pid = known.get("pid", 0) if active(unit) in ("active", "deactivating") else 0
    print(f"LoadState={load}\nActiveState={active(unit)}\nMainPID={pid}\nControlGroup=")
    print(f"RequiredBy={os.environ.get('STANDIN_REQUIRED_BY', '')}")
    if busy:
        print("Job=1")


def main(arguments: list[str]) -> None:
    words = [word for word in arguments if not word.startswith("--")]
    verb, units = words[0], words[1:]
    with (HOME / "calls").open("a") as calls:
        calls.write(" ".join(words) + "\n")
    if verb == "show":
        show(units[0])
    elif verb == "cat":
        text = unit_text(units[0])
        sys.exit(f"No files found for {units[0]}.") if text is None else print(text)
    elif verb in ("start", "stop"):
        for unit in units:
            if unit_text(unit) is None and (verb == "start" or record(unit) is None):
                sys.exit(f"Failed to {verb} {unit}: Unit {unit} not found.")
            job(start if verb == "start" else stop, unit, wait="--no-block" not in arguments)
    elif verb == "reset-failed":
        for unit in units:
            (HOME / "state" / unit).unlink(missing_ok=True)
    elif verb != "daemon-reload":
        sys.exit(f"Unknown command verb {verb}.")


main(sys.argv[1:])
