"""Many requests to one server, several at a time: what came is kept, a dead server is an error that says so."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

import httpx

from labkit import engine, runs
from labkit.conversations.store import Store
from labkit.engine import bounds, urls
from labkit.errors import LabError

Job = TypeVar("Job")
TIMEOUT_S = 1800.0  # one answer of a long queue; a server that died refuses the connection at once


class ServerLost(LabError):
    """The server stopped answering in the middle of a step."""


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


def lost(server: Any, error: Exception, done: int, total: int, kept: Any) -> LabError:
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


def everything(
    jobs: list[Job],
    work: Callable[[httpx.Client, Job], None],
    server: Any,
    store: Store,
    *,
    concurrency: int,
    total: int,
    name: str,
) -> None:
    """Do every job, `concurrency` at a time, from plain threads (a notebook has its own loop).

    `total` is the number of requests that they make at most. Raises ServerLost or EngineDied; what `work` put
    into `store` stays.
    """
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="labkit-ask")
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    before = len(store.rows)
    made_with = urls.options(server.base_url) | {"timeout": TIMEOUT_S, "limits": limits}
    with httpx.Client(**made_with, event_hooks=bounds.HOOKS) as client:
        try:
            running = [pool.submit(work, client, job) for job in jobs]
            for future in runs.progress(as_completed(running), name, total=len(running)):
                future.result()
        except httpx.HTTPError as error:
            raise lost(server, error, len(store.rows) - before, total, store.path) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def post(client: httpx.Client, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The server's reply to one request; {"error": its reason} where it refuses it. Raises NoAnswer."""
    response = client.post(url, json=body)
    if 400 <= response.status_code < 500 and response.status_code not in (408, 429):  # those are for later
        return {"error": bounds.without_key(response.text[:300])}
    response.raise_for_status()
    return bounds.object_of(response)
