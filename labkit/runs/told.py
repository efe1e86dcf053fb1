"""A run.json in words: the command, the parameters, versions and hardware."""

from __future__ import annotations

import shlex
from typing import Any

from labkit.settings import NOTEBOOKS
from labkit.settings.base import BadParameter


def command(record: dict[str, Any]) -> str:
    """The command that gives this stage again: as it was run, else from the settings that are not the scale's."""
    executed = record.get("executed")
    if isinstance(executed, dict) and isinstance(executed.get("command"), str):
        return executed["command"]
    values, notebook = record["settings"], record["notebook"]
    given = {name: value for name, value in values.items() if name != "run_id" and value != plain(record, name)}
    words = [f"-p {name}={shlex.quote(str(value))}" for name, value in given.items()]
    return " ".join(["labkit run", notebook[:2], "--run-id", shlex.quote(str(values.get("run_id", ""))), *words])


def plain(record: dict[str, Any], name: str) -> Any:
    """What a parameter is where only the scale is given; None of one that this version does not know."""
    try:
        settings = NOTEBOOKS[record["notebook"]].of({"scale": record["settings"].get("scale", "demo")})
    except BadParameter:
        return None
    return "demo" if name == "scale" else getattr(settings, name, None)


def machine(provenance: dict[str, Any]) -> str:
    """The hardware in words."""
    hardware = part(provenance, "hardware")
    gpus = (
        ", ".join(str(gpu.get("name")) for gpu in hardware.get("gpus") or [] if isinstance(gpu, dict)) or "no GPU"
    )
    known = [hardware.get(name, "?") for name in ("cores", "cpu", "memory_gb")]
    return f"{known[0]} cores of {known[1]}, {known[2]} GB, {gpus}"


def versions(provenance: dict[str, Any]) -> str:
    """Packages, Python and commit in one line."""
    packages = ", ".join(f"{name} {version}" for name, version in part(provenance, "packages").items())
    return f"{packages}; Python {provenance.get('python', '?')}; commit {commit(provenance)}"


def commit(provenance: dict[str, Any]) -> str:
    """The commit, and whether files differed from it."""
    source = part(provenance, "source")
    return (str(source.get("commit") or "")[:10] or "no git") + (
        " with local changes" if source.get("dirty") else ""
    )


def conditions(provenance: dict[str, Any]) -> dict[str, str]:
    """What the results depend on besides the settings, one line each: machine, system, versions."""
    hardware = part(provenance, "hardware")
    found = {name: str(hardware[key]) for name, key in HARDWARE.items() if key in hardware}
    gpus = [gpu for gpu in hardware.get("gpus") or [] if isinstance(gpu, dict)]
    found["GPUs"] = ", ".join(" ".join(map(str, gpu.values())) for gpu in gpus) or "none"
    found |= {"system": str(provenance.get("system", "?")), "Python": str(provenance.get("python", "?"))}
    found |= {str(name): str(version) for name, version in part(provenance, "packages").items()}
    return found | {"commit of the lab": commit(provenance)}


HARDWARE = {"processor": "cpu", "cores": "cores", "memory (GB)": "memory_gb"}


def part(provenance: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of the provenance, empty where it is missing or no mapping."""
    value = provenance.get(name)
    return value if isinstance(value, dict) else {}
