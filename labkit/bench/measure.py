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
from labkit.bench.prompts import as_prompts
from labkit.bench.rows import frame, typed
from labkit.bench.run import MeasurementFailed, run
from labkit.bench.together import run_together
from labkit.engine import OnDemand, Server

by_turns: set[Path] = set()  # rows that were just measured for the next step to take up, also under --force


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
    kept = on_disk(name, digest, (folder, *also))
    if kept is not None:
        return kept
    incomplete = folder / "measured" / f"{name}-incomplete.parquet"
    journal = journal_of(folder, name, digest)
    if os.environ.get("LABKIT_FORCE"):
        journal.discard()
    try:
        rows = run_it()
    except MeasurementFailed as error:
        files.write_parquet(incomplete, error.rows)
        raise
    complete = bool(rows["error"].isna().all())
    files.write_parquet(folder / "measured" / f"{name}-{digest}.parquet" if complete else incomplete, rows)
    if complete:
        incomplete.unlink(missing_ok=True)
        journal.discard()
    return rows


def on_disk(name: str, digest: str, places: Iterable[Path]) -> pd.DataFrame | None:
    """Rows that fit, from the first of these folders that has them; under --force those just measured only."""
    for place in places:
        path = place / "measured" / f"{name}-{digest}.parquet"
        if path.exists() and (path in by_turns or not os.environ.get("LABKIT_FORCE")):
            by_turns.discard(path)
            return files.read_parquet(path)
    return None


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
    fits = rows_digest(settings, variant, prompts, url, options, name=name, also=also)
    how = asked_as(settings)

    def measured() -> pd.DataFrame:
        if not url:
            engine.sampling.refuse(variant, how["temperature"])
        attached.refuse_wrong(settings, variant)
        with server_for(settings, variant, url, server, options) as running:
            return run(
                running,
                prompts,
                **how,
                variant=name,
                cooldown_s=getattr(settings, "cooldown_s", 0.0),
                journal=journal_of(settings.folder, name, fits).path,
            )

    return typed(measure(settings.folder, name, fits, measured, also=also).assign(variant=name))


def rows_digest(
    settings: Any,
    variant: str,
    prompts: pd.DataFrame,
    url: str,
    options: dict[str, Any],
    *,
    name: str = "",
    also: Iterable[Path] = (),
) -> str:
    """What the rows of a variant depend on, an attached server's identity included."""
    fits = fingerprint(settings, variant, prompts, url=url, **options)
    return attached_digest([settings.folder, *also], name or variant, fits, url, settings.model) if url else fits


def measure_by_turns(settings: Any, variant: str, prompts: pd.DataFrame, **options: Any) -> None:
    """Measure baseline and variant on two attached servers by turns, for `measure_variant` to take up from disk.

    Prompt by prompt (see bench.run_together), so that what else the machines do falls on both alike. Nothing where
    one of them is not attached, or has its rows already: the other is then measured alone.
    """
    given = {"baseline": (settings.server, {}), variant: (settings.variant_server, options)}
    if prompts.empty or not all(url for url, _ in given.values()):
        return
    fits = {name: rows_digest(settings, name, prompts, url, more) for name, (url, more) in given.items()}
    if any(on_disk(name, digest, [settings.folder]) is not None for name, digest in fits.items()):
        return
    for name in given:
        attached.refuse_wrong(settings, name)
    journals = {name: journal_of(settings.folder, name, digest) for name, digest in fits.items()}
    for journal in journals.values() if os.environ.get("LABKIT_FORCE") else ():
        journal.discard()
    sides = run_together(
        {name: engine.attach(url, settings.model or None) for name, (url, _) in given.items()},
        prompts,
        {name: journal.path for name, journal in journals.items()},
        **asked_as(settings),
    )
    for name, side in sides.items():
        measure(settings.folder, name, fits[name], lambda side=side: side.checked(as_prompts(prompts)))
        by_turns.add(settings.folder / "measured" / f"{name}-{fits[name]}.parquet")


def server_for(
    settings: Any, variant: str, url: str, server: OnDemand | Server | None, options: dict[str, Any]
) -> contextlib.AbstractContextManager[Server]:
    """A context with the server: the given one (started now if need be), an attached one, or the lab's own."""
    if server is not None:
        return contextlib.nullcontext(server.get() if isinstance(server, OnDemand) else server)
    if url:
        return contextlib.nullcontext(engine.attach(url, settings.model or None))
    return engine.serve(targets.resolve(settings.target), variant, **served_as(settings), **options)


def asked_as(settings: Any) -> dict[str, Any]:
    """How a notebook's settings say that prompts are sent, for bench.run and bench.run_together."""
    names = ("max_tokens", "repeats", "concurrency", "seed")
    told = {name: getattr(settings, name) for name in names} | {"model": settings.model or None}
    return told | {"temperature": getattr(settings, "temperature", 0.0)}


def served_as(settings: Any) -> dict[str, Any]:
    """What a notebook's settings say of the servers that it starts."""
    return {
        "log_dir": settings.folder,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": max(64, settings.concurrency),
    }
