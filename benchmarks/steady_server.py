"""A server whose tokens leave at known times: python benchmarks/steady_server.py PERIOD_S TOKENS

Prints its address. Each stream has an absolute schedule of its own, so a late token does not delay the next one.
GET /emissions tells when each token of each prompt's latest stream was written, seconds; GET /v1/models as ever.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

EVENTS = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Steady:
    """Plays `tokens` tokens, one every `period` seconds, to whoever posts, and remembers when each was written."""

    def __init__(self, period: float, tokens: int) -> None:
        """Nothing was emitted yet."""
        self.period, self.tokens = period, tokens
        self.emissions: dict[str, list[float]] = {}

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The requests of one connection, one after the other."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                fields = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                if lines[0].startswith("POST"):
                    await self.play(json.loads(body), writer)
                else:
                    self.answer(lines[0].split()[1], writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def answer(self, path: str, writer: asyncio.StreamWriter) -> None:
        """A page."""
        pages: dict[str, Any] = {"/emissions": self.emissions, "/v1/models": {"data": [{"id": "steady"}]}}
        text = json.dumps(pages.get(path, {})).encode()
        status = "200 OK" if path in pages else "404 Not Found"
        kind = f"Content-Type: application/json\r\nContent-Length: {len(text)}"
        writer.write(f"HTTP/1.1 {status}\r\n{kind}\r\n\r\n".encode() + text)

    async def play(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """One stream: the role at once, the tokens on schedule, the finish reason with the last one, the usage."""
        loop = asyncio.get_running_loop()
        times = self.emissions[body["messages"][-1]["content"]] = []
        writer.write(EVENTS.encode() + event(choice({"role": "assistant", "content": ""})))
        begun = loop.time()
        for number in range(1, self.tokens + 1):
            await asyncio.sleep(begun + number * self.period - loop.time())
            data = event(choice({"content": f"w{number} "}, "length" if number == self.tokens else None))
            times.append(loop.time())
            writer.write(data)
        counts = {"prompt_tokens": 9, "completion_tokens": self.tokens, "total_tokens": 9 + self.tokens}
        writer.write(event({"choices": [], "usage": counts}) + event("[DONE]") + b"0\r\n\r\n")


def choice(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    """A chunk of a chat completion, with the fields that servers send."""
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "steady"}
    return chunk | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]}


def event(content: Any) -> bytes:
    """A server-sent event as one chunk of the body."""
    data = f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def main(period: float, tokens: int) -> None:
    """Serve on a free port of loopback until standard input ends: so also when whoever started this is killed."""
    server = await asyncio.start_server(Steady(period, tokens).handle, "127.0.0.1", 0, backlog=256)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), int(sys.argv[2])))
