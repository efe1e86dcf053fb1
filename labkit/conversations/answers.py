"""The target answers the prompts through its server; each answer is kept as it comes."""

from __future__ import annotations

import contextlib
import errno
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx
import pandas as pd

from labkit import engine, files, runs
from labkit.errors import LabError

TIMEOUT_S = 1800.0  # one answer of a long queue; a server that died refuses the connection at once


class ServerLost(LabError):
    """The server stopped answering in the middle of a step."""


class TooFewAnswers(LabError):
    """The server refused so many requests that what is left is no data set."""


@contextlib.contextmanager
def opened(server: Any) -> Iterator[Any]:
    """A server from what a step was given: a Server, an address, or a call that starts one (`engine.serve`)."""
    if isinstance(server, str):
        yield engine.attach(server)
    elif callable(server):
        with server() as started:
            yield started
    else:
        yield server


def lost(server: Any, error: Exception, done: int, total: int, kept: Path) -> LabError:
    """The error for a server that died after `done` of `total` requests; `kept` holds what was finished.

    EngineDied with the end of its log where the lab started the server, else ServerLost.
    """
    for _ in range(10):  # its process ends a moment after its connections do
        try:
            server.check()
        except LabError as died:
            return died
        time.sleep(0.3)
    reason = f"{type(error).__name__}: {error}"
    return ServerLost(
        f"the server at {server.base_url} failed after {done} of {total} requests ({reason})",
        f"run again: finished work is kept in {kept} and only the missing part is asked for",
    )


class Store:
    """Answers in a JSON-lines file, appended as they come; a line cut short by a kill is ignored."""

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
        """Keep one answer; raises DiskFull where there is no room."""
        with self.lock:
            self.rows[row["key"]] = row
            try:
                with self.path.open("ab") as file:
                    file.write(b"\n" + json.dumps(row).encode())  # the newline first: ends a line cut short
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise files.disk_full(self.path) from error
                raise


def ask(client: httpx.Client, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """One chat completion with its token ids; a request that the server refuses gives a row with `error`."""
    response = client.post(f"{url}/chat/completions", json=body)
    if 400 <= response.status_code < 500:
        return {"error": response.text[:300]}
    response.raise_for_status()
    value = response.json()
    choice = value["choices"][0]
    if not value.get("prompt_token_ids") or choice.get("token_ids") is None:
        raise LabError(
            f"the server at {url} returns no token ids",
            "use vLLM 0.11 or newer as the server: tokens and loss masks have to be exact",
        )
    return {
        "prompt_token_ids": value["prompt_token_ids"],
        "token_ids": choice["token_ids"],
        "finish_reason": choice["finish_reason"],
        "text": choice["message"].get("content") or "",
    }


def ask_and_keep(client: httpx.Client, url: str, body: dict[str, Any], store: Store, key: str) -> None:
    """Ask, and store the answer before anything else can go wrong."""
    store.add({"key": key, **ask(client, url, body)})


def generate(
    prompts: pd.DataFrame,
    server: Any,
    store_path: Path,
    *,
    model_key: str,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    concurrency: int = 32,
) -> list[dict[str, Any]]:
    """An answer for every prompt, in order; only those that `store_path` lacks are asked for.

    `server` as `opened` takes it: a call that starts one is only made when something is missing. `model_key`
    tells one target from another in the store. Raises ServerLost, TooFewAnswers, DiskFull.
    """
    store = Store(store_path)
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    keys = [files.digest([model_key, options, prompt_id]) for prompt_id in prompts.prompt_id]
    wanted = {
        key: {"messages": list(messages), "return_token_ids": True, **options}
        for key, messages in zip(keys, prompts.messages, strict=True)
        if key not in store.rows or "error" in store.rows[key]
    }
    if wanted:
        store_path.parent.mkdir(parents=True, exist_ok=True)
        with opened(server) as running:
            request(wanted, running, store, concurrency)
    answers = [store.rows[key] for key in keys]
    refuse_if_broken(answers)
    return answers


def request(wanted: dict[str, dict[str, Any]], server: Any, store: Store, concurrency: int) -> None:
    """Send the wanted requests, `concurrency` at a time, from plain threads (a notebook has its own loop)."""
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="labkit-ask")
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    before = len(store.rows)
    with httpx.Client(timeout=TIMEOUT_S, limits=limits, trust_env=False) as client:
        try:
            work = [
                pool.submit(ask_and_keep, client, server.base_url, {"model": server.model, **body}, store, key)
                for key, body in wanted.items()
            ]
            for future in runs.progress(as_completed(work), "answers", total=len(work)):
                future.result()
        except httpx.HTTPError as error:
            done = len(store.rows) - before
            raise lost(server, error, done, len(wanted), store.path) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def refuse_if_broken(answers: list[dict[str, Any]]) -> None:
    """Raise TooFewAnswers when half of the requests or more were refused or came back empty."""
    bad = [answer for answer in answers if not answer.get("token_ids")]
    if 2 * len(bad) >= len(answers):
        reason = next((answer["error"] for answer in bad if "error" in answer), "the answers are empty")
        raise TooFewAnswers(
            f"{len(bad)} of {len(answers)} prompts got no answer; the first reason: {reason}",
            "lower max_tokens or raise max_model_len, or look into the server's log",
        )
