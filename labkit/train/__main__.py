"""Train from a file: `accelerate launch -m labkit.train training.json`, on one device or many."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from labkit import command
from labkit.cli import parse_parameters
from labkit.train.job import run_job

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def train(
    job: Annotated[Path, typer.Argument(help="the training file that notebook 04 writes")],
    parameter: Annotated[list[str] | None, typer.Option("--parameter", "-p", help="name=value")] = None,
) -> None:
    """Train a head as JOB says; a training that was interrupted goes on where it was."""
    typer.echo(run_job(job, parse_parameters(parameter)))


if __name__ == "__main__":
    command.run(app)
