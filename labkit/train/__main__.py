"""Train from a file: `accelerate launch -m labkit.train training.json`, on one device or many."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from labkit.cli import parse_parameters
from labkit.errors import LabError
from labkit.train.job import run_job
from labkit.train.stopping import Stopped

STOPPED = 75  # sysexits' EX_TEMPFAIL: run it again


def main(
    job: Annotated[Path, typer.Argument(help="the training file that notebook 04 writes")],
    parameter: Annotated[list[str] | None, typer.Option("--parameter", "-p", help="name=value")] = None,
) -> None:
    """Train a head as JOB says; a training that was interrupted goes on where it was."""
    try:
        typer.echo(run_job(job, parse_parameters(parameter)))
    except LabError as error:
        typer.echo(str(error), err=True)
        sys.exit(STOPPED if isinstance(error, Stopped) else 1)


if __name__ == "__main__":
    typer.run(main)
