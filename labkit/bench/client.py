"""Requests to an OpenAI-compatible server, streamed and timed, one row each."""

from __future__ import annotations

import asyncio
import html
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import httpx
from httpx_sse import SSEError, aconnect_sse

from labkit import acceptance
from labkit.acceptance import Counters
from labkit.bench import rows
from labkit.bench.plan import Plan, Workload
from labkit.bench.prompts import Prompt
from labkit.bench.rows import Row
from labkit.bench.stream import BrokenStream, Stream
from labkit.engine.urls import headers, local
from labkit.errors import LabError

CONNECT_S = 10.0
NOT_SENT = "not sent: the server had gone"
TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)


class Session:
    """One run's connection to a server: what it turned out to understand, and whether it is still there."""

    def __init__(self, plan: Plan, client: httpx.AsyncClient) -> None:
        """Nothing is sent yet."""
        self.plan, self.client = plan, client
        self.extended = True
        self.count_each = False  # read /metrics around every request
        self.gone = False
        self.begin()

    def begin(self) -> None:
        """The clock of `started_s` starts now."""
        self.started = time.perf_counter()
        self.name = datetime.now(UTC).isoformat(timespec="milliseconds")

    async def look(self) -> None:
        """Find out whether drafts can be counted request by request: one at a time, on a server that counts.

        After the warm-up: SGLang shows no counter before its first draft.
        """
        counters = await self.counters() if self.plan.concurrency == 1 else None
        self.count_each = counters is not None and (counters.speculates or bool(counters.windowed))

    async def counters(self) -> Counters | None:
        """The server's counters now; None where it publishes none."""
        try:
            reply = await self.client.get(self.plan.metrics_url)
            return acceptance.parse(reply.text) if reply.status_code == 200 else None
        except (httpx.HTTPError, LabError):
            return None

    async def measure(self, prompt: Prompt, repeat: int) -> Row:
        """Send one request and return its row; a failure is a row with `error`, never an exception."""
        row: Row = {
            "prompt_id": prompt.id,
            "category": prompt.category,
            "prompt_source": prompt.source,
            "repeat": repeat,
            "model": self.plan.model,
            "concurrency": self.plan.concurrency,
            "max_tokens": self.plan.max_tokens,
            "seed": self.plan.seed + repeat,
            "extra_body": json.dumps(dict(self.plan.extra_body)) if self.plan.extra_body else "",
            "session": self.name,
            "started_s": time.perf_counter() - self.started,
        }
        if self.gone:
            return row | {"error": NOT_SENT}
        before = await self.counters() if self.count_each else None
        try:
            async with asyncio.timeout(self.plan.timeout_s):
                measured = rows.of_stream(await self.stream(prompt, repeat))
        except (httpx.HTTPError, SSEError, LabError, TimeoutError, ValueError, RecursionError) as error:
            if isinstance(error, (httpx.HTTPError, TimeoutError)) and not await self.answers():
                self.gone = True
            return row | {"error": describe(error, self.plan)}
        return row | measured | await self.counted(before, measured)

    async def counted(self, before: Counters | None, measured: Row) -> Row:
        """The acceptance columns from the counters, unless the response had them."""
        if "drafts" in measured:
            self.count_each = False
            return {}
        after = await self.counters() if before is not None else None
        if before is None or after is None:
            return {}
        try:
            accepted = acceptance.between(before, after, expect_tokens=measured["tokens_total"])
        except LabError as error:
            return {"acceptance_source": f"unusable: {error.what}"}
        return rows.of_acceptance(accepted, "counters")

    async def stream(self, prompt: Prompt, repeat: int) -> Stream:
        """Send a request, without the extensions where the server refuses them, and collect its stream."""
        if self.extended:
            try:
                return await self.request(*self.plan.body(prompt, repeat, extended=True))
            except Refused as refusal:
                if refusal.status not in (400, 422):
                    raise
                stream = await self.request(*self.plan.body(prompt, repeat, extended=False))
                self.extended = False  # it worked without, so the extensions were the reason
                return stream
        return await self.request(*self.plan.body(prompt, repeat, extended=False))

    async def request(self, path: str, body: Mapping[str, Any]) -> Stream:
        """One POST and its stream of server-sent events; raises for every way in which it can fail."""
        stream = Stream(time.perf_counter())
        async with aconnect_sse(self.client, "POST", f"{self.plan.base_url}/{path}", json=body) as source:
            if source.response.status_code != 200:
                text = (await source.response.aread()).decode(errors="replace")
                raise Refused(source.response.status_code, text, source.response.headers)
            async for event in source.aiter_sse():
                at = time.perf_counter()
                if event.data.strip() == "[DONE]":
                    break
                if event.event == "error":
                    raise BrokenStream(
                        f"error inside the stream: {message_of(event.data)}", "see the server's log"
                    )
                if event.data:
                    fed(stream, event.data, at)
        stream.close()
        return stream

    async def answers(self) -> bool:
        """Whether anything at all still answers at the server's address."""
        try:
            await self.client.get(f"{self.plan.base_url}/models", timeout=CONNECT_S)
        except httpx.HTTPError:
            return False
        return True


