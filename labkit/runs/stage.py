"""The folder of one notebook in one run: results, figures and run.json."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import time
from pathlib import Path
from typing import Any

import filelock
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labkit import files
from labkit.errors import LabError
from labkit.runs import served
from labkit.runs.provenance import provenance
from labkit.runs.scrub import scrub
from labkit.settings import Settings

SCHEMA_VERSION = 1
HELD: dict[Path, filelock.FileLock] = {}  # by this process, until the stage is finished or the process ends


class StageBusy(LabError):
    """Another process is running the same stage of the same run."""


def lock(folder: Path) -> filelock.FileLock:
    """The stage's lock, taken; raises StageBusy. The system frees it when its holder is killed."""
    found = filelock.FileLock(folder / ".lock", timeout=0)
    try:
        found.acquire()
    except filelock.Timeout as error:
        raise StageBusy(
            f"another run, or a notebook's kernel, is writing to {folder}",
            "wait for it, shut that kernel down, or give another run_id",
        ) from error
    return found


def hold(folder: Path) -> None:
    """Keep other labs away from a notebook's folder; again in the same kernel is no matter. Raises StageBusy."""
    if folder not in HELD:
        HELD[folder] = lock(folder)


def release(folder: Path) -> None:
    """Let other labs in."""
    if folder in HELD:
        HELD.pop(folder).release()


class Stage:
    """Where a notebook saves what it found: `save` frames, `figure` plots, and at the end `finish`."""

    def __init__(self, settings: Settings) -> None:
        """Make the folder; an earlier run.json stays until `finish` replaces it."""
        self.settings = settings
        self.folder: Path = settings.folder
        self.started = time.time()
        self.clock = time.monotonic()  # durations are its: the other one may be set
        self.laps: dict[str, float] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        if "LABKIT_HEADLESS" not in os.environ:  # there the process that runs the notebook holds it
            hold(self.folder)
        self.servers = served.asked(settings, served.stored(self.folder / "run.json"))

    def save(self, name: str, frame: pd.DataFrame) -> Path:
        """Write a tidy frame as <name>.parquet."""
        path = self.folder / f"{name}.parquet"
        files.write_parquet(path, frame)
        return path

    def figure(self, name: str, drawn: Axes | Figure) -> Path:
        """Write a figure as <name>.png; its metadata say in words what it shows, which pages take as alt text."""
        path = self.folder / f"{name}.png"
        figure = drawn if isinstance(drawn, Figure) else drawn.get_figure()
        told = {"Title": in_words(figure)}
        with files.atomic(path) as temporary:
            figure.savefig(temporary, dpi=120, bbox_inches="tight", format="png", metadata=told)
        return path

    def lap(self, step: str) -> float:
        """Note the seconds since the last lap, or since the stage began, as those of `step`; run.json has them."""
        seconds = time.monotonic() - self.clock - sum(self.laps.values())
        self.laps[step] = seconds
        return seconds

    def finish(self, headline: dict[str, Any], **more: Any) -> Path:
        """Write run.json: settings, provenance and the headline's scalars (NaN becomes null)."""
        path = self.folder / "run.json"
        record = {
            "schema_version": SCHEMA_VERSION,
            "notebook": self.settings.notebook,
            "settings": dataclasses.asdict(self.settings),
            "headline": {name: plain(value) for name, value in headline.items()},
            **more,
            "started": datetime.datetime.fromtimestamp(self.started, datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self.clock, 1),
            "laps_s": {name: round(seconds, 1) for name, seconds in self.laps.items()},
            "results": sorted(file.name for file in self.folder.glob("*.parquet")),
            "provenance": provenance() | self.asked_servers(),
        }
        files.write_json(path, record)
        if "LABKIT_HEADLESS" not in os.environ:  # else `labkit run` does when the notebook itself is there
            scrub(self.folder, record["settings"])
        release(self.folder)
        return path

    def asked_servers(self) -> dict[str, served.Servers]:
        """The given servers for the provenance; one that was away when the stage began is asked once more."""
        if any("model" not in told for told in self.servers.values()):
            self.servers = served.asked(self.settings, self.servers)
        return {"servers": self.servers} if self.servers else {}


def in_words(figure: Figure) -> str:
    """What a figure shows: the title of each drawing, its axes, and what the legend names."""
    said = []
    for ax in figure.axes:
        if not ax.get_title():
            continue  # a colour bar
        axes = " by ".join(label for label in (ax.get_ylabel(), ax.get_xlabel()) if label)
        names = ax.get_legend_handles_labels()[1][:8]
        said.append("; ".join(part for part in (ax.get_title(), axes, ", ".join(map(str, names))) if part))
    return ". ".join(said).replace("\n", " ")


def plain(value: Any) -> Any:
    """A numpy scalar as Python's own; NaN and infinities as None, which JSON can hold."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def headline_of(run_folder: Path) -> dict[str, dict[str, Any]]:
    """notebook: its headline, for every finished stage of a run."""
    found = {}
    for path in sorted(run_folder.glob("*/run.json")):
        record = record_of(path)
        found[record["notebook"]] = record["headline"]
    return found


def record_of(path: Path) -> dict[str, Any]:
    """A stage's run.json; raises BrokenFile for one that no stage wrote into this folder."""
    record = files.read_record(path, notebook=str, headline=dict, settings=dict, provenance=dict)
    if record["notebook"] != path.parent.name:
        raise files.BrokenFile(
            f"{path} is of the notebook {record['notebook']!r:.80}, not of its folder's",
            "delete it or move it back",
        )
    return record
