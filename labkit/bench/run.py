"""The benchmark itself: any OpenAI-compatible server, any prompts, a row a request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import httpx
import pandas as pd

from labkit import files
from labkit.bench import client, rows
from labkit.bench.journal import Journal, key
from labkit.bench.plan import Plan, Workload
from labkit.bench.prompts import Prompt, as_prompts
from labkit.bench.rows import Row
from labkit.engine.urls import base_url, get, root_url
from labkit.errors import LabError
from labkit.progress import progress

# Fields that the lab's own arguments set, or that would make of one stream something else than one answer.
OWN_FIELDS = {"messages", "prompt", "stream", "stream_options"} | {"model", "max_tokens", "temperature", "seed"}
SEVERAL = ("n", "best_of", "echo")
ended: list[float] = []  # when the last run of this process ended: the next one may have to wait


class BadRun(LabError):
    """A benchmark with numbers that make no sense, such as no repeats."""


class NoModel(LabError):
    """The server does not say which model it serves."""


class MeasurementFailed(LabError):
    """A benchmark that measured nothing, or only a part; `rows` holds what there is, errors included."""

    def __init__(self, what: str, remedy: str, rows: pd.DataFrame) -> None:
        """Keep the rows beside the message."""
        super().__init__(what, remedy)
        self.rows = rows


class ServerGone(MeasurementFailed):
    """The server stopped answering while it was measured."""


class NothingMeasured(MeasurementFailed):
    """Every request failed although the server answers."""


def run(
    server: Any,
    prompts: pd.DataFrame | Iterable[Any],
    *,
    model: str | None = None,
    max_tokens: int,
    repeats: int = 3,
    warmup: int = 1,
    concurrency: int | Sequence[int] = 1,
    temperature: float = 0.0,
    seed: int = 0,
    variant: str = "",
    timeout_s: float = 600.0,
    extra_body: Mapping[str, Any] | None = None,
    shuffle: bool = True,
    unique_prompts: bool = False,
    cooldown_s: float = 0.0,
    journal: Path | str | None = None,
) -> pd.DataFrame:
    """Send every prompt `repeats` times and return a row a request (columns: bench.rows.COLUMNS).

    `server` is an engine.Server or an address in any form; `prompts` are rows of bench.prompts, message lists
    (chat), or strings and token-id lists (plain completions). `concurrency`: requests in flight, or several
    levels, measured one after the other (column `concurrency`). In each repeat the prompts go out in another
    order, drawn from `seed`, so that drift loads no category; `shuffle=False` keeps theirs.

    Repeats must not be served from a prefix cache: the lab's own servers run without one, others get a fresh
    cache_salt with each request (vLLM), and `tokens_cached` shows what was cached all the same where the server
    tells; `unique_prompts` puts a random mark before each prompt, for servers that know no salt. `cooldown_s`
    lies between levels, and between this run and the one before it in this process. With temperature > 0
    repeat i uses seed + i. `journal`: a file that gets each row as it ends; what it holds of the same requests
    (prompt, model, max_tokens and so on; the address may be another) is not measured again.

    Failed requests are rows with `error` and without times. Raises ServerGone when the server stops answering
    and NothingMeasured when all requests fail; both carry `.rows`. Raises BadRun for impossible arguments.
    """
    several = isinstance(concurrency, Iterable) and not isinstance(concurrency, str)
    levels = tuple(dict.fromkeys(concurrency)) if several else (concurrency,)
    check(1, Integral, max_tokens=max_tokens, repeats=repeats)
    for level in levels or (0,):
        check(1, Integral, concurrency=level)
    check(0, Integral, warmup=warmup)
    check(-math.inf, Integral, seed=seed)
    check(0, Real, temperature=temperature, cooldown_s=cooldown_s)
    check(1e-3, Real, timeout_s=timeout_s)
    check_body({} if extra_body is None else extra_body)
    chosen = as_prompts(prompts)
    url = base_url(getattr(server, "base_url", server))
    plan = Plan(
        base_url=url,
        metrics_url=getattr(server, "metrics_url", f"{root_url(url)}/metrics"),
        model=model or getattr(server, "model", None) or served_model(url),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        concurrency=max(levels),
        timeout_s=timeout_s,
        unique_prompts=unique_prompts,
        extra_body=extra_body or {},
    )
    work = Workload(chosen, repeats, warmup, levels, cooldown_s, shuffle)
    table = measured(plan, work, variant, Journal(Path(journal)) if journal else None)
    raise_if_failed(table, server, url)
    return table


def measured(plan: Plan, work: Workload, variant: str, journal: Journal | None) -> pd.DataFrame:
    """Rows of the whole workload, in the order of the prompts: those of the journal, and the rest sent now."""
    digests = {prompt.id: digest_of(prompt, plan, variant) for prompt in work.prompts}
    kept = [row for row in journal.rows() if not row.get("error")] if journal else []
    kept = [row for row in kept if row.get("request") == digests.get(row["prompt_id"])]
    work = dataclasses.replace(work, done=frozenset(key(row) for row in kept))
    total = sum(len(work.jobs(level, plan.seed)) for level in work.levels)
    if total and ended:
        time.sleep(max(0.0, ended[-1] + work.cooldown_s - time.monotonic()))
    running = in_background(lambda emit: client.run_all(plan, work, emit))
    found = list(kept)
    with contextlib.closing(running), small_collections():
        for row in progress(running, f"requests {variant}", total):
            found.append(row | {"variant": variant})
            if journal:
                journal.append(found[-1] | {"request": digests[row["prompt_id"]]})
    ended[:] = [time.monotonic()]
    place = {prompt.id: i for i, prompt in enumerate(work.prompts)}
    wanted = {(level, repeat) for level in work.levels for repeat in range(work.repeats)}
    found = [row for row in found if key(row)[:2] in wanted and key(row)[2] in place]
    return rows.frame(sorted(found, key=lambda row: (*key(row)[:2], place[key(row)[2]])))


def digest_of(prompt: Prompt, plan: Plan, variant: str) -> str:
    """What tells a prompt's requests from others of its id in a journal; the address may change with a restart."""
    sent = [plan.model, plan.max_tokens, plan.temperature, plan.seed, plan.unique_prompts, dict(plan.extra_body)]
    return files.digest([variant, prompt.content, *sent])


