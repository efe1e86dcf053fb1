"""An executed notebook as the body of a page: clean, described, small. Nothing in it runs or fetches."""

from __future__ import annotations

import base64
import re
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from bs4 import BeautifulSoup, Tag

from labkit.runs import accessibility, images
from labkit.runs.scrub import Scrubber

if TYPE_CHECKING:  # takes seconds to import, which a run that renders nothing should not wait
    import nbformat

TEMPLATES = Path(__file__).parent / "templates"
WIDTHS = (1400, 1000, 700, 480)  # pixels of a picture, while the page is too large
LONGEST = 60_000  # characters of one text output
GONE = ["script", "iframe", "object", "embed", "base", "link", "meta", "form", "frame", "applet"]
WIDGET = "application/vnd.jupyter.widget-view+json"
FIGURE = re.compile(r"\.figure\(\s*[\"']([\w-]+)[\"']")
PROGRESS = re.compile(r"\d+%\|")  # tqdm's
LONG = 12  # lines of printed text that are shown unfolded
# In characters of a table: what the page is wide, what a column takes besides its text (page.html.j2).
PAGE, GAP, TIGHT_PAGE, TIGHT_GAP = 105, 2.9, 125, 1.7
BUDGET = accessibility.MOST_BYTES - 100_000  # what the rest of the page takes


def body(path: Path) -> str:
    """The HTML of a notebook's cells; pictures get smaller until it fits a page of 3 MB."""
    import nbformat

    notebook = nbformat.from_dict(Scrubber().value(nbformat.read(path, as_version=4)))
    titles = prepare(notebook, path.parent)
    html = ""
    for width in WIDTHS:
        shrink(notebook, width)
        html = described(exported(notebook), titles)
        if len(html.encode()) <= BUDGET:
            break
    return html


def prepare(notebook: nbformat.NotebookNode, folder: Path) -> list[str]:
    """Drop what a page cannot show (widgets) and cut what is too long; returns the alt text of each picture."""
    notebook.metadata.pop("widgets", None)
    titles, heading = [], ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            heading = (re.findall(r"^#+\s+(.+)$", cell.source, re.M) or [heading])[-1].strip()
        outputs = [o for o in cell.get("outputs", []) if WIDGET not in o.get("data", {})]
        if "outputs" in cell:
            cell.outputs = [shortened(output) for output in outputs]
        pictures = [o for o in outputs if any(kind.startswith("image/") for kind in o.get("data", {}))]
        names = FIGURE.findall(cell.source)
        for number, _ in enumerate(pictures):
            said = images.title(folder / f"{names[number]}.png") if number < len(names) else ""
            which = f" {number + 1} of {len(pictures)}" if len(pictures) > 1 else ""
            titles.append(said or f"Figure{which} under the heading: {heading or 'without one'}")
    return titles


