"""Measure a serving variant once: rows are saved as soon as they are there and used again while they fit.

`<folder>/measured/<name>-<digest>.parquet` are rows of a whole measurement; beside it, while one runs or after it
was interrupted, `<name>-<digest>.jsonl` holds the rows that there are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from labkit import engine, files, targets
from labkit.bench import attached
from labkit.bench.conditions import attached_digest, fingerprint
from labkit.bench.journal import Journal
from labkit.bench.rows import frame, typed
from labkit.bench.run import MeasurementFailed, run
from labkit.engine import OnDemand, Server


def measure(
    folder: Path,
    name: str,
    digest: str,
    run_it: Callable[[], pd.DataFrame],
    *,
    also: Iterable[Path] = (),
) -> pd.DataFrame:
    """The rows of variant `name`: those on disk that fit `digest` (in `folder` or `also`), else measured now.

    Rows go to disk before anything else happens, each as it ends where `run_it` keeps `journal_of` its folder,
    name and digest. Rows with failed requests, also those of a MeasurementFailed, are kept as
    <name>-incomplete.parquet; the next time only what failed or is missing is measured.
    """
    file = f"{name}-{digest}.parquet"
    forced = os.environ.get("LABKIT_FORCE")  # `labkit run --force` measures again
    for place in () if forced else (folder, *also):
        if (place / "measured" / file).exists():
            return files.read_parquet(place / "measured" / file)
    incomplete = folder / "measured" / f"{name}-incomplete.parquet"
    journal = journal_of(folder, name, digest)
    if forced:
        journal.discard()
    try:
        rows = run_it()
    except MeasurementFailed as error:
        files.write_parquet(incomplete, error.rows)
        raise
    complete = bool(rows["error"].isna().all())
    files.write_parquet(folder / "measured" / file if complete else incomplete, rows)
    if complete:
        incomplete.unlink(missing_ok=True)
        journal.discard()
    return rows


def journal_of(folder: Path, name: str, digest: str) -> Journal:
    """Where the rows of a measurement go while it runs."""
    return Journal(folder / "measured" / f"{name}-{digest}.jsonl")


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
    also = list(also)
    fits = fingerprint(settings, variant, prompts, url=url, **options)
    if url:
        fits = attached_digest([settings.folder, *also], name, fits, url, settings.model)
    temperature = getattr(settings, "temperature", 0.0)

    def measured() -> pd.DataFrame:
        if not url:
            engine.sampling.refuse(variant, temperature)
        attached.refuse_wrong(settings, variant)
        with server_for(settings, variant, url, server, options) as running:
            return run(
                running,
                prompts,
                model=settings.model or None,
                max_tokens=settings.max_tokens,
                repeats=settings.repeats,
                concurrency=settings.concurrency,
                temperature=temperature,
                seed=settings.seed,
                variant=name,
                cooldown_s=getattr(settings, "cooldown_s", 0.0),
                journal=journal_of(settings.folder, name, fits).path,
            )

    return typed(measure(settings.folder, name, fits, measured, also=also).assign(variant=name))


def server_for(
    settings: Any, variant: str, url: str, server: OnDemand | Server | None, options: dict[str, Any]
) -> contextlib.AbstractContextManager[Server]:
    """A context with the server: the given one (started now if need be), an attached one, or the lab's own."""
    if server is not None:
        return contextlib.nullcontext(server.get() if isinstance(server, OnDemand) else server)
    if url:
        return contextlib.nullcontext(engine.attach(url, settings.model or None))
    return engine.serve(targets.resolve(settings.target), variant, **served_as(settings), **options)


def served_as(settings: Any) -> dict[str, Any]:
    """What a notebook's settings say of the servers that it starts."""
    return {
        "log_dir": settings.folder,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": max(64, settings.concurrency),
    }
