"""Executed notebooks as self-contained HTML pages, and an index page with the headline table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from labkit import files
from labkit.calling import copyable
from labkit.runs import accessibility, headline, told, verdict
from labkit.runs.archive import UnknownRun, opened, records, run_folder, run_name
from labkit.runs.page import TEMPLATES, body

__all__ = ["UnknownRun", "render", "run_folder"]


def render(run: str | Path, out: Path | None = None) -> Path:
    """Write <notebook>/<notebook>.html for each executed notebook and index.html; returns the index's path.

    `run` is a run id, a run folder anywhere, or a zip of one. The pages go into `out`, by default into the run
    folder itself, and for RUN.zip into RUN-pages beside it. What is wrong with a page is said on stderr.
    Raises UnknownRun, BadArchive, BadRecord or files.BrokenFile.
    """
    zipped = Path(run).is_file()
    with opened(run) as folder:
        into = out or (Path(run).with_name(f"{run_name(run)}-pages") if zipped else folder)
        found = records(folder)
        for notebook, record in found.items():
            source = folder / notebook / f"{notebook}.ipynb"
            if source.exists():
                write(into / notebook / f"{notebook}.html", notebook_page(source, record))
        index = into / "index.html"
        write(index, index_page(into, run_name(run), list(found.values())))
    return index


def write(path: Path, page: str) -> None:
    """Write a page whole; what keeps it from being read by everybody is said, and where it stands."""
    with files.atomic(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    for problem in accessibility.problems(page):
        sys.stderr.write(f"labkit: {path.name}: {problem}\n")


def notebook_page(path: Path, record: dict[str, Any]) -> str:
    """One notebook's page; nothing on it is fetched from anywhere."""
    cells = body(path)
    if said := " ".join(verdict.sentences({record["notebook"]: record["headline"]})):
        told_first = Markup('<p class="note">{}</p>').format(said)  # escapes it
        cells = cells.replace("</h1>", f"</h1>{told_first}", 1)
    return (
        environment()
        .get_template("notebook_page.html.j2")
        .render(
            title=f"{record['notebook']} · {record['settings'].get('run_id', '')}",
            heading="" if "<h1" in cells else record["notebook"],
            body=Markup(cells),  # nbconvert escaped it, and what runs was taken out
            command=copyable(told.command(record)),
            servers=told.servers(record),
            parameters=record["settings"],
            conditions=told.conditions(record["provenance"]),
            started=str(record.get("started", ""))[:16].replace("T", " "),
            seconds=seconds(record),
        )
    )


def environment() -> jinja2.Environment:
    """Jinja over the lab's page templates, escaping on."""
    return jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True)


def index_page(folder: Path, name: str, found: list[dict[str, Any]]) -> str:
    """The run's first page."""
    headlines = {record["notebook"]: record["headline"] for record in found}
    rows = [vars(row) | {"page": page_of(folder, row.notebook)} for row in headline.rows(headlines)]
    stages = [
        {
            "notebook": record["notebook"],
            "page": page_of(folder, record["notebook"]),
            "seconds": seconds(record),
            "command": copyable(told.command(record)),
        }
        for record in found
    ]
    return (
        environment()
        .get_template("index_page.html.j2")
        .render(
            title=name,
            run_id=name,
            verdicts=verdict.sentences(headlines),
            subjects=told.subjects(found),
            client=any(map(told.servers, found)),
            rows=rows,
            stages=stages,
            versions=told.versions(found[-1]["provenance"]),
        )
    )


def seconds(record: dict[str, Any]) -> str:
    """How long the stage took, whole seconds."""
    executed = record.get("executed")
    value = executed.get("wall_seconds") if isinstance(executed, dict) else record.get("seconds")
    return f"{value:.0f}" if isinstance(value, (int, float)) else "?"


def page_of(folder: Path, notebook: str) -> str:
    """A notebook's page as the index links to it; empty where an interactive run left none."""
    page = f"{notebook}/{notebook}.html"
    return page if (folder / page).exists() else ""
