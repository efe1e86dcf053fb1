"""A window with JupyterLab: opens notebooks, uses menus and sliders as a person does, reads what cells show."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Locator, Page

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "outputs" / "ci"

CELLS = """() => {
  const panel = window.jupyterapp.shell.currentWidget;
  const cells = [...panel.content.model.cells].filter(cell => cell.type === 'code');
  return {
    status: panel.sessionContext.session?.kernel?.status,
    cells: cells.map(cell => ({
      run: cell.executionCount !== null, busy: cell.executionState === 'running', outputs: cell.outputs.toJSON(),
    })),
  };
}"""

SCROLL = """async () => {
  const content = window.jupyterapp.shell.currentWidget.content;
  const failed = cell => cell.type === 'code' && cell.outputs.toJSON().some(each => each.output_type === 'error');
  await content.scrollToItem([...content.model.cells].findIndex(failed));
}"""


class Lab:
    """One window. Its notebooks are copies in outputs/ci, so that nothing that runs here is ever committed."""

    def __init__(self, page: Page, address: str, jupyter: psutil.Process) -> None:
        self.page, self.address, self.jupyter = page, address, jupyter

    def open(self, notebook: Path) -> None:
        """Open a notebook and wait until its kernel is idle."""
        at, token = self.address.split("/lab?")
        self.page.goto(f"{at}/lab/tree/{notebook.relative_to(ROOT)}?reset&{token}")
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=60_000)
        self.until(lambda: self.state()["status"] == "idle", 60)

    def state(self) -> dict[str, Any]:
        """The kernel's status, and whether each code cell ran and what it shows."""
        return self.page.evaluate(CELLS)

    def errors(self) -> list[dict[str, Any]]:
        """The error outputs of all cells."""
        outputs = [output for cell in self.state()["cells"] for output in cell["outputs"]]
        return [output for output in outputs if output["output_type"] == "error"]

    def text(self, number: int) -> str:
        """What a code cell printed."""
        outputs = self.state()["cells"][number]["outputs"]
        return "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")

    def pictures(self, number: int) -> list[str]:
        """The pictures that a code cell displayed."""
        outputs = self.state()["cells"][number]["outputs"]
        return [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]

    def menu(self, *path: str) -> None:
        """Click through the menu bar."""
        top, entry = path
        self.page.click(f".lm-MenuBar-itemLabel:text-is('{top}')")
        self.page.click(f".lm-Menu-itemLabel:text-is('{entry}')")

    def run_all(self) -> None:
        """Run > Run All Cells."""
        self.menu("Run", "Run All Cells")

    def finish(self, limit_s: float) -> None:
        """Wait until every code cell has run; fails at the first error that one shows."""

        def done() -> bool:
            state = self.state()
            found = self.errors()
            assert not found, "\n".join(found[0]["traceback"])
            return all(cell["run"] and not cell["busy"] for cell in state["cells"])

        self.until(done, limit_s)

    def until(self, ready: Callable[[], bool], limit_s: float) -> None:
        """Wait for a condition; on failure a picture says how far it came."""
        deadline = time.monotonic() + limit_s
        while not ready():
            if time.monotonic() > deadline:
                self.picture("too-slow")
                raise AssertionError(f"not within {limit_s} s; see {FOLDER / 'too-slow.png'}")
            self.page.wait_for_timeout(200)

    def knob(self, label: str) -> Locator:
        """The slider with this label."""
        name = self.page.locator(f".widget-label:text-is('{label}')")
        return self.page.locator(".widget-inline-hbox").filter(has=name).first

    def look_at(self, label: str) -> None:
        """Bring a control and its plot into view, and wait until they are painted there.

        A notebook shows only the cells near the view, and paints those that come into it a moment later.
        """
        self.knob(label).scroll_into_view_if_needed()
        self.until(lambda: in_view(self.knob(label)), 30)
        self.page.wait_for_timeout(1000)

    def shown(self, knob: Locator) -> bytes:
        """The picture of the plot that a knob belongs to."""
        box = knob.locator("xpath=ancestor::*[contains(@class, 'widget-vbox')][1]")
        source = box.locator(".jp-OutputArea img").first.get_attribute("src", timeout=60_000)
        return base64.b64decode((source or "").partition("base64,")[2])

    def move(self, label: str, key: str) -> tuple[bytes, bytes]:
        """Move a slider by a key; the plot's picture before and after it changed."""
        knob = self.knob(label)
        knob.scroll_into_view_if_needed()
        before = self.shown(knob)
        knob.locator(".noUi-handle").first.press(key)
        self.until(lambda: self.shown(knob) != before, 60)
        return before, self.shown(knob)

    def servers(self) -> list[psutil.Process]:
        """The processes of vLLM servers that this JupyterLab's kernels started, and their supervisors."""
        below = self.jupyter.children(recursive=True)
        return [each for each in below if "api_server" in words(each) or "supervisor" in words(each)]

    def run_until_a_server_starts(self) -> list[psutil.Process]:
        """Run All, until a vLLM is there; its processes."""
        self.run_all()
        self.until(lambda: any("api_server" in words(each) for each in self.servers()), 120)
        return self.servers()

    def show_error(self) -> None:
        """Scroll to the first cell that shows an error."""
        self.page.evaluate(SCROLL)
        self.page.wait_for_timeout(500)

    def picture(self, name: str) -> None:
        """A screenshot into outputs/ci."""
        self.page.screenshot(path=FOLDER / f"{name}.png")

    def close(self) -> None:
        """End the kernel and the window."""
        self.until(lambda: self.state()["status"] == "idle", 60)
        self.page.evaluate("async () => { await window.jupyterapp.serviceManager.sessions.shutdownAll(); }")
        self.page.close()


def in_view(control: Locator) -> bool:
    """Whether a control lies wholly within the window."""
    box, size = control.bounding_box(), control.page.viewport_size
    return bool(box and size and box["y"] >= 0 and box["y"] + box["height"] <= size["height"])


def copy(notebook: str, **parameters: Any) -> Path:
    """A copy of a notebook at smoke scale, other parameters changed, too."""
    source = next((ROOT / "notebooks").glob(f"{notebook}_*.ipynb"))
    content = json.loads(source.read_text())
    (cell,) = [cell for cell in content["cells"] if "parameters" in cell["metadata"].get("tags", [])]
    values = {"scale": "smoke", **parameters}
    lines = [line for line in cell["source"] if line.partition(" =")[0] not in values]
    cell["source"] = [*(f"{name} = {value!r}\n" for name, value in values.items()), *lines]
    return write(notebook, content["cells"])


def write(name: str, cells: list[dict[str, Any]]) -> Path:
    """A notebook in outputs/ci."""
    path = FOLDER / f"{name}.ipynb"
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    path.write_text(json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))
    return path


def code(number: int, source: str) -> dict[str, Any]:
    """A code cell."""
    bare = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    return bare | {"id": f"cell-{number}", "source": source}


def words(process: psutil.Process) -> str:
    """A process's command line; empty where it is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
