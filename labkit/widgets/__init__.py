"""Controls and live views for JupyterLab; each only binds what a pure function draws.

controls    sliders over a drawing, and what shows it
picture     a figure's picture, drawn once
profile     notebook 01: ranks and steps of a breakdown
lookup      notebook 02: k, lookup and category over the simulated grid
activation  notebook 03: n and layer of expert activation
live        notebook 04: loss and acceptance while a head trains, a button that stops it
sweep       notebook 05: k, streams and category of a sweep, prediction beside measurement
"""

from __future__ import annotations

from labkit.widgets.activation import activation
from labkit.widgets.controls import Control, control, controls, is_live
from labkit.widgets.live import LiveFigure, stoppable
from labkit.widgets.lookup import lookup
from labkit.widgets.picture import png
from labkit.widgets.profile import breakdown
from labkit.widgets.sweep import sweep

__all__ = [
    "Control",
    "LiveFigure",
    "activation",
    "breakdown",
    "control",
    "controls",
    "is_live",
    "lookup",
    "png",
    "stoppable",
    "sweep",
]
