"""Controls and live views for JupyterLab; each only binds what a pure function draws."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import DisplayHandle, display
from matplotlib.figure import Figure


def is_live() -> bool:
    """Whether somebody watches: a notebook that JupyterLab runs, not a headless one."""
    return "JPY_SESSION_NAME" in os.environ and "LABKIT_HEADLESS" not in os.environ


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
