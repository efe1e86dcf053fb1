"""Answers of servers that may be broken or hostile: held to a size, never unpacked, and without our key."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

from labkit.errors import LabError

MOST = 256 << 20  # bytes of one answer: the stream of a hundred thousand tokens with their ids has a tenth of it


class TooMuch(LabError):
    """A server sends more than any answer to the lab's requests can be."""


class Bounded(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The bytes of an answer up to MOST; raises TooMuch beyond."""

    def __init__(self, inner: Any, url: httpx.URL) -> None:
        """`inner`: the answer's own stream, of either kind."""
        self.inner, self.url, self.size = inner, url, 0

    def counted(self, part: bytes) -> bytes:
        """The part, once it is counted."""
        self.size += len(part)
        if self.size > MOST:
            raise TooMuch(f"{self.url} sends over {MOST >> 20} MiB in one answer", "is this the right address?")
        return part

    def __iter__(self) -> Iterator[bytes]:
        """For httpx.Client."""
        return map(self.counted, self.inner)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """For httpx.AsyncClient."""
        async for part in self.inner:
            yield self.counted(part)

    def close(self) -> None:
        """End the answer."""
        self.inner.close()

    async def aclose(self) -> None:
        """End the answer."""
        await self.inner.aclose()


def hold(response: httpx.Response) -> None:
    """Bound an answer; refuses one that is packed unasked: a small one can unpack to anything."""
    kind = response.headers.get("content-encoding", "identity").lower()
    if kind != "identity":
        raise TooMuch(
            f"{response.request.url} sends its answer packed ({kind}) although asked not to",
            "turn compression off in the gateway: it holds tokens back, too, which spoils the times",
        )
    response.stream = Bounded(response.stream, response.request.url)


async def hold_async(response: httpx.Response) -> None:
    """The same for httpx.AsyncClient."""
    hold(response)


class NoAnswer(LabError):
    """A server's answer is not what an OpenAI-compatible server sends."""


def object_of(response: httpx.Response) -> dict[str, Any]:
    """The JSON object in an answer; raises NoAnswer for anything else."""
    try:
        value = response.json()
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise no_answer(response.request.url, response.text)
    return value


def no_answer(url: Any, seen: Any) -> NoAnswer:
    """The error for an answer of another shape."""
    shown = " ".join(without_key(str(seen)[:2000]).split())[:200]
    return NoAnswer(f"{url} answered {shown!r}", "is this the address of an OpenAI-compatible server?")


PLAIN = {"Accept-Encoding": "identity"}
HOOKS: dict[str, list[Any]] = {"response": [hold]}
ASYNC_HOOKS: dict[str, list[Any]] = {"response": [hold_async]}


def without_key(text: str) -> str:
    """Text of a server without the key that it was sent: some errors repeat it, and results must not hold it."""
    key = os.environ.get("LABKIT_API_KEY", "").strip()
    return text.replace(key, "(the key)") if key else text
