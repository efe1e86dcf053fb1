"""A stand-in for systemctl: starts and stops real processes from unit files. Own code, own parser, no labkit.

STANDIN is a folder: units/ (searched), state/ (a JSON file for each running service), on-stop (run after a stop).
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

HOME = Path(os.environ["STANDIN"])


def unit_text(unit: str) -> str | None:
    path = HOME / "units" / unit
    if not path.exists():
        return None
    parts = [path, *sorted((HOME / "units" / f"{unit}.d").glob("*.conf"))]
    return "\n".join(f"# {part}\n{part.read_text()}" for part in parts)


def value_of(text: str, key: str) -> str:
    found = re.findall(rf"^{key}=(.*)$", text.replace("\\\n", " "), re.MULTILINE)
    return found[-1] if found else ""


def born(pid: int) -> str | None:
    """The start time of a process that runs; None for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def record(unit: str) -> dict | None:
    path = HOME / "state" / unit
    return json.loads(path.read_text()) if path.exists() else None


def active(unit: str) -> str:
    known = record(unit)
    if known is None:
        return "inactive"
    return "active" if born(known["pid"]) == known["born"] else "failed"


def start(unit: str) -> None:
    if active(unit) == "active":
        return
    text = unit_text(unit)
    if text is None:
        sys.exit(f"Failed to start {unit}: Unit {unit} not found.")
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
    whole = HOME / "state" / f".{unit}.new"
    whole.write_text(json.dumps({"pid": process.pid, "born": born(process.pid)}))
    whole.rename(HOME / "state" / unit)


def stop(unit: str) -> None:
    known = record(unit)
    if known is None and unit_text(unit) is None:
        sys.exit(f"Failed to stop {unit}: Unit {unit} not loaded.")
    if known and active(unit) == "active":
        os.kill(known["pid"], signal.SIGTERM)
        while active(unit) == "active":
            time.sleep(0.02)
    (HOME / "state" / unit).unlink(missing_ok=True)
    if (HOME / "on-stop").exists():
        subprocess.run([HOME / "on-stop", unit], check=True)


def main(words: list[str]) -> None:
    words = [word for word in words if not word.startswith("--")]
    verb, units = words[0], words[1:]
    with (HOME / "calls").open("a") as calls:
        calls.write(" ".join(words) + "\n")
    if verb == "show":
        load = "loaded" if unit_text(units[0]) is not None else "not-found"
        pid = (record(units[0]) or {}).get("pid", 0) if active(units[0]) == "active" else 0
        print(f"LoadState={load}\nActiveState={active(units[0])}\nMainPID={pid}\nControlGroup=")
        print(f"RequiredBy={os.environ.get('STANDIN_REQUIRED_BY', '')}")
    elif verb == "cat":
        text = unit_text(units[0])
        sys.exit(f"No files found for {units[0]}.") if text is None else print(text)
    elif verb in ("start", "stop"):
        for unit in units:
            (start if verb == "start" else stop)(unit)
    elif verb == "reset-failed":
        for unit in units:
            (HOME / "state" / unit).unlink(missing_ok=True)
    elif verb != "daemon-reload":
        sys.exit(f"Unknown command verb {verb}.")


main(sys.argv[1:])
