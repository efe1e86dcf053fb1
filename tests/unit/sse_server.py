"""A loopback HTTP server that plays scripted streams, so that the client meets real sockets and real time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BREAK = object()  # drop the connection here


@dataclass
class Reply:
    """What a request gets: a status, and a JSON body or events with pauses (seconds) between them.

    Events: objects (sent as JSON), strings (after `data: `), bytes (nothing around them), BREAK. Pauses:
    floats, or functions of the number of requests in flight. `text`: a body that is no JSON.
    """

    events: list[Any] = field(default_factory=list)
    status: int = 200
    body: Any = None
    done: bool = True
    text: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    kind: str = "application/json"


Script = Callable[[str, dict[str, Any]], Reply]


class Fake:
    """The running server: its address and the bodies that it was sent."""

    def __init__(self, script: Script, metrics: Callable[[], str] | None) -> None:
        self.script, self.metrics = script, metrics
        self.requests: list[dict[str, Any]] = []
        self.sent_at: list[float] = []
        self.written: list[list[float]] = []  # by request: when each event with data left, [DONE] apart
        self.pages: dict[str, Any] = {}  # what other paths answer
        self.in_flight = 0
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # small writes would wait 40 ms for an acknowledgement

            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                if self.path.endswith("/metrics"):
                    fake.plain(self, 200 if fake.metrics else 404, fake.metrics() if fake.metrics else "")
                elif self.path in fake.pages:
                    fake.plain(self, 200, json.dumps(fake.pages[self.path]))
                elif self.path == "/v1/models":
                    fake.plain(self, 200, json.dumps({"data": [{"id": "toy"}]}))
                else:
                    fake.plain(self, 404, json.dumps({"detail": "Not Found"}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.requests.append(body)
                fake.sent_at.append(time.perf_counter())
                with fake.lock:
                    fake.in_flight += 1
                try:
                    fake.play(self, fake.script(self.path, body))
                finally:
                    with fake.lock:
                        fake.in_flight -= 1

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def plain(
        self, handler: Any, status: int, text: str, kind: str = "application/json", more: dict | None = None
    ) -> None:
        data = text.encode()
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        for name, value in (more or {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def play(self, handler: Any, reply: Reply) -> None:
        if reply.body is not None or reply.text is not None or reply.status != 200:
            text = json.dumps(reply.body) if reply.text is None else reply.text
            self.plain(handler, reply.status, text, reply.kind, reply.headers)
            return
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        written: list[float] = []
        self.written.append(written)
        start, due = time.perf_counter(), 0.0
        for event in [*reply.events, *(["[DONE]"] if reply.done else [])]:
            if isinstance(event, float) or callable(event):
                due += event(self.in_flight) if callable(event) else event
                time.sleep(max(0.0, start + due - time.perf_counter()))
            elif event is BREAK:
                handler.close_connection = True
                handler.connection.close()
                return
            elif isinstance(event, bytes):
                self.chunk(handler, event)
            else:
                text = event if isinstance(event, str) else json.dumps(event)
                if event != "[DONE]":
                    written.append(time.perf_counter())
                self.chunk(handler, f"data: {text}\n\n".encode())
        self.chunk(handler, b"")

    @staticmethod
    def chunk(handler: Any, data: bytes) -> None:
        handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        handler.wfile.flush()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@contextmanager
def serving(script: Script, metrics: Callable[[], str] | None = None) -> Iterator[Fake]:
    """Play `script` for every POST."""
    fake = Fake(script, metrics)
    thread = threading.Thread(target=fake.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.stop()


def delta(finish: str | None = None, ids: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    """A chat chunk; `ids` are vLLM's token_ids."""
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    return {
        "object": "chat.completion.chunk",
        "choices": [choice | ({"token_ids": ids} if ids is not None else {})],
    }


ROLE = delta(role="assistant", content="")


def usage(completion: int, prompt: int = 7, **more: Any) -> dict[str, Any]:
    """The usage chunk, which has no choices."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"object": "chat.completion.chunk", "choices": [], "usage": counts | more}
