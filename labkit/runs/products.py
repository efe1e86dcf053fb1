"""What a finished stage leaves for people and later stages, and whether it is still there as it was left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Frames, figures, the data set, the head. Not the hidden states: terabytes that may go once the head is there.
KEPT = ("*.parquet", "*.png", "data/*.parquet", "head/*")


def sizes(folder: Path) -> dict[str, int]:
    """name in the stage's folder: bytes, of each product."""
    found = sorted({path for pattern in KEPT for path in folder.glob(pattern) if path.is_file()})
    return {str(path.relative_to(folder)): path.stat().st_size for path in found}


def lost(folder: Path, recorded: Any) -> list[str]:
    """The products of a record (`sizes`) that are gone or of another size; none where it names none."""
    known, found = recorded if isinstance(recorded, Mapping) else {}, sizes(folder)
    return [name for name, size in known.items() if found.get(name) != size]
