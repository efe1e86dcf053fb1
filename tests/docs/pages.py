"""What stands on the documentation's pages: fenced blocks, code spans, links, tables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
COMMANDS = ("labkit", "make", ".venv/bin/")  # an inline span that begins so is a command


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language and its lines without their indentation."""

    page: str
    line: int
    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        indent, language, body = found.groups()
        line = text[: found.start()].count("\n") + 1
        body = "".join(row.removeprefix(indent) for row in body.splitlines(True))
        yield Block(page.name, line, language, body)


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def spans(page: Path) -> list[str]:
    """The code spans of a page's prose; one that is broken over lines is put together."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(place, words) of every command: a line of a `sh` block, or a code span that begins like one."""
    for block in blocks(page):
        if block.language == "sh":
            lines = block.text.replace("\\\n", " ").splitlines()
            for line in lines:
                words = shlex.split(line, comments=True)
                if words:
                    yield f"{block.page}:{block.line}: {line}", words
    for span in spans(page):
        if span.startswith(COMMANDS) and " " in span:
            yield f"{page.name}: `{span}`", shlex.split(span)


def links(page: Path) -> list[str]:
    """The targets of a page's links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def anchors(page: Path) -> set[str]:
    """What a heading can be linked by, as GitHub makes it."""
    found = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}
