"""Several servers measured side by side: the same prompts by turns, pairs close in time, one loaded at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pandas as pd

from labkit import acceptance
from labkit.acceptance import Acceptance
from labkit.bench import client, rows
from labkit.bench.client import CONNECT_S, Session
from labkit.bench.journal import Journal, key
from labkit.bench.plan import Plan, Workload
from labkit.bench.prompts import Prompt, as_prompts
from labkit.bench.rows import Row
from labkit.bench.run import digest_of, ended, in_background, raise_if_failed, small_collections
from labkit.engine import Server
from labkit.engine.bounds import ASYNC_HOOKS
from labkit.engine.urls import options
from labkit.errors import LabError
from labkit.progress import progress

Job = tuple[Prompt, int]  # prompt, repeat


@dataclass
class Side:
    """One server of several: its plan, what is kept of its requests, what was counted at more than one stream."""

    name: str
    server: Server
    plan: Plan
    journal: Journal
    kept: list[Row] = field(default_factory=list)
    counts: list[Acceptance] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    done: frozenset[tuple[int, str]] = frozenset()  # repeat, prompt_id: measured before an interruption

    def remember(self, prompts: Sequence[Prompt], repeats: int) -> None:
        """Take what the journal holds of exactly these requests."""
        self.digests = {prompt.id: digest_of(prompt, self.plan, self.name) for prompt in prompts}
        wanted = {(self.plan.concurrency, repeat, prompt.id) for prompt in prompts for repeat in range(repeats)}
        known = [row for row in self.journal.rows() if not row.get("error") and key(row) in wanted]
        self.kept = [row for row in known if row.get("request") == self.digests[row["prompt_id"]]]
        self.done = frozenset(key(row)[1:] for row in self.kept)

    def left_of(self, block: Sequence[Job]) -> list[Job]:
        """The jobs of a block that are still to be sent."""
        return [(prompt, repeat) for prompt, repeat in block if (repeat, prompt.id) not in self.done]

    def take(self, row: Row) -> None:
        """Keep a row, on disk first."""
        row = row | {"variant": self.name}
        self.journal.append(row | {"request": self.digests[row["prompt_id"]]})
        self.kept.append(row)

    def checked(self, prompts: Sequence[Prompt]) -> pd.DataFrame:
        """`frame`; raises what bench.run raises where the server went, or answered nothing."""
        found = self.frame(prompts)
        raise_if_failed(found, self.server, self.plan.base_url)
        return found

    def frame(self, prompts: Sequence[Prompt]) -> pd.DataFrame:
        """The rows in the order of repeats and prompts."""
        place = {prompt.id: i for i, prompt in enumerate(prompts)}
        return rows.frame(sorted(self.kept, key=lambda row: (key(row)[1], place[key(row)[2]])))


def run_together(
    servers: Mapping[str, Server],
    prompts: pd.DataFrame,
    journals: Mapping[str, Path],
    *,
    max_tokens: int,
    repeats: int,
    warmup: int = 1,
    concurrency: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
    model: str | None = None,
) -> dict[str, Side]:
    """Measure servers by turns on the same prompts; a finished Side each (`.frame(...)`, `.counts`).

    At one request in flight they take turns prompt by prompt, with more repeat by repeat; who begins goes round.
    Only one server has requests at any time. Rows that an interrupted run left in `journals` are not sent again.
    `counts`: the acceptance by the server's own counters, one entry a block, where requests overlap. Requests that
    fail are rows with `error`.
    """
    chosen = as_prompts(prompts)
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "timeout_s": 600.0}
    sides = []
    for name, server in servers.items():
        plan = Plan(server.base_url, server.metrics_url, model or server.model, concurrency=concurrency, **options)
        sides.append(Side(name, server, plan, Journal(journals[name])))
        sides[-1].remember(chosen, repeats)
    work = Workload(chosen, repeats, warmup, (concurrency,))
    total = sum(len(side.left_of(work.jobs(concurrency, seed))) for side in sides)
    running = in_background(lambda emit: run_all(sides, work, emit))
    with contextlib.closing(running), small_collections():
        for side, row in progress(running, f"requests {', '.join(servers)}", total):
            side.take(row)  # here and not in the thread of the streams, which a slow disk would hold up
    ended[:] = [time.monotonic()]
    return {side.name: side for side in sides}


async def run_all(sides: list[Side], work: Workload, emit: Callable[[Any], None]) -> None:
    """Warm all sides up, one after the other, then let them take turns block by block."""
    (level,) = work.levels
    seed, began = sides[0].plan.seed, datetime.now(UTC).isoformat(timespec="milliseconds")
    async with contextlib.AsyncExitStack() as stack:
        sessions = {}
        for side in sides:
            if side.left_of(work.jobs(level, seed)):
                sessions[side.name] = Session(side.plan, await stack.enter_async_context(connection(side.plan)))
                await client.warm_up(sessions[side.name], work)
        for number, block in enumerate(blocks(work, level, seed)):
            turn = number % len(sides)
            for side in sides[turn:] + sides[:turn]:
                if jobs := side.left_of(block):
                    session = sessions[side.name]
                    session.begin()
                    session.name = f"{began} {number}"  # of the block: rows of one block are pairs in time
                    await measured(side, session, jobs, emit)


async def measured(side: Side, session: Session, jobs: list[Job], emit: Callable[[Any], None]) -> None:
    """Send one side's jobs of a block; where requests overlap, count the block's acceptance as a whole."""

    overlap = session.plan.concurrency > 1
    before = await session.counters() if overlap else None
    await client.send(session, jobs, lambda row: emit((side, row)))
    after = await session.counters() if overlap else None
    if before is not None and after is not None and after.speculates:
        with contextlib.suppress(LabError):  # restarted in between: nothing is known then
            side.counts.append(acceptance.between(before, after))


def connection(plan: Plan) -> contextlib.AbstractAsyncContextManager[httpx.AsyncClient]:
    """A client for one server with as many connections as its plan needs."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=plan.concurrency + 2)
    timeout = httpx.Timeout(plan.timeout_s, connect=CONNECT_S)
    return httpx.AsyncClient(limits=limits, timeout=timeout, **options(plan.base_url), event_hooks=ASYNC_HOOKS)


def blocks(work: Workload, level: int, seed: int) -> Iterator[list[Job]]:
    """What a side does in one turn: a request at one stream, else a whole repeat, so that streams stay full."""
    jobs = work.jobs(level, seed)
    if level == 1:
        yield from ([job] for job in jobs)
    else:
        yield from ([job for job in jobs if job[1] == repeat] for repeat in range(work.repeats))
