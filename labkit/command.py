"""What the lab's commands share: progress with the time, and errors as text with an exit code."""

from __future__ import annotations

import sys
import time

import typer

from labkit.errors import LabError

STARTED = time.monotonic()
INTERRUPTED = 130  # with which typer ends on Ctrl-C


def report(text: str) -> None:
    """A line of progress with the seconds since the start."""
    typer.echo(f"[{time.monotonic() - STARTED:6.1f} s] {text}")


def run(app: typer.Typer) -> None:
    """Run the command; what the lab explains ends with its text and its exit code, no stack trace."""
    try:
        app(standalone_mode=True)
    except LabError as error:
        failed = error.exit_code != 0
        typer.echo(f"labkit: {type(error).__name__ + ': ' if failed else ''}{error}", err=failed)
        sys.exit(error.exit_code)
    except MemoryError:
        remedy = "end other programs, or ask for less (fewer prompts, shorter ones); finished steps are kept"
        typer.echo(f"labkit: no memory left\n  what to do: {remedy}", err=True)
        sys.exit(1)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            typer.echo(
                "labkit: interrupted; finished steps are kept: the same command goes on from there", err=True
            )
        raise
