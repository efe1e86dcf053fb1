"""What happens while a swapped variant serves: a person's command, or nothing until they interrupt."""

from __future__ import annotations

import ast
import contextlib
import subprocess
import time
from typing import Any

from labkit.engine import supervisor
from labkit.engine.service.plan import SwapPlan

GRACE_S = 10.0
POLL_S = 0.5


def options(given: dict[str, str]) -> dict[str, Any]:
    """The variant's options from name=value texts: a Python literal, else text. Names are checked by the plan."""
    return {name: literal(value) for name, value in given.items()}


def literal(text: str) -> Any:
    """A number, list or object where the text is one, else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def run(words: list[str], url: str) -> int:
    """Run a command with {url} replaced; returns its exit code. It ends with us, however we end."""
    process = subprocess.Popen(
        [word.replace("{url}", url) for word in words], preexec_fn=supervisor.die_with_parent
    )
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def until_interrupted(plan: SwapPlan) -> int:
    """Wait until Ctrl-C, or until the variant's service is gone, which the swap itself then tells; 0."""
    with contextlib.suppress(KeyboardInterrupt):
        while plan.manager.state(plan.unit) == "active":
            time.sleep(POLL_S)
    return 0
