"""A figure's picture: laid out and drawn once, cut to what is on it, and a text that was drawn before is copied.

Most of what a redraw costs is text, most of which stays as it was: a renderer that outlives its figure knows how
wide a text is, and `text_image` how it looks.
"""

from __future__ import annotations

import functools
import io
import math
import threading
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.transforms import Bbox
from PIL import Image

ROOM, EDGE = 2.0, 0.1  # inches around a figure, for what stands beside its axes; inches left around what is on it
TEXTS, SIZES = 1000, 8  # remembered: texts' images, figure sizes' renderers
DRAWING = threading.Lock()  # a training draws in a thread beside the controls


def png(figure: Figure) -> bytes:
    """The figure's picture, cut to what is on it, and the figure closed.

    savefig(bbox_inches="tight") shows the same, but lays out and draws twice.
    """
    width, height = figure.get_size_inches()
    room = Bbox([[-ROOM, -ROOM], [width + ROOM, height + ROOM]])
    buffer = io.BytesIO()
    with DRAWING:
        canvas = Canvas(figure)
        canvas.print_figure(io.BytesIO(), format="raw", bbox_inches=room)
        pixels = np.asarray(canvas.buffer_rgba())
        packed = pixels.view(np.uint32)[..., 0]
        rows, columns = extent(packed != packed[0, 0])
        if rows.start and columns.start and rows.stop < len(packed) and columns.stop < packed.shape[1]:
            picture = Image.fromarray(pixels[padded(rows, figure.dpi), padded(columns, figure.dpi)])
            picture.save(buffer, "png", compress_level=1)
        else:  # there was not room enough
            figure.savefig(buffer, format="png", bbox_inches="tight")
    plt.close(figure)
    return buffer.getvalue()


def padded(stretch: slice, dpi: float) -> slice:
    """A stretch of pixels with an edge on both sides."""
    edge = round(EDGE * dpi)
    return slice(max(stretch.start - edge, 0), stretch.stop + edge)


def extent(inked: np.ndarray) -> tuple[slice, slice]:
    """The rows and the columns between the first and the last pixel with ink; all where none has."""
    found = [np.flatnonzero(inked.any(axis=axis)) for axis in (1, 0)]
    if not len(found[0]):
        return slice(0, inked.shape[0]), slice(0, inked.shape[1])
    rows, columns = (slice(int(at[0]), int(at[-1]) + 1) for at in found)
    return rows, columns


class Renderer(RendererAgg):
    """Agg that copies a text that it has drawn before; texts lie on whole pixels, where each looks the same."""

    def draw_text(
        self,
        gc: Any,
        x: float,
        y: float,
        s: str,
        prop: FontProperties,
        angle: float,
        ismath: bool = False,
        mtext: Any = None,
    ) -> None:
        """Draw a text that begins at a position, pixels from the upper left."""
        if ismath or gc.get_clip_path()[0] is not None:
            super().draw_text(gc, x, y, s, prop, angle, ismath, mtext)
            return
        image, left, below = text_image(s, prop.copy(), angle, gc.get_rgb(), self.dpi)
        plain = self.new_gc()  # the image has the colour and the transparency
        plain.set_clip_rectangle(gc.get_clip_rectangle())
        self.draw_image(plain, round(x) + left, int(self.height) - round(y) + below, image)
        plain.restore()


@functools.lru_cache(TEXTS)
def text_image(
    s: str, prop: FontProperties, angle: float, colour: tuple[float, ...], dpi: float
) -> tuple[np.ndarray, int, int]:
    """A text's RGBA, lowest row first, and its lower left corner from where it begins: pixels right, pixels up."""
    width, height, _ = renderer_of(64, 64, dpi).get_text_width_height_descent(s, prop, ismath=False)
    reach = math.ceil(math.hypot(width, height)) + 4
    before, above = (4, math.ceil(height) + 4) if angle == 0 else (reach, reach)
    renderer = RendererAgg(before + reach, 2 * above, dpi)
    gc = renderer.new_gc()
    gc.set_foreground(colour, isRGBA=True)
    renderer.draw_text(gc, before, above, s, prop, angle)
    pixels = np.asarray(renderer.buffer_rgba())
    rows, columns = extent(pixels[..., 3] > 0)
    return pixels[rows, columns][::-1].copy(), columns.start - before, above - rows.stop


@functools.lru_cache(SIZES)
def renderer_of(width: int, height: int, dpi: float) -> Renderer:
    """A renderer of a size in pixels, which all figures of it share."""
    return Renderer(width, height, dpi)


class Canvas(FigureCanvasAgg):
    """A canvas that shares its renderer with others of its size."""

    def get_renderer(self) -> Renderer:
        """The renderer."""
        self.renderer = renderer_of(*self.get_width_height(physical=True), self.figure.dpi)
        return self.renderer
