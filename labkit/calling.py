"""The `labkit` command as a person can copy it: where no PATH has it, it is called in the lab's environment."""

from __future__ import annotations

import re
import shutil

# Not behind a slash or a dot: a path to it is one that can be copied. Before a command's name: not in sentences.
SPOKEN = re.compile(
    r"(?<![\w./-])labkit(?= (?:run|render|diff|doctor|extract|swap|plan|convert-head|average-heads)\b)"
)
IN_THE_LAB = ".venv/bin/labkit"


def copyable(text: str) -> str:
    """The text with its `labkit ...` commands as they work in the lab's folder; as it is where PATH has labkit."""
    from labkit import settings  # imports the errors, whose text comes through here

    found = shutil.which("labkit") or not (settings.root() / IN_THE_LAB).exists()
    return text if found else SPOKEN.sub(IN_THE_LAB, text)