def shortened(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """An output whose text is not endless: its middle is left out, and it says so."""
    data = output.get("data", {})
    if len(data.get("text/html", "")) > 10 * LONGEST:
        data.pop("text/html")  # the plain form of a table has fewer rows
    for holder, name in ((output, "text"), (data, "text/plain"), (data, "text/markdown")):
        text = holder.get(name, "")
        if len(text) > LONGEST:
            left = f"\n... {len(text) - LONGEST:,} characters left out; the notebook has them ...\n"
            holder[name] = text[: LONGEST // 2] + left + text[-LONGEST // 2 :]
    return output


def shrink(notebook: nbformat.NotebookNode, width: int) -> None:
    """Pack every PNG of the outputs."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                content = base64.b64decode(output.data["image/png"])
                output.data["image/png"] = base64.b64encode(images.smaller(content, width)).decode()


def exported(notebook: nbformat.NotebookNode) -> str:
    """nbconvert's HTML of the cells, code folded."""
    from nbconvert import HTMLExporter
    from nbconvert.preprocessors.coalescestreams import CoalesceStreamsPreprocessor

    exporter = HTMLExporter(
        template_name="labpage", extra_template_basedirs=[str(TEMPLATES)], exclude_input_prompt=True
    )
    exporter.register_preprocessor(CoalesceStreamsPreprocessor, enabled=True)  # progress lines in their last state
    return exporter.from_notebook_node(notebook)[0]


def described(html: str, titles: list[str]) -> str:
    """The body made safe and readable: no scripts, alt text, headings in order, headers with a scope."""
    soup = BeautifulSoup(html, "html.parser")
    disarm(soup)
    pictures = [image for image in soup.find_all("img") if image.find_parent(class_=re.compile("output"))]
    for image, title in zip(pictures, titles, strict=False):
        image["alt"] = title
    for link in soup.find_all("a", class_="anchor-link"):
        link.decompose()
    level_headings(soup)
    for table in soup.find_all("table"):
        head(table)
        if "dataframe" in (table.get("class") or []):  # others wrap their text
            fit(table, soup)
    for stream in soup.find_all("div", class_="output_stream"):
        fold(stream, soup)
    return str(soup)


def disarm(soup: BeautifulSoup) -> None:
    """Take out what runs or is fetched: a run may come from somebody else."""
    for tag in soup.find_all(GONE):
        tag.decompose()
    for tag in soup.find_all(True):
        for name, value in list(tag.attrs.items()):
            if unsafe(tag.name, name, str(value).strip().lower()):
                del tag[name]
        if tag.name == "style" and re.search(r"@import|url\(", tag.get_text()):
            tag.decompose()
        elif tag.name == "img" and not tag.get("src"):
            tag.replace_with(f"[a picture that is not in the notebook: {tag.get('alt', '')}]")


def unsafe(tag: str, name: str, text: str) -> bool:
    """Whether an attribute runs something or is fetched from somewhere."""
    if name.startswith("on") or re.match(r"(javascript|vbscript|data:text):?", text):
        return True
    if name == "style":
        return "url(" in text
    fetched = name in accessibility.FETCHED or (name == "href" and tag != "a")
    return fetched and not text.startswith(("data:image/", "#"))


def level_headings(soup: BeautifulSoup) -> None:
    """One h1, the first; below it no level is left out, and no heading is empty."""
    before = 0
    for heading in soup.find_all(re.compile(r"^h[1-6]$")):
        if not heading.get_text(strip=True):
            heading.decompose()
            continue
        level = int(heading.name[1])
        level = 1 if before == 0 else max(2, min(level, before + 1))
        heading.name, before = f"h{level}", level


def fit(table: Tag, soup: BeautifulSoup) -> None:
    """Make a table that is wider than the page narrower; where that does not do, say that it goes on."""
    rows = [
        [cell.get_text(" ", strip=True) for cell in row.find_all(["td", "th"])] for row in table.find_all("tr")
    ]
    columns = list(zip_longest(*rows, fillvalue=""))
    if sum(max(map(len, column)) + GAP for column in columns) <= PAGE:
        return
    table["class"] = [*table.get("class", []), "tight"]
    for header in table.select("thead th"):
        for text in header.find_all(string=re.compile("_")):
            first, *more = re.split("(?<=_)", str(text))
            text.replace_with(first, *(part for piece in more for part in (soup.new_tag("wbr"), piece)))
    narrow = [max(len(piece) for text in column for piece in re.split(r"(?<=_)|\s", text)) for column in columns]
    if sum(width + TIGHT_GAP for width in narrow) > TIGHT_PAGE and isinstance(table.parent, Tag):
        hint = soup.new_tag("p", attrs={"class": "muted"})
        hint.string = f"{len(columns)} columns: scroll sideways for those beyond the edge."
        table.parent.insert_before(hint)


def fold(stream: Tag, soup: BeautifulSoup) -> None:
    """Fold what a cell printed where it is progress alone, or long."""
    lines = [line for line in stream.get_text().splitlines() if line.strip()]
    progress = bool(lines) and all(PROGRESS.search(line) for line in lines)
    if not progress and len(lines) <= LONG:
        return
    details, summary = soup.new_tag("details"), soup.new_tag("summary")
    summary.string = f"{'progress' if progress else 'output'} ({len(lines)} lines)".replace(
        "(1 lines)", "(1 line)"
    )
    stream.wrap(details).insert(0, summary)


def head(table: Tag) -> None:
    """Say of each header what it heads; an empty corner is none. A wide table is scrolled by keys, too."""
    del table["border"]
    if isinstance(table.parent, Tag) and table.parent.name == "div":
        table.parent["tabindex"] = "0"
    for header in table.find_all("th"):
        if not header.get_text(strip=True):
            header.name = "td"
            continue
        many = str(header.get("colspan", "1")) not in ("", "1")
        in_head = header.find_parent("thead") is not None
        header["scope"] = ("colgroup" if many else "col") if in_head else "row"
    if not table.find("th"):
        first = table.find("tr")
        for cell in first.find_all("td") if isinstance(first, Tag) else []:
            cell.name, cell["scope"] = "th", "col"
