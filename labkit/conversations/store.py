"""What a server said, kept as it comes in a file of JSON lines."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from labkit import files

WRITTEN = {"text": str, "finish_reason": str}  # what a row has, and of which kind
ANSWER = {"prompt_token_ids": list, "token_ids": list, **WRITTEN}


class Store:
    """Rows with a `key` in a JSON-lines file, appended as they come; a line cut short by a kill is ignored."""

    def __init__(self, path: Path, kinds: dict[str, type] = ANSWER) -> None:
        """Read what is there and has fields of these kinds."""
        self.path = path
        self.lock = threading.Lock()
        self.rows: dict[str, dict[str, Any]] = {}
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        for line in lines:
            row = parsed(line, kinds)
            if row is not None:
                self.rows[row["key"]] = row

    def add(self, row: dict[str, Any]) -> None:
        """Keep one row; raises DiskFull where there is no room."""
        with self.lock:
            self.rows[row["key"]] = row
            try:
                with self.path.open("ab", buffering=0) as file:  # one write: what another lab appends stays apart
                    file.write(b"\n" + json.dumps(row).encode())  # the newline first: ends a line cut short
            except OSError as error:
                if files.no_room(error):
                    raise files.disk_full(self.path) from error
                raise


def parsed(line: bytes, kinds: dict[str, type]) -> dict[str, Any] | None:
    """The row of a line: an answer, or a refusal; None for anything else, which is asked for again."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("key"), str):
        return None
    return row if "error" in row or is_sound(row, kinds) else None


def is_sound(row: dict[str, Any], kinds: dict[str, type] = ANSWER) -> bool:
    """Whether a row's fields are of these kinds, its lists of token ids."""
    if not all(isinstance(row.get(name), kind) for name, kind in kinds.items()):
        return False
    ids = [token for name, kind in kinds.items() if kind is list for token in row[name]]
    return all(type(token) is int and 0 <= token < 2**31 for token in ids)
