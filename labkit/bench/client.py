"""Requests to an OpenAI-compatible server, streamed and timed, one row each."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
from httpx_sse import SSEError, aconnect_sse

from labkit import acceptance
from labkit.acceptance import Counters
from labkit.bench import rows
from labkit.bench.prompts import Prompt
from labkit.bench.rows import Row
from labkit.bench.stream import Stream
from labkit.engine.urls import headers
from labkit.errors import LabError

CONNECT_S = 10.0
NOT_SENT = "not sent: the server had gone"


@dataclass(frozen=True)
class Plan:
    """What is sent, and how: the same for every request of a run."""

    base_url: str
    metrics_url: str
    model: str
    max_tokens: int
    temperature: float
    seed: int
    concurrency: int
    timeout_s: float
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: Prompt, repeat: int, *, extended: bool) -> tuple[str, dict[str, Any]]:
        """The path and JSON body of a request; chat for messages, completions for text or token ids.

        `extended` adds what vLLM offers beyond OpenAI's fields: the token ids, and a salt that keeps every
        request from finding another one's prompt in the server's prefix cache.
        """
        chat = isinstance(prompt.content, list) and isinstance(prompt.content[0], dict)
        body = {
            "model": self.model,
            "messages" if chat else "prompt": prompt.content,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed + repeat,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if extended:
            body |= {"return_token_ids": True, "cache_salt": uuid.uuid4().hex}
        return "chat/completions" if chat else "completions", body | dict(self.extra_body)


class Session:
    """One run's connection to a server: what it turned out to understand, and whether it is still there."""

    def __init__(self, plan: Plan, client: httpx.AsyncClient) -> None:
        """Nothing is sent yet."""
        self.plan, self.client = plan, client
        self.extended = True
        self.count_each = False  # read /metrics around every request
        self.gone = False
        self.started = time.perf_counter()

    async def look(self) -> None:
        """Find out whether drafts can be counted request by request: one at a time, on a server that counts."""
        counters = await self.counters() if self.plan.concurrency == 1 else None
        self.count_each = counters is not None and counters.speculates

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
            "repeat": repeat,
            "model": self.plan.model,
            "concurrency": self.plan.concurrency,
            "max_tokens": self.plan.max_tokens,
            "started_s": time.perf_counter() - self.started,
        }
        if self.gone:
            return row | {"error": NOT_SENT}
        before = await self.counters() if self.count_each else None
        try:
            async with asyncio.timeout(self.plan.timeout_s):
                measured = rows.of_stream(await self.stream(prompt, repeat))
        except (httpx.HTTPError, SSEError, LabError, TimeoutError, ValueError) as error:
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
                raise Refused(
                    source.response.status_code, (await source.response.aread()).decode(errors="replace")
                )
            async for event in source.aiter_sse():
                at = time.perf_counter()
                if event.data.strip() == "[DONE]":
                    break
                if event.data:
                    stream.feed(json.loads(event.data), at)
        stream.close()
        return stream

    async def answers(self) -> bool:
        """Whether anything at all still answers at the server's address."""
        try:
            await self.client.get(f"{self.plan.base_url}/models", timeout=CONNECT_S)
        except httpx.HTTPError:
            return False
        return True


class Refused(LabError):
    """The server answered with a status other than 200."""

    def __init__(self, status: int, text: str) -> None:
        """`text` is the body of the answer."""
        super().__init__(f"HTTP {status}: {message_of(text)}")
        self.status = status


def message_of(text: str) -> str:
    """The message of an error body of any usual shape, in one line of at most 300 characters."""
    try:
        body = json.loads(text)
        inner = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
        text = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except ValueError:
        pass
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
        ValueError: "unreadable event",
    }
    kind = next((name for known, name in kinds.items() if isinstance(error, known)), type(error).__name__)
    return f"{kind}: {error}"[:300]


async def run_all(
    plan: Plan, prompts: list[Prompt], repeats: int, warmup: int, emit: Callable[[Row], None]
) -> None:
    """Warm up, then send every prompt `repeats` times, `concurrency` at a time; emits rows as they end.

    Each worker sends `warmup` requests of its own first (they open its connection and compile what the engine
    compiles); the first timed request goes out after the last warm-up request ended.
    """
    jobs = iter([(prompt, repeat) for repeat in range(repeats) for prompt in prompts])
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=plan.concurrency + 2)
    timeout = httpx.Timeout(plan.timeout_s, connect=CONNECT_S)
    local = urlsplit(plan.base_url).hostname in ("127.0.0.1", "localhost", "::1")
    async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=not local, headers=headers()) as client:
        session = Session(plan, client)
        await session.look()

        async def warm(worker: int) -> None:
            for turn in range(warmup):
                await session.measure(prompts[(worker + turn) % len(prompts)], turn)

        async def work() -> None:
            for prompt, repeat in jobs:
                emit(await session.measure(prompt, repeat))

        await asyncio.gather(*(warm(worker) for worker in range(plan.concurrency)))
        session.started = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(plan.concurrency)))
