"""Capturing against a small HTTP server that answers as vLLM does and writes its traces late and in parts."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kineto
import pytest

from labkit import settings, trace
from labkit.engine import Server
from labkit.trace.profiler import PLAIN_REQUESTS


class Engine(ThreadingHTTPServer):
    """What it was asked, and how it behaves."""

    daemon_threads = True

    def __init__(self, folder: Path, ranks: int = 2, profiler: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder, self.ranks, self.profiler = folder, ranks, profiler
        self.asked: list[tuple[str, Any]] = []

    def write_traces(self) -> None:
        """Each file appears half written and grows whole only later."""
        source = kineto.two_ranks(self.folder.parent / "source")
        for rank in range(self.ranks):
            content = (source / f"rank{rank}.pt.trace.json.gz").read_bytes()
            target = self.folder / f"rank{rank}.17.pt.trace.json.gz"
            target.write_bytes(content[: len(content) // 2])
            time.sleep(0.4)
            target.write_bytes(content)


class Answer(BaseHTTPRequestHandler):
    server: Engine

    def log_message(self, *args: object) -> None: ...

    def do_GET(self) -> None:
        self.reply(200, json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length) or b"null")
        self.server.asked.append((self.path, body))
        if self.path.endswith("_profile"):
            if self.path == "/stop_profile" and self.server.profiler:
                threading.Thread(target=self.server.write_traces).start()
            self.reply(200 if self.server.profiler else 404, "")
            return
        chunks = [{"choices": [{"text": "a"}]}] * body["max_tokens"] + [{"choices": [], "usage": {}}]
        self.reply(200, "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n")

    def reply(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    (tmp_path / "traces").mkdir()
    with Engine(tmp_path / "traces") as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def server_of(engine: Engine) -> Server:
    url = f"http://127.0.0.1:{engine.server_address[1]}/v1"
    return Server(url, "m", options={"tensor_parallel_size": 2})


def test_capture_asks_in_order_and_waits_for_whole_files(engine: Engine) -> None:
    old = engine.folder / "rank0.16.pt.trace.json.gz"
    old.write_bytes(gzip.compress(b"{}"))
    client = trace.capture(server_of(engine), engine.folder, decode_steps=5, prompt_tokens=8)
    assert [path for path, _ in engine.asked] == [
        "/v1/completions",  # a short one to warm up
        "/v1/completions",
        "/start_profile",
        "/v1/completions",
        "/stop_profile",
    ]
    assert engine.asked[1] == engine.asked[3]
    assert engine.asked[1][1]["max_tokens"] == 6
    assert engine.asked[1][1]["temperature"] == 0
    assert client.groupby("profiled").size().tolist() == [6, 6]
    assert client.groupby("profiled")["gap_ms"].count().tolist() == [5, 5]
    old.unlink()
    assert trace.load(engine.folder).summary()["allreduce_per_step"].tolist() == [9, 9]


def test_a_server_without_profiler(engine: Engine) -> None:
    engine.profiler = False
    with pytest.raises(trace.CaptureFailed, match="no profiler") as caught:
        trace.capture(server_of(engine), engine.folder, decode_steps=2)
    assert "--profiler-config" in caught.value.remedy


def test_a_rank_whose_file_does_not_come(engine: Engine) -> None:
    engine.ranks = 1
    with pytest.raises(trace.CaptureFailed, match="1 of 2 trace files"):
        trace.capture(server_of(engine), engine.folder, decode_steps=2, stop_limit_s=2.0)


def test_where_the_traces_come_from(engine: Engine, tmp_path: Path) -> None:
    url = server_of(engine).base_url
    with pytest.raises(trace.CaptureFailed, match="without trace_dir"):
        trace.obtain(settings.Profiling(server=url), tmp_path)
    given = settings.Profiling(server=url, trace_dir=str(engine.folder), decode_steps=4)
    folder, client = trace.obtain(given, tmp_path)
    assert (folder, len(client)) == (engine.folder, (PLAIN_REQUESTS + 1) * 5)
    assert len(trace.load(folder).ranks) == 2
    folder, client = trace.obtain(settings.Profiling(trace_dir=str(engine.folder)), tmp_path)
    assert (folder, len(client)) == (engine.folder, 0)
