"""A run.json in words: the command, the parameters, versions and hardware."""

from __future__ import annotations

import shlex
from typing import Any

from labkit.runs import served
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


def servers(record: dict[str, Any], *, places: bool = True) -> dict[str, str]:
    """parameter: the server in words, for each that the stage was given by address; without `places` no address.

    Runs of earlier versions know the address alone.
    """
    known = part(record["provenance"], "servers")
    found = {}
    for name in served.NAMES:
        if given := record["settings"].get(name):
            told = known.get(name)
            told = dict(told) if isinstance(told, dict) and told.get("address") else {"address": str(given)}
            found[name] = served.in_words(told if places else told | {"address": ""})
    return found


def subjects(found: list[dict[str, Any]]) -> list[str]:
    """Whose figures a run has, a line each: targets served here, servers given by address, and the machine."""
    here, asking = [r for r in found if not servers(r)], [r for r in found if servers(r)]
    where = machine(found[-1]["provenance"])
    if not asking:
        return [f"{targets(here)}. {where}."]
    lines = [f"{targets(here)} in {names(here)}."] if here else []
    told = {(role, text): None for record in asking for role, text in servers(record).items()}
    lines += [f"{ROLES[role]}: {text}." for role, text in told]
    what = "served the target and asked the servers" if here else "asked, not the one that served"
    return [*lines, f"The machine that {what}: {where}."]


def targets(found: list[dict[str, Any]]) -> str:
    """The targets of some stages."""
    return "Target " + ", ".join(dict.fromkeys(str(record["settings"].get("target")) for record in found))


def names(found: list[dict[str, Any]]) -> str:
    """The notebooks of some stages."""
    return ", ".join(record["notebook"] for record in found)


ROLES = {"server": "Measured server", "variant_server": "Measured server that speculates"}


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


def compared(one: dict[str, Any], other: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """The conditions of two records that a comparison looks at: of servers given by address their own as well.

    The machine that asked them is called the client: what it has installed served nothing, and it is not compared
    with one that served the target itself.
    """
    asked = bool(servers(one)), bool(servers(other))
    return conditions_among(one, asked), conditions_among(other, asked)


def conditions_among(record: dict[str, Any], asked: tuple[bool, bool]) -> dict[str, str]:
    """The conditions of one record of a comparison, in which these asked servers by address."""
    own = conditions(record["provenance"])
    if not any(asked):
        return own
    lab = {name: value for name, value in own.items() if name in ("commit of the lab", "labkit")}
    client = (
        {f"{name} of the client": value for name, value in own.items() if name not in lab} if all(asked) else {}
    )
    known = part(record["provenance"], "servers")
    tell = {name: text for name, text in servers(record, places=False).items() if part(known, name).get("model")}
    return {f"what {name} told": text for name, text in tell.items()} | client | lab


HARDWARE = {"processor": "cpu", "cores": "cores", "memory (GB)": "memory_gb"}


def part(provenance: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of the provenance, empty where it is missing or no mapping."""
    value = provenance.get(name)
    return value if isinstance(value, dict) else {}
