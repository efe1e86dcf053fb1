"""A training as a file: what a notebook writes beside its data, and `accelerate launch -m labkit.train` runs."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from labkit import files, targets, vocab
from labkit.errors import LabError
from labkit.settings import Eagle3Pipeline, here
from labkit.train.running import run

FSDP = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "NO_WRAP"]  # a head is one layer
FSDP += ["--fsdp_cpu_ram_efficient_loading", "false"]
PLACES = ("dataset_dir", "hidden_dir", "vocab_dir", "out_dir")


class BadJob(LabError):
    """A training file lacks something."""


def write_job(
    path: Path,
    settings: Eagle3Pipeline,
    *,
    dataset_dir: Path,
    hidden_dir: Path,
    vocab_dir: Path,
    out_dir: Path,
    layers: Sequence[int] = (),
) -> Path:
    """Write a training's settings and places (relative to the file: the folder can move) as JSON or YAML."""
    places = {"dataset_dir": dataset_dir, "hidden_dir": hidden_dir, "vocab_dir": vocab_dir, "out_dir": out_dir}
    job = {
        "settings": dataclasses.asdict(settings),
        "layers": list(layers),
        **{name: os.path.relpath(place, path.parent) for name, place in places.items()},
    }
    if path.suffix == ".json":
        files.write_json(path, job)
    else:
        with files.atomic(path) as temporary:
            temporary.write_text(yaml.safe_dump(job, sort_keys=False))
    return path


def read_job(path: Path) -> dict[str, Any]:
    """The job that `write_job` wrote; raises BadJob."""
    try:
        job = yaml.safe_load(path.read_text())  # JSON is YAML, too
    except (OSError, yaml.YAMLError) as error:
        raise BadJob(f"{path} is no training file ({error})", "notebook 04 writes one: training.json") from error
    lacking = [name for name in ("settings", *PLACES) if not isinstance(job, dict) or name not in job]
    if lacking:
        raise BadJob(f"{path} lacks {', '.join(lacking)}", "notebook 04 writes a whole one: training.json")
    wrong = [name for name in PLACES if not isinstance(job[name], str)]
    wrong += [] if isinstance(job["settings"], dict) else ["settings"]
    if wrong:
        raise BadJob(
            f"{path}: {wrong[0]} is {str(job[wrong[0]])[:60]!r}", "give what notebook 04's training.json has"
        )
    return job


def run_job(path: Path, changes: dict[str, Any]) -> Path:
    """Train as the file says, with `changes` to its settings; returns the head's directory."""
    job = read_job(path)
    stored = {name: here(value) if isinstance(value, str) else value for name, value in job["settings"].items()}
    settings = Eagle3Pipeline.of(stored | changes)
    places = {name: (path.parent / job[name]).resolve() for name in PLACES}
    mapping = vocab.load(places.pop("vocab_dir"))
    target = targets.resolve(settings.target)
    return run(settings, target=target, vocab=mapping, layers=tuple(job.get("layers") or ()), **places)


def launch_command(path: Path, processes: int = 1, *, fsdp: bool = False) -> str:
    """The shell command that runs the file on `processes` devices of this machine."""
    words = ["accelerate", "launch", "--num_processes", str(processes), "--num_machines", "1"]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    if processes > 1:
        words += FSDP if fsdp else ["--multi_gpu"]
    return shlex.join([*words, "-m", "labkit.train", str(path)])
