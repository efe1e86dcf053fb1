"""The parameter table of a notebook's page, from the settings; `python -m tests.docs.tables` writes it anew."""

from __future__ import annotations

import json
import re
from pathlib import Path

from labkit.settings import NOTEBOOKS

ROOT = Path(__file__).resolve().parents[2]
HEADING = "## Parameters\n"
TOP = "| parameter | default | smoke, demo, full | what it is |\n|---|---|---|---|\n"


def page(notebook: str) -> Path:
    """A notebook's page: docs/02-ngram-baseline.md."""
    return ROOT / "docs" / f"{notebook.replace('_', '-')}.md"


def comments(notebook: str) -> dict[str, str]:
    """Parameter: its comment in the notebook's parameters cell."""
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    cell = next(cell for cell in cells if "parameters" in cell["metadata"].get("tags", []))
    lines = re.findall(r"^(\w+) = .*?  # (.*)$", "".join(cell["source"]), re.MULTILINE)
    return dict(lines)


def table(notebook: str) -> str:
    """The table: name, default, what the scale makes of 0, meaning."""
    cls, told = NOTEBOOKS[notebook], comments(notebook)
    order = [name for name in told if name in cls.parameters()]
    rows = []
    for name in [*order, *(name for name in cls.parameters() if name not in order)]:
        default = json.dumps(cls.parameters()[name].default)
        scales = ", ".join(f"{value:,}" for value in cls.by_scale.get(name, ()))
        rows.append(f"| `{name}` | `{default}` | {scales} | {told.get(name, '')} |\n")
    return TOP + "".join(rows)


def of_page(text: str) -> str:
    """The table that stands under the page's heading."""
    return "".join(
        line for line in text.partition(HEADING)[2].partition("\n## ")[0].splitlines(True) if line.startswith("|")
    )


def main() -> None:
    """Write the table into each page in place of the one that is there."""
    for notebook in NOTEBOOKS:
        text = page(notebook).read_text()
        old = of_page(text)
        new = text.replace(old, table(notebook)) if old else text.replace(HEADING, f"{HEADING}\n{table(notebook)}")
        page(notebook).write_text(new)


if __name__ == "__main__":
    main()
