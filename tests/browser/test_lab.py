"""JupyterLab in a real browser: notebooks run by Run All, sliders redraw, an interrupt leaves no server behind.

The pictures in outputs/ci are for people.
"""

import os
import re

import psutil
import pytest

from tests.browser.lab import Lab, code, copy, write

pytestmark = pytest.mark.timeout(900)
PNG = b"\x89PNG"
IMPORTS = """import pandas as pd
from labkit import settings, widgets
from labkit.plots import training

rows = pd.DataFrame({"step": [0, 1, 2], "loss": [3.0, 2.0, 1.5], "epoch": [0, 0, 1]})
rows["acceptance_length"] = [1, 1.5, 2]
"""
WAIT = """show = widgets.LiveFigure(training.plot_progress)
await widgets.stoppable(
    lambda stop: [show(rows[:2]), print("working"), stop.wait(100), show(rows), print("saved")]
);
"""
SOAK = os.environ.get("LABKIT_SOAK") == "1"
REFUSED = "settings.NgramBaseline.from_notebook({'temperature': -1.0})"


def test_notebook_03_runs_and_its_sliders_redraw(lab: Lab, engine_started):
    """First, while the engine of the next test starts."""
    lab.open(copy("03"))
    lab.run_all()
    lab.finish(480)
    before, after = lab.move("tokens n", "ArrowRight")
    assert before.startswith(PNG)
    assert after.startswith(PNG)
    lab.picture("03-experts-light")
    before, after = lab.move("acceptance length", "ArrowRight")
    assert before != after
    lab.picture("03-what-if-light")
    lab.page.click(".lm-MenuBar-itemLabel:text-is('Settings')")
    lab.page.hover(".lm-Menu-itemLabel:text-is('Theme')")
    lab.page.click(".lm-Menu-itemLabel:text-is('JupyterLab Dark')")
    lab.page.wait_for_selector("[data-jp-theme-light=false]", state="attached")
    lab.look_at("acceptance length")
    lab.picture("03-what-if-dark")
    lab.look_at("tokens n")
    lab.picture("03-experts-dark")


def test_notebook_02_runs_against_a_real_server(lab: Lab, engine_started):
    lab.open(copy("02", server=engine_started.result().base_url))
    lab.run_all()
    lab.finish(480)
    lab.move("drafted tokens k", "ArrowLeft")
    lab.move("lookup_max", "ArrowRight")
    lab.picture("02-lookup")


def test_an_interrupt_or_a_restart_leaves_no_server(lab: Lab):
    lab.open(copy("02"))
    family = lab.run_until_a_server_starts()
    lab.menu("Kernel", "Interrupt Kernel")
    assert not psutil.wait_procs(family, timeout=40)[1]
    lab.until(lambda: [error["ename"] for error in lab.errors()] == ["KeyboardInterrupt"], 60)
    assert "run the cell again" in lab.errors()[0]["evalue"]
    assert not lab.servers()
    lab.show_error()
    lab.picture("02-interrupted")
    family = lab.run_until_a_server_starts()
    lab.menu("Kernel", "Restart Kernel…")
    lab.page.click(".jp-Dialog .jp-mod-accept")
    assert not psutil.wait_procs(family, timeout=40)[1]
    lab.page.wait_for_timeout(2000)  # the restarted kernel's own start
    assert not lab.servers()


def test_a_button_and_an_interrupt_stop_a_cell_and_an_error_says_what_to_do(lab: Lab):
    lab.open(
        write("button", [code(number, source) for number, source in enumerate((IMPORTS, WAIT, WAIT, REFUSED))])
    )
    lab.run_all()
    button = lab.page.locator("button:has-text('Stop and save')")
    button.wait_for(timeout=90_000)
    lab.until(lambda: lab.text(1) == "working\n", 60)
    button.click()
    lab.until(lambda: lab.text(2) == "working\n", 60)
    assert lab.text(1) == "working\nsaved\n"
    assert len(lab.pictures(1)) == len(lab.pictures(2)) == 1, "redrawn in place"
    assert lab.pictures(1) != lab.pictures(2), "the first cell's has a step more"
    lab.menu("Kernel", "Interrupt Kernel")
    lab.until(lambda: len(lab.errors()) == 1, 60)
    lab.until(lambda: lab.pictures(1) == lab.pictures(2), 60)
    lab.picture("stopped-and-told")
    assert lab.text(2) == "working\nsaved\n"
    assert lab.page.locator("button:has-text('Stopped')").count() == 2
    (error,) = lab.errors()
    told = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error["traceback"]))
    assert "temperature=-1.0 is below 0" in told
    assert "what to do: raise temperature" in told
    assert "Traceback" not in told
    assert len(told.splitlines()) < 8


@pytest.mark.skipif(not SOAK, reason="make soak: a quarter of an hour; headless they run in tests/notebooks")
@pytest.mark.parametrize("number", ["01", "04", "05"])
def test_the_others_run_too_from_top_to_bottom(lab: Lab, number: str):
    """In this order: 05 evaluates the head that 04 trained. Progress is bars and lines, no floods of logs."""
    lab.open(copy(number))
    lab.run_all()
    lab.finish(800)
    lab.picture(f"{number}-run")
    printed = [len(lab.text(cell).splitlines()) for cell in range(len(lab.state()["cells"]))]
    assert max(printed) <= 60, printed
    assert not lab.servers()
