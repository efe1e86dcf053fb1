"""What a server said, kept as it comes in a file of JSON lines."""

from __future__ import annotations

import contextlib
import errno
import json
import threading
from pathlib import Path
from typing import Any

from labkit import files


class Store:
    """Rows with a `key` in a JSON-lines file, appended as they come; a line cut short by a kill is ignored."""

    def __init__(self, path: Path) -> None:
        """Read what is there."""
        self.path = path
        self.lock = threading.Lock()
        self.rows: dict[str, dict[str, Any]] = {}
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                row = json.loads(line)
                self.rows[row["key"]] = row

    def add(self, row: dict[str, Any]) -> None:
        """Keep one row; raises DiskFull where there is no room."""
        with self.lock:
            self.rows[row["key"]] = row
            try:
                with self.path.open("ab") as file:
                    file.write(b"\n" + json.dumps(row).encode())  # the newline first: ends a line cut short
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise files.disk_full(self.path) from error
                raise
