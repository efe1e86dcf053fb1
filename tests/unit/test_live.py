"""What a long step shows: redrawn in place, stopped by a button or an interrupt; errors that say what to do."""

import asyncio
import base64
import os
import threading

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
from jupyter_client.manager import start_new_kernel
from matplotlib.figure import Figure
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from labkit import widgets
from labkit.plots import training
from labkit.widgets import live


def until(stop: threading.Event) -> str:
    """Work that ends when it is told to."""
    assert stop.wait(20)
    return threading.current_thread().name


def test_headless_work_is_called_as_ever(headless):
    name = asyncio.run(
        widgets.stoppable(lambda word, stop: (word, stop.is_set(), threading.current_thread()), "a")
    )
    assert name == ("a", False, threading.main_thread())


def test_the_button_stops_the_work_that_the_cell_awaits(watched):
    async def cell() -> str:
        asyncio.get_running_loop().call_later(0.05, lambda: watched[0].click())
        return await widgets.stoppable(until)

    assert asyncio.run(cell()) == "labkit-work"
    (button,) = watched
    assert (button.description, button.disabled) == ("Stopped", True)


def test_an_interrupt_lets_the_work_end_by_itself(watched):
    async def cell() -> str:
        task = asyncio.ensure_future(widgets.stoppable(until))
        asyncio.get_running_loop().call_later(0.05, task.cancel)
        return await task

    assert asyncio.run(cell()) == "labkit-work"


def test_errors_of_the_work_are_the_cells_and_the_button_is_over(watched):
    def work(stop):
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(widgets.stoppable(work))
    assert (watched[0].description, watched[0].disabled) == ("Finished", True)


@pytest.mark.usefixtures("one_thread")
def test_a_real_training_is_saved_when_it_is_stopped(watched, tmp_path, monkeypatch):
    """The button of notebook 04, clicked after the first figure; run again it ends as one that nobody stopped."""
    import train_data

    from labkit import train

    monkeypatch.setattr(train.loop, "SHOW_EVERY_S", 0.0)
    made = train_data.make(tmp_path)
    with pytest.raises(train.Stopped, match=r"stopped after step 1 .*the stop flag"):
        asyncio.run(widgets.stoppable(train_data.fit, made, tmp_path / "cut", watch=lambda _: watched[0].click()))
    assert (tmp_path / "cut/checkpoint.safetensors").exists()
    for folder in ("cut", "whole"):
        asyncio.run(widgets.stoppable(train_data.fit, made, tmp_path / folder))
    train_data.assert_same(tmp_path / "whole", tmp_path / "cut")


def frame(length: int) -> pd.DataFrame:
    return pd.DataFrame({"x": range(length)})


def test_live_figure_draws_only_where_somebody_watches(headless):
    widgets.LiveFigure(lambda _: pytest.fail("drawn"))(frame(1))


def test_live_figure_is_redrawn_in_its_place(watched, monkeypatch):
    class Handle:
        update = watched.append

    def draw(data: pd.DataFrame, figure: Figure) -> Figure:
        figure.subplots().plot(data.x)
        assert not plt.get_fignums(), "the kernel would show and close it"
        return figure

    handle = Handle()
    monkeypatch.setattr(live, "display", lambda image, display_id: watched.append(image) or handle)
    shown = widgets.LiveFigure(draw)
    for length in (0, 1, 2):
        shown(frame(length))
    assert [image.data for image in watched] == [widgets.png(draw(frame(n), Figure())) for n in (1, 2)]


ROWS = """import time
import pandas as pd
from labkit import widgets
from labkit.plots import training

rows = pd.DataFrame({"step": [0, 1, 2], "loss": [3.0, 2.0, 1.5], "epoch": [0, 1, 2]})
rows["acceptance_length"] = [1, 1.5, 2]

def draw(frame, **given):
    figure = training.plot_progress(frame, **given)
    print("drawing", flush=True)
    time.sleep(0.5)
    return figure
"""
TRAIN = """show = widgets.LiveFigure(draw)
await widgets.stoppable(lambda stop: [show(rows[:2]), stop.wait(20), show(rows)]);
"""


@pytest.fixture(scope="module")
def kernel():
    """A kernel as JupyterLab starts one: pyplot's figures are shown after each message."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("LABKIT_HEADLESS", "MPLBACKEND")
    }
    manager, client = start_new_kernel(kernel_name="python3", env=environment | {"JPY_SESSION_NAME": "x.ipynb"})
    assert client.execute_interactive(ROWS, timeout=60)["content"]["status"] == "ok"
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def click(client, button: str) -> None:
    """What the page sends when a button is clicked."""
    content = {"comm_id": button, "data": {"method": "custom", "content": {"event": "click"}}}
    client.shell_channel.send(client.session.msg("comm_msg", content))


@pytest.mark.parametrize("clicked", [True, False], ids=["click", "interrupt"])
def test_a_training_stopped_while_it_draws_shows_each_figure_once_and_whole(kernel, clicked):
    """The kernel shows and closes pyplot's figures after a click, those that a thread still draws included."""
    manager, client = kernel
    asked, pictures, button, stopped = client.execute(TRAIN), [], "", False
    while True:
        message = client.get_iopub_msg(timeout=60)
        kind, content = message["msg_type"], message["content"]
        if kind == "comm_open" and content["data"]["state"].get("_model_name") == "ButtonModel":
            button = content["comm_id"]
        elif kind == "stream" and "drawing" in content["text"] and not stopped:
            click(client, button) if clicked else manager.interrupt_kernel()
            stopped = True
        elif "image/png" in content.get("data", {}):
            pictures.append((kind, base64.b64decode(content["data"]["image/png"])))
        elif content.get("execution_state") == "idle" and message["parent_header"].get("msg_id") == asked:
            break
    rows = pd.DataFrame({"step": [0, 1, 2], "loss": [3.0, 2.0, 1.5], "epoch": [0, 1, 2]})
    rows["acceptance_length"] = [1, 1.5, 2]
    expected = [widgets.png(training.plot_progress(part, figure=Figure())) for part in (rows[:2], rows)]
    assert pictures == list(zip(("display_data", "update_display_data"), expected, strict=True))


REFUSED = "from labkit.settings import NgramBaseline\nNgramBaseline.from_notebook({'temperature': -1.0})"


@pytest.mark.parametrize("headless", [True, False])
def test_a_failing_cell_says_what_to_do_and_fails(monkeypatch, headless):
    """In JupyterLab without the way there; headless with it. Either way the cell has failed."""
    monkeypatch.setenv("LABKIT_HEADLESS", "1") if headless else monkeypatch.delenv(
        "LABKIT_HEADLESS", raising=False
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(REFUSED)])
    with pytest.raises(CellExecutionError, match=r"temperature=-1\.0 is below 0") as raised:
        NotebookClient(notebook, kernel_name="python3", timeout=60).execute()
    assert raised.value.ename == "BadParameter"
    (output,) = [output for output in notebook.cells[0].outputs if output.output_type == "error"]
    told = "\n".join(output.traceback)
    assert "what to do: raise temperature" in told
    assert ("Traceback" in told) == headless