def fed(stream: Stream, data: str, at: float) -> None:
    """Give an event's text to the stream; raises BrokenStream for JSON of a shape that no server should send."""
    event = json.loads(data)
    try:
        stream.feed(event, at)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise BrokenStream(
            f"event of an unknown shape ({error}): {data[:200]}", "is this an OpenAI-compatible server?"
        ) from error


class Refused(LabError):
    """The server answered with a status other than 200."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str]) -> None:
        """`text` is the body of the answer; its headers say when to try again, or where a redirect leads."""
        later, place = headers.get("retry-after", ""), headers.get("location", "")
        notes = [f"retry after {later} s" if later.isdigit() else f"retry after {later}"] if later else []
        notes += [f"it redirects to {place}"] if place else []
        more = f" ({', '.join(notes)})" if notes else ""
        super().__init__(f"HTTP {status}: {message_of(text)}{more}")
        self.status = status


def message_of(text: str) -> str:
    """The message of an error body of any usual shape, in one line of at most 300 characters."""
    try:
        body = json.loads(text)
        inner = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
        text = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except ValueError:
        if text.lstrip()[:1] == "<":  # a gateway's page
            title = TITLE.search(text)
            text = html.unescape(title[1] if title else re.sub(r"<[^>]*>", " ", text))
    return " ".join(text.split())[:300]


def describe(error: Exception, plan: Plan) -> str:
    """The `error` column: what failed, in one line."""
    if isinstance(error, TimeoutError):
        return f"time-out after {plan.timeout_s:g} s"
    if isinstance(error, LabError):
        return error.what
    kinds = {
        httpx.ConnectError: "no connection",
        httpx.TimeoutException: "time-out",
        httpx.RemoteProtocolError: "stream broke off",
        httpx.ReadError: "stream broke off",
        SSEError: "no event stream",
        (ValueError, RecursionError): "unreadable event",
    }
    kind = next((name for known, name in kinds.items() if isinstance(error, known)), type(error).__name__)
    return f"{kind}: {error}"[:300]


async def run_all(plan: Plan, work: Workload, emit: Callable[[Row], None]) -> None:
    """Send what the workload says, level by level; emits rows as requests end.

    On each level every worker sends `warmup` requests of its own first (they open its connection and compile what
    the engine compiles); the first timed request goes out after the last warm-up request ended. A level with
    nothing left to measure is passed over.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=max(work.levels) + 2)
    timeout = httpx.Timeout(plan.timeout_s, connect=CONNECT_S)
    proxy = not local(plan.base_url)
    async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=proxy, headers=headers()) as client:
        waited = True
        for level in work.levels:
            jobs = work.jobs(level, plan.seed)
            if jobs:
                await asyncio.sleep(0.0 if waited else work.cooldown_s)
                await run_level(Session(replace(plan, concurrency=level), client), work, jobs, emit)
                waited = False


async def run_level(
    session: Session, work: Workload, jobs: list[tuple[Prompt, int]], emit: Callable[[Row], None]
) -> None:
    """Warm up, then send the jobs with as many in flight as the session's plan says."""
    await warm_up(session, work)
    session.begin()
    await send(session, jobs, emit)


async def warm_up(session: Session, work: Workload) -> None:
    """`warmup` requests by each worker, and then a look at what the server counts."""

    async def warm(worker: int) -> None:
        for turn in range(work.warmup):
            await session.measure(work.prompts[(worker + turn) % len(work.prompts)], turn)

    await asyncio.gather(*(warm(worker) for worker in range(session.plan.concurrency)))
    await session.look()


async def send(session: Session, jobs: list[tuple[Prompt, int]], emit: Callable[[Row], None]) -> None:
    """Send the jobs with as many in flight as the session's plan says; emits rows as requests end."""
    left = iter(jobs)

    async def work_off() -> None:
        for prompt, repeat in left:
            emit(await session.measure(prompt, repeat))

    await asyncio.gather(*(work_off() for _ in range(session.plan.concurrency)))
