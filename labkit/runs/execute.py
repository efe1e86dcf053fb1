"""Notebooks run headless through papermill, skipped when nothing that they depend on changed."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import files, settings
from labkit.errors import LabError
from labkit.runs import inputs, products
from labkit.runs.scrub import scrub
from labkit.runs.stage import lock
from labkit.settings import NOTEBOOKS, BadParameter, Settings

if TYPE_CHECKING:
    from papermill import PapermillExecutionError

# Stages whose results a stage takes up; what they measured is part of its own inputs.
BROUGHT = ("prompts", "start", "head")
UPSTREAM = {"05_evaluation": ("02_ngram_baseline", "04_eagle3_pipeline")}


class UnknownNotebook(LabError):
    """No notebook has this name or number."""


class StageFailed(LabError):
    """A cell of a notebook raised; the partial notebook is kept."""


class PartDone(LabError):
    """A notebook did the part of its work that it was asked for, and the rest is other workers'."""

    exit_code = 0


def find_notebook(name: str) -> str:
    """The notebook that a number ("02"), a name or a path stands for."""
    stem = Path(name).stem
    found = [known for known in NOTEBOOKS if known == stem or known.split("_")[0] == stem.zfill(2)]
    if not found:
        raise UnknownNotebook(f"there is no notebook {name!r}", f"use one of {', '.join(NOTEBOOKS)}, or all")
    return found[0]


def digest(chosen: Settings) -> str:
    """What a stage's results depend on: settings, files that they name, notebook, and stages that it takes up."""
    source = settings.root() / "notebooks" / f"{chosen.notebook}.ipynb"
    upstream = [chosen.folder.parent / name / "run.json" for name in UPSTREAM.get(chosen.notebook, ())]
    inputs = [files.read_record(path).get("started") if path.exists() else None for path in upstream]
    values = {name: value for name, value in dataclasses.asdict(chosen).items() if name != "run_id"}
    return files.digest([values, files.digest_file(source), inputs + brought(chosen)])


def brought(chosen: Settings) -> list[list[Any]]:
    """Name, size and time of each file of the user's own that a parameter names (BROUGHT), or its folder holds."""
    found: list[list[Any]] = []
    for name in BROUGHT:
        path = Path(str(getattr(chosen, name, "")) or "/nowhere").expanduser()
        own = settings.root() / "data" / "heads" / path.name
        path = own if name == "head" and str(path) == path.name and own.is_dir() else path
        for file in [path] if path.is_file() else sorted(path.glob("*")):
            found.append([file.name, file.stat().st_size, file.stat().st_mtime_ns])
    return found


def finished(chosen: Settings) -> bool:
    """Whether the stage's results are there, as it left them, and fit its settings and inputs."""
    path = chosen.folder / "run.json"
    return path.exists() and executed(path).get("digest") == digest(chosen) and not lost(chosen)


def lost(chosen: Settings) -> list[str]:
    """What the last run of the stage left and is not there as it was; empty where it never came to its end."""
    path = chosen.folder / "run.json"
    return products.lost(chosen.folder, executed(path).get("products")) if path.exists() else []


def executed(path: Path) -> dict[str, Any]:
    """How a stage was run, from its run.json; empty where that does not say. Raises BrokenFile."""
    told = files.read_record(path).get("executed")
    return told if isinstance(told, dict) else {}


def execute(notebook: str, parameters: Mapping[str, Any], *, force: bool = False) -> Path:
    """Run one notebook headless into outputs/<run_id>/<notebook>/; returns the executed copy.

    Unknown or ill-typed parameters raise BadParameter before anything starts; prompts that cannot be read, and
    servers that do not answer, raise what labkit.runs.inputs says. A failing cell raises StageFailed; the partial
    notebook and the server logs stay in the stage's folder. PartDone where the notebook ended after its shard.
    """
    chosen = NOTEBOOKS[find_notebook(notebook)].of(parameters)
    output = chosen.folder / f"{chosen.notebook}.ipynb"
    if finished(chosen) and output.exists() and not force:
        say(f"{chosen.notebook}: up to date in {chosen.folder}")
        return output
    if gone := lost(chosen):
        say(f"{chosen.notebook}: gone or changed since it was finished: {', '.join(gone)}")
    inputs.refuse(chosen)
    inputs.refuse_servers(chosen)
    say(f"{chosen.notebook} -> {chosen.folder}")
    started = time.monotonic()
    with alone(chosen.folder):
        outdate(chosen)
        try:
            run_papermill(chosen, parameters, output, force=force)
            record_execution(chosen, parameters, time.monotonic() - started)
        finally:  # a failed run is sent to somebody, too
            scrub(chosen.folder, dataclasses.asdict(chosen))
        mark_finished(chosen)
    say(f"{chosen.notebook}: done in {time.monotonic() - started:.0f} s")
    return output


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the stage's folder; raises StageBusy while another labkit writes to it."""
    folder.mkdir(parents=True, exist_ok=True)
    held = lock(folder)
    try:
        yield
    finally:
        held.release()


def outdate(chosen: Settings) -> None:
    """Take the mark of a finished run from run.json: should this run fail, the next one does not skip it."""
    path = chosen.folder / "run.json"
    if path.exists():
        files.write_json(
            path, {name: value for name, value in files.read_record(path).items() if name != "executed"}
        )


