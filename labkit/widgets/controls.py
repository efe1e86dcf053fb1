"""Sliders and drop-downs over a drawing: a change draws again from what was computed before."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ipywidgets
import matplotlib as mpl
from IPython.display import Image, display
from matplotlib.figure import Figure

from labkit.widgets.picture import png

LABELS = {
    "k": "drafted tokens k",
    "n": "tokens n",
    "r": "reuse factor r",
    "budget": "expert budget (0: none)",
    "allreduce_us": "AllReduce (µs)",
    "acceptance_length": "acceptance length",
}
STYLE = {"description_width": "initial"}
TITLES = {"axes.titley": 1.0}  # right above the axes: to look for ticks there takes a layout


def is_live() -> bool:
    """Whether somebody watches: a notebook that JupyterLab runs, not a headless one."""
    return "JPY_SESSION_NAME" in os.environ and "LABKIT_HEADLESS" not in os.environ


@dataclass
class Control:
    """A drawing and the values that each of its arguments may take, the first of which it starts at.

    `draw` returns Axes or a Figure, or anything that displays, and computes only what the choice changes.
    """

    draw: Callable[..., Any]
    choices: dict[str, Sequence[Any] | ipywidgets.Widget] = field(default_factory=dict)

    @property
    def first(self) -> dict[str, Any]:
        """The values that it starts at."""
        chosen = self.choices.items()
        return {name: it.value if isinstance(it, ipywidgets.Widget) else it[0] for name, it in chosen}

    def drawn(self, **chosen: Any) -> Any:
        """The figure, or what else `draw` returns, for chosen values; the others are as at the start."""
        with mpl.rc_context(TITLES):
            made = self.draw(**(self.first | chosen))
        return getattr(made, "figure", made)

    def show(self) -> None:
        """Show it with its controls. Nothing where nobody watches: the static view above it is the whole story."""
        if not is_live():
            return
        made = {name: control(name, values) for name, values in self.choices.items()}
        row = ipywidgets.HBox(list(made.values()), layout=ipywidgets.Layout(flex_flow="row wrap"))
        display(ipywidgets.VBox([row, ipywidgets.interactive_output(self.redraw, made)]))

    def redraw(self, **chosen: Any) -> None:
        """Display the drawing for chosen values."""
        drawn = self.drawn(**chosen)
        display(Image(png(drawn)) if isinstance(drawn, Figure) else drawn)


def controls(draw: Callable[..., Any], **choices: Sequence[Any] | ipywidgets.Widget) -> None:
    """Show `draw` with a slider over each list (a drop-down where it holds words), or the given widget."""
    Control(draw, choices).show()


def control(name: str, values: Sequence[Any] | ipywidgets.Widget) -> ipywidgets.Widget:
    """One labelled control: a slider over a list's values in ascending order, starting at the first given.

    A list with words becomes a drop-down in its own order; a widget is taken as it is.
    """
    if isinstance(values, ipywidgets.Widget):
        return values
    words = any(isinstance(value, str) for value in values)
    kind = ipywidgets.Dropdown if words else ipywidgets.SelectionSlider
    options = {} if words else {"continuous_update": False}
    options |= {"options": list(dict.fromkeys(values)) if words else sorted(set(values))}
    return kind(value=values[0], description=LABELS.get(name, name), style=STYLE, layout=layout(), **options)


def layout() -> ipywidgets.Layout:
    """Room on both sides, so that a knob's figure is not taken for the next one's label."""
    return ipywidgets.Layout(margin="2px 24px 2px 4px")


def span(name: str, values: Sequence[Any]) -> ipywidgets.Widget:
    """A slider with two ends over values in ascending order; it starts at all of them."""
    ordered = sorted(set(values))
    return ipywidgets.SelectionRangeSlider(
        options=ordered,
        index=(0, len(ordered) - 1),
        description=LABELS.get(name, name),
        style=STYLE,
        layout=layout(),
        continuous_update=False,
    )
