"""A slow, broken or hostile way to the server: a row that says so or a LabError, and what was measured stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from labkit import acceptance, bench, conversations, engine, files
from labkit.engine import bounds
from labkit.errors import LabError
from tests.faults.proxy import Weather, between
from tests.unit.sse_server import ROLE, Reply, delta, serving, usage

OPTIONS = {"max_tokens": 4, "repeats": 1, "warmup": 0, "timeout_s": 5.0}
ANSWER = [ROLE, delta(content="a"), 0.01, delta(content="b"), delta("stop"), usage(3)]
KEY = "sk-a-secret-of-this-test"


def script(_path: str, body: dict[str, Any]) -> Reply:
    """A stream for the benchmark, an answer for the regeneration."""
    if body.get("stream"):
        return Reply(ANSWER)
    choice = {"message": {"content": "a b"}, "finish_reason": "stop", "token_ids": [7, 8, 2]}
    return Reply(body={"prompt_token_ids": [1, 5], "choices": [choice]})


def test_a_slow_network_costs_time_and_nothing_else() -> None:
    """Chunks cut anywhere, and late: the same text and counts."""
    with serving(script) as server:
        straight = bench.run(server.url, ["hi"], **OPTIONS).iloc[0]
        with between(server.url, Weather(delay_s=0.005, piece=7)) as proxy:
            slow = bench.run(proxy.url, ["hi"], **OPTIONS | {"timeout_s": 60.0}).iloc[0]
    for name in ("answer_text", "tokens_total", "chunks", "finish_reason"):
        assert slow[name] == straight[name]


@pytest.mark.parametrize(
    ("end", "said"),
    [("reset", "broke off"), ("close", "broke off"), ("half", "broke off"), ("silent", "time-out")],
)
def test_a_connection_that_breaks_in_a_stream_is_one_failed_row(tmp_path: Path, end: str, said: str) -> None:
    """The next lab measures that request alone: the others were kept."""
    journal = tmp_path / "rows.jsonl"
    weather = Weather(until=420, end=end, good=3)  # within the second chunk; /v1/models and one request go well
    with serving(script) as server:
        with between(server.url, weather) as proxy:
            options = OPTIONS | {"timeout_s": 1.5, "journal": journal, "model": "toy"}
            weather.good = 1
            try:
                table = bench.run(proxy.url, ["a", "b", "c"], **options)
            except bench.MeasurementFailed as error:
                table = error.rows
        failed = table[table["error"].notna()]
        assert failed["error"].str.contains(said).any(), failed["error"].tolist()
        sent = len(server.requests)
        again = bench.run(server.url, ["a", "b", "c"], **OPTIONS | {"journal": journal, "model": "toy"})
    assert again["error"].isna().all()
    assert len(server.requests) - sent == len(failed)


@pytest.mark.parametrize("end", ["reset", "close", "half"])
def test_a_connection_that_breaks_while_answers_are_made_loses_none(tmp_path: Path, end: str) -> None:
    import pandas as pd

    rows = [
        {"prompt_id": f"p{i}", "category": "c", "topic": f"t{i}", "tools": "", "split": "train"} for i in range(6)
    ]
    frame = pd.DataFrame(rows)
    frame["messages"] = [[{"role": "user", "content": row["prompt_id"]}] for row in rows]
    options = {"max_length": 32, "max_tokens": 4, "concurrency": 1}
    with serving(script) as server:
        with between(server.url, Weather(until=600, end=end, good=1)) as proxy, pytest.raises(LabError) as failed:
            conversations.collect(frame, proxy.url, tmp_path, **options)
        assert "kept in" in failed.value.remedy
        kept = len((tmp_path / "answers.jsonl").read_bytes().split())
        sent = len(server.requests)
        assert len(conversations.collect(frame, server.url, tmp_path, **options)) == 6
        assert len(server.requests) - sent < 6
        assert kept


def endless(piece: bytes) -> Reply:
    """A body that would go on for ever."""
    return Reply([piece] * 100_000, done=False)


HOSTILE = {
    "a line without an end": (endless(b"data: " + b"x" * (1 << 20)), "sends over"),
    "events without an end": (endless(b"data: {}\n\n"), "goes on and on"),
    "tokens without an end": (
        endless(b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'), "goes on and on"),
    "comments without an end": (endless(b": ping\n" * 100_000), "sends over"),
    "a page": (Reply(text="<html><title>Welcome</title></html>", kind="text/html"), "no event stream"),
    "JSON": (Reply(body={"choices": []}), "no event stream"),
    "deep nesting": (Reply(["[" * 100_000]), "unreadable event"),
    "a number without an end": (Reply(["9" * 100_000]), "unreadable event"),
    "binary": (Reply([b"\x00\xff\xfe" * 100 + b"\n\n", b"data: \xff\n\n"]), "unreadable event"),
    "a packed bomb": (
        Reply(text="x", headers={"Content-Encoding": "gzip"}, kind="text/event-stream"), "packed"),
    "an error that repeats the key": (Reply(status=400, body={"error": {"message": f"no {KEY}"}}), "(the key)"),
    "half characters": (Reply([json.dumps({"error": {"message": "\ud800"}})]), "error inside"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_server_is_a_failed_row(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reply, said = HOSTILE[kind]
    monkeypatch.setattr(bounds, "MOST", 8 << 20)
    monkeypatch.setenv("LABKIT_API_KEY", KEY)
    with serving(
        lambda _path, body: reply if body["messages"][0]["content"] == "bad" else script(_path, body)
    ) as server:
        table = bench.run(server.url, ["good", "bad"], **OPTIONS | {"timeout_s": 60.0})
    errors = table.set_index("prompt_id")["error"]
    assert errors.isna().tolist() == [True, False]
    assert said in errors.iloc[1]
    assert KEY not in table.to_json()
    files.write_parquet(tmp_path / "rows.parquet", table)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_never_takes_the_key_to_another_host(
    status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import http.server
    import threading

    seen: list[str] = []

    class Trap(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(str(self.headers))
            self.send_response(200)
            self.end_headers()

        do_POST = do_GET

    monkeypatch.setenv("LABKIT_API_KEY", KEY)
    trap = http.server.HTTPServer(("127.0.0.1", 0), Trap)
    thread = threading.Thread(target=trap.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    elsewhere = Reply(status=status, body={}, headers={"Location": f"http://127.0.0.2:{trap.server_port}/v1"})
    try:
        with serving(lambda *_: elsewhere) as server:
            with pytest.raises(bench.NothingMeasured, match="redirects to"):
                bench.run(server.url, ["hi"], **OPTIONS)
            server.plain = redirecting(server.plain, elsewhere)  # its pages as well
            with pytest.raises(LabError):
                bench.run(server.url, ["hi"], **OPTIONS)
            with pytest.raises(engine.ServerUnreachable):
                engine.attach(server.url)
            with pytest.raises(acceptance.Unreadable):
                acceptance.snapshot(server.url)
    finally:
        trap.shutdown()
        trap.server_close()
    assert not seen


def redirecting(plain: Any, reply: Reply) -> Any:
    """The server's way to answer, with every answer replaced by a redirect."""
    return lambda handler, *_, **__: plain(handler, reply.status, "{}", more=reply.headers)


