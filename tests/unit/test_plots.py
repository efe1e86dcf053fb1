"""The colours of figures are told apart by every kind of colour vision."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from labkit import prediction
from labkit.plots import serving
from labkit.plots.arms import arms
from labkit.plots.profile import RANKS, STYLE
from labkit.plots.serving import COLOURS

# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as it is seen without one kind of cone.
SEEN = {
    "all cones": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
TELLABLE = 10.0  # CIELAB distance; 2.3 is just noticeable side by side


def linear(colour: str) -> np.ndarray:
    """Linear RGB of an sRGB colour."""
    value = np.array(to_rgb(colour))
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB (D65) of linear RGB."""
    ratio = XYZ @ np.clip(rgb, 0, 1) / (XYZ @ np.ones(3))
    root = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


@pytest.mark.parametrize("vision", SEEN)
@pytest.mark.parametrize(
    "palette", [COLOURS, RANKS, list(dict.fromkeys(colour for colour, _hatch in STYLE.values()))], ids=len
)
def test_colours_are_told_apart(palette, vision):
    seen = [lab(np.array(SEEN[vision]) @ linear(colour)) for colour in palette]
    for one, two in itertools.combinations(range(len(palette)), 2):
        apart = float(np.linalg.norm(seen[one] - seen[two]))
        assert apart > TELLABLE, (palette[one], palette[two], apart)


@pytest.mark.parametrize("vision", SEEN)
def test_lines_of_a_figure_stand_out_from_the_page(vision):
    for colour in COLOURS:
        apart = np.linalg.norm(lab(np.array(SEEN[vision]) @ linear(colour)) - lab(np.ones(3)))
        assert apart > 25, colour


SUMMARY = pd.DataFrame({"variant": ["baseline", "ngram"] * 2, "category": ["a", "a", "b", "b"], "tok_s": 9.0})
SUMMARY = SUMMARY.assign(tokens_reasoning=3.0, tokens_answer=5.0)
PAIRS = pd.DataFrame({"category": ["a", "b", "b"], "ratio": [1.0, 2.0, 3.0]})
SPEEDUP = pd.DataFrame([{"speedup": 2.0, "speedup_low": 1.0, "speedup_high": 3.0}])
POSITIONS = pd.DataFrame({"source": "engine", "position": [1, 2], "unconditional_rate": [0.9, 0.8]})


@pytest.fixture
def axes():
    """Axes that are closed again."""
    figure, found = plt.subplots(figsize=(8, 3.5))
    yield found
    plt.close(figure)


def beside(**values) -> pd.DataFrame:
    """prediction.beside of two categories; what is not given is NaN."""
    empty = dict.fromkeys(prediction.COLUMNS, np.nan) | {"predicted": 1.2}
    return pd.DataFrame([empty | {"category": name} | values for name in ("all prompts", "a")])


DRAWN = {
    "rates": lambda ax: serving.plot_rates(SUMMARY, ax=ax),
    "tokens": lambda ax: serving.plot_tokens(SUMMARY[::2], ax=ax),
    "acceptance": lambda ax: serving.plot_acceptance(POSITIONS, ax=ax),
    "ratios": lambda ax: serving.plot_ratios(PAIRS, SPEEDUP, ax=ax),
    "prediction": lambda ax: serving.plot_prediction(beside(measured=1.1), ax=ax),
}


@pytest.mark.parametrize("name", DRAWN)
def test_no_legend_covers_what_is_drawn(name, axes):
    DRAWN[name](axes)
    axes.figure.canvas.draw()
    legend, inside = axes.get_legend().get_window_extent(), axes.get_window_extent()
    assert legend.x0 >= inside.x1


def test_nothing_measured_has_no_mark_and_no_legend(axes):
    serving.plot_prediction(beside(), ax=axes)
    assert len(axes.containers) == 1
    assert axes.get_legend() is None
    assert "not measured" in axes.get_title()


def test_without_an_interval_there_is_no_band(axes):
    serving.plot_ratios(PAIRS, SPEEDUP.assign(speedup_low=np.nan, speedup_high=np.nan), ax=axes)
    assert "95% interval" not in axes.get_legend_handles_labels()[1]
    serving.plot_prediction(beside(measured=1.1), ax=axes)
    for bars in axes.containers:
        for line in bars.lines[2]:
            assert all(np.ptp(segment[:, 0]) == 0 for segment in line.get_segments()), "a point, no bar"


def test_an_interval_of_equal_values_has_arms_of_no_length():
    """The ends of a bootstrap over equal values can lie a last bit on the wrong side; matplotlib raises there."""
    middle = pd.Series([1.8, 1.8, 2.0, 1.0])
    low, high = pd.Series([1.8 + 4e-16, 1.8, 1.5, np.nan]), pd.Series([1.8, 1.8 - 4e-16, 2.5, np.nan])
    assert [arm.tolist() for arm in arms(middle, low, high)] == [[0, 0, 0.5, 0], [0, 0, 0.5, 0]]
