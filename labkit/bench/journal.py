"""Rows of a benchmark that is still running, on disk as each request ends: an interruption costs one request."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from labkit import files
from labkit.bench.rows import Row

Key = tuple[int, int, str]  # concurrency, repeat, prompt_id


def key(row: Row) -> Key:
    """Which request of a benchmark a row is of."""
    return int(row["concurrency"]), int(row["repeat"]), str(row["prompt_id"])


class Journal:
    """One JSON object a line; a last line that a kill or a full disk cut off is dropped."""

    def __init__(self, path: Path) -> None:
        """`path` may exist: its rows are kept."""
        self.path = path

    def rows(self) -> list[Row]:
        """The whole rows, the last one of each request; cuts a torn last line off the file."""
        if not self.path.exists():
            return []
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            os.truncate(self.path, len(whole))
        found = [row for row in map(parsed, whole.split(b"\n")) if row is not None]
        return list({key(row): row for row in found}.values())

    def append(self, row: Row) -> None:
        """Add a row and see it onto the disk; raises files.DiskFull."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(json.dumps(row, default=plain).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if files.no_room(error):
                raise files.disk_full(self.path) from error
            raise

    def discard(self) -> None:
        """Forget all rows."""
        self.path.unlink(missing_ok=True)


def parsed(line: bytes) -> Row | None:
    """The row of a line; None for one that holds none (a disk that lost power can leave zeros)."""
    try:
        row = json.loads(line)
        key(row)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return row


def plain(value: Any) -> Any:
    """Numpy's numbers and arrays as JSON has them."""
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else str(value)
