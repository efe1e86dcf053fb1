"""Pictures of a page: what they show in words, and the same picture in fewer bytes."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image, UnidentifiedImageError

Image.MAX_IMAGE_PIXELS = 60_000_000  # a run may come from somebody else


def title(path: Path) -> str:
    """What the figure's metadata say that it shows; "" where they say nothing."""
    try:
        with Image.open(path) as image:
            return str(image.info.get("Title", "")).strip()
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError):
        return ""


def smaller(content: bytes, width: int) -> bytes:
    """A PNG at most `width` pixels wide, in a palette where that takes fewer bytes; as it was where nothing helps.

    Plots have few colours: a palette of 256 loses nothing that is seen.
    """
    try:
        with Image.open(io.BytesIO(content)) as opened:
            image = opened.convert("RGBA")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError):
        return content
    if image.width > width:
        image = image.resize((width, max(1, round(image.height * width / image.width))), Image.Resampling.LANCZOS)
    paper = Image.new("RGBA", image.size, "white")
    image = Image.alpha_composite(paper, image).convert("RGB")
    packed = io.BytesIO()
    image.quantize(256, dither=Image.Dither.NONE).save(packed, "PNG", optimize=True)
    return min((packed.getvalue(), content), key=len)
