"""What a finished notebook says at the end, for a terminal: its conclusion and its lines of the headline table."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from labkit import files, settings
from labkit.calling import copyable
from labkit.runs import headline, told

WIDTH = 100


def ending(notebook: Path) -> str:
    """The conclusion of an executed notebook, its headline, and the command that makes the run's pages."""
    record = files.read_json(notebook.parent / "run.json")
    table = headline.text_table({record["notebook"]: record["headline"]})
    run = record["settings"]["run_id"]
    pages = f"  results: {notebook.parent}\n  as a page{in_the_lab()}: {copyable(f'labkit render {run}')}"
    servers = "\n".join(f"  {name}: {text}" for name, text in told.servers(record).items())
    return "\n\n".join(part for part in (conclusion(notebook), table, servers, pages) if part)


def in_the_lab() -> str:
    """Where the command works, for somebody who is elsewhere."""
    return "" if Path.cwd() == settings.root().resolve() else ", in the lab's folder"


def conclusion(notebook: Path) -> str:
    """The Markdown that an executed notebook's last cell shows, as plain text; empty where it shows none."""
    cells = files.read_json(notebook)["cells"]
    shown = [output.get("data", {}).get("text/markdown", "") for output in cells[-1].get("outputs", [])]
    paragraphs = "".join(map("".join, shown)).split("\n\n")
    return "\n\n".join(
        textwrap.fill(plain(text), WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        for text in paragraphs
        if text.strip()
    )


def plain(markdown: str) -> str:
    """Markdown without its emphasis, and links as their text."""
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", markdown).replace("**", "")
