"""Pictures of figures: what savefig(bbox_inches="tight") shows, with texts that are drawn once."""

import io

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from labkit import widgets
from labkit.plots.sweep import plot_sweep
from labkit.widgets import picture


def figure_of(k: int | None = None) -> Figure:
    """Lines, bands, rotated text and a legend beside the axes."""
    table = pd.DataFrame({"variant": ["eagle3"] * 3 + ["ngram"] * 3, "k": [1, 3, 5] * 2})
    table["speedup"] = table["predicted_speedup"] = 1 + np.arange(6) / 10
    table = table.assign(speedup_low=table["speedup"] - 0.1, speedup_high=table["speedup"] + 0.1)
    return plot_sweep(table, chosen=k, where="all prompts").figure


def test_a_picture_is_the_one_that_savefig_cuts_tight():
    """But for the edge: a legend without a frame has room around it that no ink fills."""
    pictures = []
    for save in (widgets.png, tight):
        pictures.append(plt.imread(io.BytesIO(save(figure_of()))))
    one, two = pictures
    assert all(abs(a - b) <= 8 for a, b in zip(one.shape, two.shape, strict=True)), (one.shape, two.shape)
    dark = [int((picture[..., :3].min(axis=2) < 0.5).sum()) for picture in pictures]
    assert dark[0] == pytest.approx(dark[1], rel=0.02), "nothing was cut off"
    assert not plt.get_fignums()


def tight(figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    plt.close(figure)
    return buffer.getvalue()


def test_a_picture_with_little_room_is_cut_tight_all_the_same():
    pictures = []
    for save in (widgets.png, tight):
        figure = figure_of()
        figure.text(-0.3, 0.5, "far out, " * 5)
        pictures.append(plt.imread(io.BytesIO(save(figure))))
    assert pictures[0].shape == pictures[1].shape
    assert pictures[0].shape[1] > 800 + 100 * picture.ROOM


def test_a_text_that_was_drawn_before_is_copied():
    """The same picture, whether its texts are drawn for the first time or not, whatever was drawn between."""
    picture.text_image.cache_clear()
    first = widgets.png(figure_of(1))
    widgets.png(figure_of(3))
    drawn = picture.text_image.cache_info().misses
    assert widgets.png(figure_of(1)) == first
    assert picture.text_image.cache_info().misses == drawn > 10


@pytest.mark.parametrize("angle", [0, 30, 90, 180, 270])
@pytest.mark.parametrize("colour", [(0, 0, 0, 1), (0.8, 0.2, 0, 0.5)])
def test_a_copied_text_is_the_one_that_matplotlib_draws(angle, colour):
    """Blending twice in whole numbers rounds twice."""
    pictures = []
    for kind in (picture.Renderer, RendererAgg):
        renderer = kind(200, 200, 100)
        gc = renderer.new_gc()
        gc.set_foreground(colour, isRGBA=True)
        for at, words in ((60, "gypsum, 12.5 ms"), (90, "j")):
            renderer.draw_text(gc, 100, at, words, FontProperties(size=10), angle)
        pictures.append(np.asarray(renderer.buffer_rgba()).astype(int))
    one, two = pictures
    assert (two[..., 3] > 0).sum() > 300
    assert abs(one[..., 3] - two[..., 3]).max() <= 2
    assert abs((one - two)[two[..., 3] > 20]).max() <= 6
