"""Text that ships with Python and the system: docstrings, modules, the manual, licences."""

from __future__ import annotations

import ast
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.experts import texts

SHORTEST = 200  # characters: less says nothing
LONGEST = 3500  # characters a document: about a context
NOT_STANDARD = ("site-packages", "dist-packages", "test", "tests", "idle_test")
COPYRIGHTS = Path("/usr/share/common-licenses")


def documents() -> pd.DataFrame:
    """Columns category, source, text; a file or topic is one source, cut into pieces of whole lines.

    Only modules of the standard library count as code, so that the text is the same wherever that Python is.
    """
    library = Path(sysconfig.get_path("stdlib"))
    modules = sorted(standard_modules(library))
    sources = {
        "Python source": ((str(p.relative_to(library)), text_of(p)) for p in modules if p.parent == library),
        "Python docstrings": ((str(p.relative_to(library)), docstrings(text_of(p))) for p in modules),
        "Python manual": enumerated(texts.python_manual()),
        "licences": enumerated([*texts.licences(), *sorted(COPYRIGHTS.glob("*"))]),
    }
    rows = [
        (category, f"{category}: {source}", piece)
        for category, found in sources.items()
        for source, text in found
        for piece in pieces(text)
    ]
    return pd.DataFrame(rows, columns=["category", "source", "text"]).drop_duplicates("text", ignore_index=True)


def standard_modules(library: Path) -> Iterator[Path]:
    """The modules below `library`, without what was installed there and without tests."""
    for folder, inner, names in os.walk(library):
        inner[:] = [name for name in inner if name not in NOT_STANDARD]  # os.walk goes on with these
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def enumerated(found: list[Path | str]) -> Iterator[tuple[str, str]]:
    """(name, text): a text's name is its beginning."""
    for source in found:
        text = text_of(source) if isinstance(source, Path) else source
        yield text[:60].strip(), text


def text_of(path: Path) -> str:
    """A file's text; nothing where it cannot be read."""
    return path.read_text(errors="ignore") if path.is_file() else ""


def docstrings(source: str) -> str:
    """The docstrings of a module's text, one after the other; nothing where it is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    return "\n\n".join(text for node in documented(tree) if (text := ast.get_docstring(node)))


def documented(node: Any) -> Iterator[Any]:
    """A module, and the classes and functions in its body, in theirs, and so on; expressions are not entered."""
    yield node
    for inner in node.body:
        if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from documented(inner)


def pieces(text: str) -> Iterator[str]:
    """The text in stretches of whole lines, none longer than LONGEST unless one line is; short ones left out."""
    lines: list[str] = []
    for line in [*text.splitlines(keepends=True), None]:
        if line is None or sum(map(len, lines)) + len(line) > LONGEST:
            piece = "".join(lines).strip()
            if len(piece) >= SHORTEST:
                yield piece
            lines = []
        if line is not None:
            lines.append(line)
