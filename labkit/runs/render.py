"""Executed notebooks as self-contained HTML pages, and an index page with the headline table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from labkit import files, settings
from labkit.errors import LabError
from labkit.runs import headline
from labkit.runs.stage import record_of

if TYPE_CHECKING:  # takes seconds to import, which a run that renders nothing should not wait
    import nbformat

TEMPLATES = Path(__file__).parent / "templates"


class UnknownRun(LabError):
    """No run folder of this name, or none with a finished notebook."""


def run_folder(run: str | Path) -> Path:
    """The folder of a run id, or the folder itself."""
    for folder in (Path(run), settings.outputs() / str(run)):
        if folder.is_dir() and any(folder.glob("*/run.json")):
            return folder
    known = sorted({path.parts[-3] for path in settings.outputs().glob("*/*/run.json")})
    raise UnknownRun(
        f"no finished run {str(run)!r} under {settings.outputs()}",
        f"there are: {', '.join(known)}" if known else "run `labkit run all` first",
    )


def render(run: str | Path) -> Path:
    """Write <notebook>.html beside each executed notebook and index.html; returns the index's path."""
    folder = run_folder(run)
    records = [record_of(path) for path in sorted(folder.glob("*/run.json"))]
    for record in records:
        notebook = folder / record["notebook"] / f"{record['notebook']}.ipynb"
        if notebook.exists():
            write_page(notebook, record)
    index = folder / "index.html"
    with files.atomic(index) as temporary:
        temporary.write_text(index_page(folder, records))
    return index


def read_notebook(path: Path) -> nbformat.NotebookNode:
    """The executed notebook without widget views, whose state is not on a page."""
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "data" in output:
                output.data.pop("application/vnd.jupyter.widget-view+json", None)
    notebook.metadata.pop("widgets", None)
    return notebook


def write_page(path: Path, record: dict[str, Any]) -> None:
    """One notebook's page; nothing on it is fetched from anywhere."""
    from nbconvert import HTMLExporter
    from nbconvert.preprocessors.coalescestreams import CoalesceStreamsPreprocessor

    exporter = HTMLExporter(
        template_name="labpage", extra_template_basedirs=[str(TEMPLATES)], exclude_input_prompt=True
    )
    exporter.register_preprocessor(CoalesceStreamsPreprocessor, enabled=True)  # progress lines in their last state
    body, _ = exporter.from_notebook_node(read_notebook(path))
    with files.atomic(path.with_suffix(".html")) as temporary:
        page = environment().get_template("page.html.j2")
        temporary.write_text(page.render(title=record["notebook"], body=Markup(body)))  # nbconvert escaped it


def environment() -> jinja2.Environment:
    """Jinja over the lab's page templates, escaping on."""
    return jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True)


def index_page(folder: Path, records: list[dict[str, Any]]) -> str:
    """The run's first page."""
    headlines = {record["notebook"]: record["headline"] for record in records}
    rows = [vars(row) | {"page": page_of(folder, row.notebook)} for row in headline.rows(headlines)]
    stages = [
        {
            "notebook": record["notebook"],
            "page": page_of(folder, record["notebook"]),
            "seconds": round(record.get("executed", record).get("wall_seconds", record["seconds"])),
            "command": record.get("executed", {}).get("command", "interactive"),
        }
        for record in records
    ]
    last = records[-1]
    return (
        environment()
        .get_template("index_page.html.j2")
        .render(
            title=folder.name,
            run_id=folder.name,
            target=", ".join(dict.fromkeys(record["settings"]["target"] for record in records)),
            machine=machine(last["provenance"]["hardware"]),
            rows=rows,
            stages=stages,
            versions=versions(last["provenance"]),
        )
    )


def page_of(folder: Path, notebook: str) -> str:
    """A notebook's page as the index links to it; empty where an interactive run left none."""
    page = f"{notebook}/{notebook}.html"
    return page if (folder / page).exists() else ""


def machine(hardware: dict[str, Any]) -> str:
    """The hardware in words."""
    gpus = ", ".join(gpu["name"] for gpu in hardware["gpus"]) or "no GPU"
    return f"{hardware['cores']} cores of {hardware['cpu']}, {hardware['memory_gb']} GB, {gpus}"


def versions(provenance: dict[str, Any]) -> str:
    """Packages, Python and commit in one line."""
    packages = ", ".join(f"{name} {version}" for name, version in provenance["packages"].items())
    commit = provenance["source"]["commit"][:10] or "no git"
    changed = " with local changes" if provenance["source"]["dirty"] else ""
    return f"{packages}; Python {provenance['python']}; commit {commit}{changed}"
