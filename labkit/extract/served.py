"""States from a vLLM server: a completion of one token a row; the file that comes of it is taken over."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from safetensors import SafetensorError

from labkit import conversations, files
from labkit.engine import bounds, urls
from labkit.engine.server import entry_at
from labkit.errors import LabError
from labkit.extract import record

if TYPE_CHECKING:
    from labkit.extract.states import Order

TIMEOUT_S = 1800.0
MARK = "labkit-"  # in the name of every request and so of every file that the server writes for us


class NoStates(LabError):
    """The server answered, but gave no hidden states."""


class Source:
    """A server that is asked for rows. As a context: failures get their cause, files nobody took over go."""

    def __init__(self, server: Any, order: Order, concurrency: int) -> None:
        """`order` says what is wanted; no more than `concurrency` rows are asked for at a time."""
        self.server, self.order = server, order
        self.name = f"{MARK}{files.digest([order.out_dir.resolve(), order.shard])}"
        self.session = secrets.token_hex(4)
        self.swept: set[Path] = set()
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        made_with = urls.options(server.base_url) | {"timeout": TIMEOUT_S, "limits": limits}
        self.client = httpx.Client(**made_with, event_hooks=bounds.HOOKS)

    def staging(self) -> list[Path]:
        """The folder that the server writes to, where the lab started it."""
        storage = (getattr(self.server, "options", None) or {}).get("storage")
        return [Path(storage)] if storage else []

    def __enter__(self) -> Source:
        """Refuse rows that the server cannot take, before the first; remove what a killed run left there."""
        try:
            self.refuse_long_rows()
        except NoStates:
            self.client.close()
            raise
        for folder in self.staging():
            self.sweep(folder)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Close; a failure of the connection or of a file becomes one that says what became of the server."""
        self.client.close()
        for folder in self.swept:
            sweep(folder, f"*{self.name}-*")
        if isinstance(error, (httpx.HTTPError, OSError, SafetensorError)):
            files.require_space(self.order.out_dir, 0)  # a server that cannot write says so only in its log
            done = sum(record.states_path(self.order.out_dir, row).exists() for row in self.order.rows)
            total = len(self.order.rows)
            raise conversations.lost(self.server, error, done, total, self.order.out_dir) from error

    def refuse_long_rows(self) -> None:
        """Raises NoStates where a row and the token that is asked for do not fit the server's context."""
        context = self.context()
        long = [row for row in self.order.rows if len(self.order.tokens[row]) >= context]
        if long:
            longest = max(len(self.order.tokens[row]) for row in long)
            raise NoStates(
                f"{len(long)} of {len(self.order.rows)} rows, row {long[0]} the first, are too long for the "
                f"context of {context:.0f} tokens of the server at {self.server.base_url}; the longest has "
                f"{longest}",
                f"start it with max_model_len={longest + 1}, or cut the rows; nothing was asked for yet",
            )

    def context(self) -> float:
        """The server's max_model_len; infinite where it does not say (another engine than vLLM)."""
        entry = entry_at(self.server.base_url, self.server.model)
        with contextlib.suppress(ValueError, TypeError):
            return float(entry.get("max_model_len", math.inf))
        return math.inf

    def fetch(self, row: int) -> None:
        """One row: ask, wait for the file, check it and move it to its name."""
        path = self.ask(row)
        if path.parent not in self.swept:
            self.sweep(path.parent)
        with locked(path, self.server):
            self.order.move(row, path)
        Path(f"{path}.lock").unlink(missing_ok=True)

    def ask(self, row: int) -> Path:
        """The file that the server writes for a row; raises NoStates."""
        ids = self.order.tokens[row].tolist()
        name = f"{self.name}-{self.session}-{row}"
        body = {"model": self.server.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "request_id": name}
        response = self.client.post(f"{self.server.base_url}/completions", json=body)
        if 400 <= response.status_code < 500:
            raise NoStates(
                f"row {row} ({len(ids)} tokens) was refused: {bounds.without_key(response.text[:300])}",
                "raise max_model_len to one more than the longest row, or cut the rows",
            )
        response.raise_for_status()
        told = bounds.object_of(response).get("kv_transfer_params")
        path = told.get("hidden_states_path") if isinstance(told, dict) else None
        if not path or not isinstance(path, str):
            raise NoStates(
                f"the server at {self.server.base_url} returns no hidden_states_path",
                "start it as variant `extract` (method extract_hidden_states and a hidden-states connector)",
            )
        if name not in Path(path).name:  # what it names is read, moved and removed: no other file may be
            raise NoStates(
                f"the server at {self.server.base_url} names {path!r:.200} for request {name}, which is not that "
                "request's file",
                "use vLLM's hidden-states connector, or the lab's: both put the request's id into the name",
            )
        return Path(path)

    def sweep(self, folder: Path) -> None:
        """Remove files that earlier runs of this very extraction asked for and did not live to take over."""
        self.swept.add(folder)
        sweep(folder, f"*{self.name}-*", but=f"-{self.session}-")


def sweep(folder: Path, pattern: str, but: str = "") -> None:
    """Remove the files of a pattern, those with `but` in their name left alone, and their locks."""
    for path in folder.glob(pattern) if folder.is_dir() else []:
        if not but or but not in path.name:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path, server: Any) -> Iterator[None]:
    """Wait until the server has written the file; it holds a lock beside it until then."""
    try:
        file = os.open(f"{path}.lock", os.O_RDONLY)
    except FileNotFoundError:
        raise NoStates(
            f"the server wrote {path}, which is not on this machine's disk",
            "run the server on this machine, or share the folder that it writes to",
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield
    finally:
        os.close(file)
