"""What a long step shows while it runs: a figure that is redrawn in place, a button that stops it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import ipywidgets
import pandas as pd
from IPython.display import DisplayHandle, Image, display
from matplotlib.figure import Figure

from labkit.widgets.controls import is_live
from labkit.widgets.picture import png

Result = TypeVar("Result")
TICK_S = 0.2


class LiveFigure:
    """A figure that is redrawn in place each time it is called with new data; headless it does nothing."""

    def __init__(self, draw: Callable[..., Figure]) -> None:
        """`draw(frame, figure=...)` draws a frame onto the figure; without one it makes the final figure."""
        self.draw = draw
        self.handle: DisplayHandle | None = None

    def __call__(self, frame: pd.DataFrame) -> None:
        """Show the figure for `frame` where the last one was."""
        if not is_live() or frame.empty:
            return
        # Not a figure of pyplot's: those the kernel shows and closes after each message of a widget, such as a
        # click on the stop button, also while the thread of a training is drawing one.
        picture = Image(png(self.draw(frame, figure=Figure())))
        if self.handle is None:
            self.handle = display(picture, display_id=True)
        else:
            self.handle.update(picture)


async def stoppable(work: Callable[..., Result], *given: Any, label: str = "Stop and save", **more: Any) -> Result:
    """What `work(*given, stop=..., **more)` returns; `stop` is a flag that a button, or an interrupt, sets.

    Where somebody watches, the work runs in a thread and the cell awaits it, so that the kernel hears the click:
    while a cell computes it hears nothing. An interrupt sets the flag, too, and waits until the work has ended by
    itself. Headless the work runs as if it was called here. Raises what the work raises.
    """
    stop = threading.Event()
    if not is_live():
        return work(*given, stop=stop, **more)
    with stop_button(stop, label):
        outcome = in_thread(lambda: work(*given, stop=stop, **more))
        try:
            while not outcome.done():  # a loop that sleeps would not wake for an interrupt
                await asyncio.sleep(TICK_S)
        except asyncio.CancelledError:  # as which ipykernel delivers one
            stop.set()
        return await asyncio.wrap_future(outcome)


def in_thread(work: Callable[[], Result]) -> concurrent.futures.Future[Result]:
    """The outcome of work in a thread that dies with the kernel; what it displays goes below the present cell."""
    outcome: concurrent.futures.Future[Result] = concurrent.futures.Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            outcome.set_result(context.run(work))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="labkit-work", daemon=True).start()
    return outcome


@contextlib.contextmanager
def stop_button(stop: threading.Event, label: str) -> Iterator[None]:
    """A button that sets the flag while the block runs, and says how it ended."""
    button = ipywidgets.Button(description=label, icon="stop", button_style="warning")

    def clicked(_: ipywidgets.Button) -> None:
        stop.set()
        button.description, button.disabled = "Stopping …", True

    button.on_click(clicked)
    display(button)
    try:
        yield
    finally:
        button.description, button.disabled = "Stopped" if stop.is_set() else "Finished", True
