"""Controls and live views for JupyterLab; each only binds what a pure function draws."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets
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


def controls(draw: Callable[..., Any], **choices: Sequence[Any] | ipywidgets.Widget) -> ipywidgets.Widget | None:
    """Controls over a drawing: each change calls `draw` with the chosen values and shows what it returns.

    A list becomes a slider over its values in ascending order (a drop-down where they are words), starting at the
    first given; a widget is taken as it is. `draw` returns Axes, a Figure, or anything that displays, and computes
    nothing that the choice does not change. None where nobody watches: headless, the static view above the control
    is the whole story.
    """
    if not is_live():
        return None
    made = {name: control(name, values) for name, values in choices.items()}

    def show(**chosen: Any) -> None:
        drawn = draw(**chosen)
        figure = getattr(drawn, "figure", drawn)
        display(figure)
        if isinstance(figure, Figure):
            plt.close(figure)

    return ipywidgets.VBox([*made.values(), ipywidgets.interactive_output(show, made)])


def control(name: str, values: Sequence[Any] | ipywidgets.Widget) -> ipywidgets.Widget:
    """One labelled control over a list of values, or the given widget with a label."""
    label = name.replace("_", " ")
    if isinstance(values, ipywidgets.Widget):
        return values
    words = any(isinstance(value, str) for value in values)
    kind = ipywidgets.Dropdown if words else ipywidgets.SelectionSlider
    options = {} if words else {"continuous_update": False}
    style = {"description_width": "initial"}
    options |= {"options": list(values) if words else sorted(set(values))}
    return kind(value=values[0], description=label, style=style, **options)