@pytest.mark.parametrize(
    "answer",
    ["<html>", "[]", '"x"', "{}", '{"choices": []}', '{"choices": [{}]}', '{"choices": [5]}', "[" * 50_000,
     '{"prompt_token_ids": ["x"], "choices": [{"message": {"content": 5}, "token_ids": [1]}]}',
     '{"prompt_token_ids": [1], "choices": [{"message": {}, "token_ids": [1e99], "finish_reason": null}]}'],
)  # fmt: skip
def test_answers_of_another_shape_are_refused_and_never_stored(tmp_path: Path, answer: str) -> None:
    import pandas as pd

    row = {"prompt_id": "p", "category": "c", "topic": "t", "tools": "", "split": "train"}
    frame = pd.DataFrame([row]).assign(messages=[[{"role": "user", "content": "a"}]])
    with serving(lambda *_: Reply(text=answer)) as server, pytest.raises(LabError) as refused:
        conversations.collect(frame, server.url, tmp_path, max_length=32, max_tokens=4)
    assert refused.value.remedy
    store = tmp_path / "answers.jsonl"
    assert not store.exists() or not store.read_bytes().strip()


def test_pages_that_never_end_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models and metrics: the reader stops at its bound, whatever the page would have held."""
    monkeypatch.setattr(bounds, "MOST", 1 << 20)
    with serving(script, metrics=lambda: "x 1\n" * (1 << 19)) as server:
        with pytest.raises(bounds.TooMuch, match="sends over 1 MiB"):
            acceptance.snapshot(server.url)
        assert bench.run(server.url, ["hi"], **OPTIONS)["error"].isna().all()
        server.pages["/v1/models"] = {"data": [{"id": "x" * (2 << 20)}]}
        with pytest.raises(LabError):
            bench.run(server.url, ["hi"], **OPTIONS)
