"""What a server said, kept as it comes in a file of JSON lines."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from labkit import files

ANSWER = {"prompt_token_ids": list, "token_ids": list, "text": str, "finish_reason": str}


class Store:
    """Rows with a `key` in a JSON-lines file, appended as they come; a line cut short by a kill is ignored."""

    def __init__(self, path: Path) -> None:
        """Read what is there."""
        self.path = path
        self.lock = threading.Lock()
        self.rows: dict[str, dict[str, Any]] = {}
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        for line in lines:
            row = parsed(line)
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


def parsed(line: bytes) -> dict[str, Any] | None:
    """The row of a line: an answer, or a refusal; None for anything else, which is asked for again."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("key"), str):
        return None
    return row if "error" in row or is_answer(row) else None


def is_answer(row: dict[str, Any]) -> bool:
    """Whether a row has what an answer has, of the right kinds."""
    if not all(isinstance(row.get(name), kind) for name, kind in ANSWER.items()):
        return False
    return all(type(token) is int and 0 <= token < 2**31 for token in row["prompt_token_ids"] + row["token_ids"])