@contextlib.contextmanager
def small_collections() -> Iterator[None]:
    """Let the garbage collector look only at what is made from now on.

    Going through all that a notebook has loaded stops every stream for a tenth of a second or more. Where somebody
    had set objects aside before, they stay so.
    """
    before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not before:
            gc.unfreeze()


def check(least: float, kind: type, **numbers: Any) -> None:
    """Raise BadRun for what is no number of this kind (Integral, Real), or below `least`."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
            raise BadRun(f"{name}={value!r}", f"give {name} as a {'whole ' if kind is Integral else ''}number")
        if value < least:
            raise BadRun(f"{name}={value}", f"{name} has to be at least {least:g}")


def check_body(extra: Mapping[str, Any]) -> None:
    """Raise BadRun for fields that would make the rows wrong: no JSON, several answers, the lab's own fields."""
    try:
        json.dumps(dict(extra), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadRun(
            f"extra_body={extra!r:.200} is no JSON object: {error}", "give a dict of JSON's types"
        ) from error
    for name in OWN_FIELDS & set(extra):
        raise BadRun(f"extra_body has {name!r}", f"give {name} as an argument, or leave it out: the lab sets it")
    for name in SEVERAL:
        if extra.get(name) not in (None, 0, 1, False):
            raise BadRun(
                f"extra_body has {name}={extra[name]!r}",
                "a row is one request with one answer: the times of several cannot be told apart; "
                "send prompts more often with repeats, side by side with concurrency",
            )


def served_model(url: str) -> str:
    """The first model that the server lists; raises NoModel with what it answered instead."""
    try:
        reply = get(f"{url}/models", timeout=30)
        return str(reply.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise NoModel(f"nothing answers at {url}/models: {error}", "is the server up at that address?") from error
    except (ValueError, LookupError, TypeError) as error:
        raise NoModel(
            f"{url}/models answered {client.Refused(reply.status_code, reply.text, reply.headers)}",
            remedy(reply.status_code) or "check the address (http://host:port), or name the model with model=...",
        ) from error


def remedy(status: int) -> str:
    """What to do about an answer of this HTTP status; empty where that is not known."""
    if status in (401, 403):
        return "put the key that the server wants into the environment variable LABKIT_API_KEY"
    return "give the address that it redirects to" if 300 <= status < 400 else ""


def in_background(work: Callable[[Callable[[Row], None]], Coroutine[Any, Any, None]]) -> Iterator[Row]:
    """Run a coroutine in a thread with an event loop of its own (Jupyter's is busy); yield what it emits.

    An exception of the coroutine is raised here. Leaving the iteration cancels the coroutine.
    """
    emitted: queue.SimpleQueue[Row | BaseException | None] = queue.SimpleQueue()
    task: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []

    async def main() -> None:
        task.append((asyncio.get_running_loop(), asyncio.current_task()))  # type: ignore[arg-type]
        await work(emitted.put)

    def thread() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            emitted.put(error)
        else:
            emitted.put(None)

    worker = threading.Thread(target=thread, daemon=True, name="labkit-bench")
    worker.start()
    try:
        while (item := emitted.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        if worker.is_alive() and task:
            with contextlib.suppress(RuntimeError):  # the loop may end between the two lines
                task[0][0].call_soon_threadsafe(task[0][1].cancel)
        worker.join(timeout=10)


def raise_if_failed(table: pd.DataFrame, server: Any, url: str) -> None:
    """Raise ServerGone or NothingMeasured where that is what happened; some failed requests are no exception."""
    failed = table[table["error"].notna()]
    if failed.empty:
        return
    first = failed["error"].iloc[0]
    if (failed["error"] == client.NOT_SENT).any() or not reachable(url):
        raise ServerGone(
            f"the server at {url} stopped answering: {len(table) - len(failed)} of {len(table)} requests were "
            f"measured, then: {first}{cause(server)}",
            "start it again; the rows until then are kept (here in .rows of this error)",
            table,
        )
    if len(failed) == len(table):
        status = re.match(r"HTTP (\d{3})\b", first)
        raise NothingMeasured(
            f"all {len(table)} requests to {url} failed; the first: {first}",
            remedy(int(status[1]) if status else 0)
            or "check the model name, the prompt lengths and max_tokens against the server's max_model_len",
            table,
        )


def reachable(url: str) -> bool:
    """Whether anything answers at the address."""
    try:
        get(f"{url}/models")
    except httpx.HTTPError:
        return False
    return True


def cause(server: Any, patience_s: float = 15.0) -> str:
    """What a server of the lab's own says about its end: the likely cause and the end of its log."""
    if getattr(server, "process", None) is None:
        return ""
    until = time.monotonic() + patience_s
    while server.alive() and time.monotonic() < until:
        time.sleep(0.2)
    try:
        server.check()
    except LabError as error:
        return f"\n{error}"
    return ""
