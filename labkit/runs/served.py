"""The servers that a run was given by address, as they tell of themselves: whose figures these are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx

from labkit import files
from labkit.errors import LabError
from labkit.runs.scrub import Scrubber, of_settings
from labkit.settings import Settings

NAMES = ("server", "variant_server")
TOLD = ("model", "weights", "engine", "version", "max_model_len")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
Servers = dict[str, dict[str, Any]]  # parameter: address, and of TOLD what the server tells


def asked(chosen: Settings, before: Servers | None = None) -> Servers:
    """What each given server tells of itself now; of one that is away what `before` holds of the same address.

    Its address is stored without its host. Nothing is raised: a run does not fail for what only its page says.
    """
    found: Servers = {}
    for name in NAMES:
        url = str(getattr(chosen, name, "") or "")
        if not url:
            continue
        told = {"address": address(url), **identity(url, str(getattr(chosen, "model", "") or ""))}
        known = (before or {}).get(name)
        found[name] = dict(known) if "model" not in told and same(known, told) else told
    return found


def stored(path: Path) -> Servers:
    """The servers that a run.json names; empty where it does not, or is not there."""
    try:
        found = files.read_record(path)["provenance"]["servers"]
    except (LabError, OSError, LookupError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def changed(chosen: Settings) -> list[str]:
    """A line for each given server that answers and is another than the stage's run.json says."""
    before, lines = stored(chosen.folder / "run.json"), []
    for name, now in asked(chosen).items() if before else ():
        then = before.get(name)
        if "model" in now and same(then, now) and "model" in then and now != then:
            lines.append(f"{name} is now {in_words(now)}; measured was {in_words(then)}")
    return lines


def same(known: Any, told: dict[str, Any]) -> bool:
    """Whether an earlier word is of the same address."""
    return isinstance(known, dict) and known.get("address") == told["address"]


def identity(url: str, model: str) -> dict[str, Any]:
    """What one server tells (TOLD); empty where it is away. Paths are cut down to the name at their end."""
    from labkit.bench import conditions

    try:
        told = conditions.identity(url, model)
    except (LabError, httpx.HTTPError, ValueError):
        return {}
    length = told.get("max_model_len")
    found = {
        "model": named(told.get("id")),
        "weights": named(told.get("root")),
        "engine": clean(told.get("owned_by")),
        "version": clean(told.get("version")),
        "max_model_len": length if isinstance(length, int) else None,
    }
    return Scrubber().value({name: value for name, value in found.items() if value})


def address(url: str) -> str:
    """A server's address without its host, as results may hold it; empty for one that no server can have."""
    from labkit.engine import urls

    try:
        whole = urls.root_url(url)
    except LabError:
        return ""
    return Scrubber(of_settings({"server": whole})).text(whole)


def named(value: Any) -> str:
    """A model's name: of a path its last part, in a hub's cache the hub's name."""
    text = clean(value)
    if hub := re.search(r"models--([^/]+)", text):
        return hub.group(1).replace("--", "/")
    return text if HUB_NAME.fullmatch(text) else re.split(r"[\\/]", text.rstrip("\\/"))[-1]


def clean(value: Any) -> str:
    """A server's word as a short line; empty for what is none."""
    return "".join(c for c in value if c.isprintable())[:120] if isinstance(value, str) else ""


def in_words(told: dict[str, Any]) -> str:
    """A server in one line: model, address, engine with its version, and the longest context."""
    model, weights = str(told.get("model") or ""), str(told.get("weights") or "")
    name = model + (f" (weights {weights})" if weights and weights != model else "")
    place = f"at {told['address']}" if told.get("address") else ""
    if not model:
        return f"{place}; what it serves was not recorded".lstrip("; ")
    engine = f"{told.get('engine') or 'version'} {told['version']}" if told.get("version") else ""
    length = told.get("max_model_len")
    context = f"context up to {length:,} tokens" if isinstance(length, int) else ""
    return ", ".join(part for part in (f"{name} {place}".strip(), engine, context) if part)