def run_papermill(chosen: Settings, parameters: Mapping[str, Any], output: Path, *, force: bool) -> None:
    """Execute the notebook with the lab's root as working directory, its text streamed to the terminal.

    It is written as <name>.partial.ipynb, so a run that fails does not replace the notebook of an earlier one.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError
    from traitlets.config import Config

    source = settings.root() / "notebooks" / f"{chosen.notebook}.ipynb"
    given = {"target": chosen.target, "scale": chosen.scale, "run_id": chosen.run_id}
    given |= {name: getattr(chosen, name) for name in parameters}
    partial = output.with_suffix(".partial.ipynb")
    try:
        with quiet_environment(force=force):
            papermill.execute_notebook(
                str(source),
                str(partial),
                given,
                kernel_name="python3",
                cwd=str(settings.root()),
                progress_bar=False,
                stdout_file=sys.stdout,
                request_save_on_cell_execute=True,
                coalesce_streams=True,
                config=Config(KernelManager={"transport_encryption": "auto"}),  # plain TCP is warned of
            )
    except papermill.PapermillExecutionError as error:
        raise failure(chosen, partial, error) from error
    except DeadKernelError as error:
        raise StageFailed(
            f"{chosen.notebook}: the notebook's kernel died (killed by somebody, or by the system for its memory)",
            what_is_left(chosen.folder, partial),
        ) from error
    except OSError as error:
        if files.no_room(error):
            raise files.disk_full(partial) from error
        raise
    partial.replace(output)


def failure(chosen: Settings, output: Path, error: PapermillExecutionError) -> StageFailed | PartDone:
    """The error for a failed cell; what the lab's own error in it advised comes first."""
    what, _, advice = str(error.evalue).partition("\n  what to do: ")
    if error.ename == "ShardDone":  # of labkit.extract; from the kernel only the name comes
        return PartDone(f"{chosen.notebook}: {what}", advice)
    if error.ename in ("MemoryError", "ArrowMemoryError", "OutOfMemoryError"):
        what, advice = what or "no memory left", "end other programs, or take fewer prompts or shorter ones"
    left = what_is_left(chosen.folder, output)
    return StageFailed(
        f"{chosen.notebook} stopped in cell {error.exec_count}: {error.ename}: {what}",
        "; ".join(part for part in (advice.strip(), left) if part),
    )


def what_is_left(folder: Path, partial: Path) -> str:
    """What a stage that failed leaves to be read, and what its next run will find done."""
    logs = ", server logs lie beside it" if any(folder.glob("server-*.log")) else ""
    done = ": what was done until then is kept" if products.sizes(folder) or any(folder.glob("*/*")) else ""
    return f"the partial notebook is {partial}{logs}; then run the same command again{done}"


@contextmanager
def quiet_environment(*, force: bool) -> Iterator[None]:
    """Environment of the kernels: headless, no warning of the debugger, and OpenMP as the servers have it.

    With the OpenMP runtime of torch's wheel a head trains more slowly, and many times so beside other programs.
    """
    from labkit.engine import launch

    extra = {"PYDEVD_DISABLE_FILE_VALIDATION": "1", "LABKIT_HEADLESS": "1"} | launch.preload()
    extra |= {"LABKIT_OUTPUTS": str(settings.outputs()), "LABKIT_CACHE": str(settings.cache())}  # not by folder
    extra |= {"LABKIT_FORCE": "1"} if force else {}
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def record_execution(chosen: Settings, parameters: Mapping[str, Any], seconds: float) -> None:
    """Add to run.json how the stage was run."""
    path = chosen.folder / "run.json"
    if not path.exists():
        raise StageFailed(f"{chosen.notebook} ended without writing {path}", "run it again with --force")
    words = [f"-p {name}={shlex.quote(str(value))}" for name, value in parameters.items() if name != "run_id"]
    command = " ".join(["labkit run", chosen.notebook[:2], "--run-id", shlex.quote(chosen.run_id), *words])
    told = {"command": command, "wall_seconds": round(seconds, 1)}
    files.write_json(path, files.read_record(path) | {"executed": told})


def mark_finished(chosen: Settings) -> None:
    """Add to run.json what lets the next run skip the stage; last, since scrubbing changes sizes."""
    path = chosen.folder / "run.json"
    mark = {"digest": digest(chosen), "products": products.sizes(chosen.folder)}
    files.write_json(path, files.read_record(path) | {"executed": executed(path) | mark})


def parameters_for(notebook: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Of parameters for all notebooks, those that this one has; "02.max_tokens" is for 02 alone."""
    chosen = {}
    for name, value in parameters.items():
        prefix, _, bare = name.rpartition(".")
        if prefix and find_notebook(prefix) == notebook:
            chosen[bare] = value
        elif not prefix and name in NOTEBOOKS[notebook].parameters():
            chosen[name] = value
    return chosen


def checked(parameters: Mapping[str, Any]) -> dict[str, Settings]:
    """The settings of all notebooks, from parameters for all or with a number before a dot; else BadParameter."""
    for name in parameters:
        prefix, _, bare = name.rpartition(".")
        owners = [find_notebook(prefix)] if prefix else list(NOTEBOOKS)
        if not any(bare in NOTEBOOKS[owner].parameters() for owner in owners):
            raise BadParameter(f"no notebook has a parameter {name!r}", "see `labkit run NN --help-parameters`")
    return {name: NOTEBOOKS[name].of(parameters_for(name, parameters)) for name in NOTEBOOKS}


def run_all(parameters: Mapping[str, Any], *, force: bool = False) -> Path:
    """Run the five notebooks in order into one run folder; returns it."""
    chosen = checked(parameters)  # all of them before any starts
    for each in chosen.values():
        inputs.refuse(each)
        if not finished(each):
            inputs.refuse_servers(each)
    started = time.monotonic()
    for name in NOTEBOOKS:
        execute(name, parameters_for(name, parameters), force=force)
    say(f"all five notebooks: {time.monotonic() - started:.0f} s")
    return next(iter(chosen.values())).folder.parent


def say(text: str) -> None:
    """One line for the person at the terminal."""
    sys.stdout.write(f"[labkit] {text}\n")
    sys.stdout.flush()
