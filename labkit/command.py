"""What the commands `python -m labkit.<part>` share: progress with the time, and errors as text."""

from __future__ import annotations

import sys
import time

import typer

from labkit.errors import LabError

STARTED = time.monotonic()


def report(text: str) -> None:
    """A line of progress with the seconds since the start."""
    typer.echo(f"[{time.monotonic() - STARTED:6.1f} s] {text}")


def run(app: typer.Typer) -> None:
    """Run the command; an error that the lab explains ends with its text and exit code 1."""
    try:
        app(standalone_mode=True)
    except LabError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(1)
