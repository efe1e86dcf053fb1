"""What a long step shows while it runs: a figure that is redrawn in place, a button that stops it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ipywidgets
import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import DisplayHandle, display
from matplotlib.figure import Figure

from labkit.widgets.controls import is_live


class LiveFigure:
    """A figure that is redrawn in place each time it is called with new data; headless it does nothing."""

    def __init__(self, draw: Callable[[pd.DataFrame], Figure]) -> None:
        """`draw` makes the figure from a frame; the same function draws the final one."""
        self.draw = draw
        self.handle: DisplayHandle | None = None

    def __call__(self, frame: pd.DataFrame) -> None:
        """Show the figure for `frame` where the last one was."""
        if not is_live() or frame.empty:
            return
        figure: Any = self.draw(frame)
        if self.handle is None:
            self.handle = display(figure, display_id=True)
        else:
            self.handle.update(figure)
        plt.close(figure)


@contextlib.contextmanager
def stop_button(label: str = "Stop and save") -> Iterator[threading.Event]:
    """A flag that a button sets while the block runs; headless a flag that nobody sets.

    JupyterLab from 4.4 with ipykernel from 7 sends a widget's messages to a thread of their own (subshells), so a
    click arrives while the cell is busy. With older ones it waits for the cell; interrupting the kernel does the
    same there: a training saves and stops.
    """
    stop = threading.Event()
    if not is_live():
        yield stop
        return
    button = ipywidgets.Button(description=label, icon="stop", button_style="warning")

    def clicked(_: ipywidgets.Button) -> None:
        stop.set()
        button.description, button.disabled = "Stopping …", True

    button.on_click(clicked)
    display(button)
    try:
        yield stop
    finally:
        button.description, button.disabled = "Stopped" if stop.is_set() else "Finished", True
