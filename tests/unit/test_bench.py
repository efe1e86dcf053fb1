"""The benchmark client against scripted streams on a real loopback server."""

from __future__ import annotations

import asyncio

import numpy as np
import pandas as pd
import pytest
from sse_server import BREAK, ROLE, Reply, delta, serving, usage

from labkit import acceptance, bench, files, settings
from labkit.bench import rows as bench_rows
from labkit.bench.stream import Piece, move_inline_reasoning
from labkit.errors import LabError

PLAIN = Reply(
    [ROLE, 0.05, delta(content="a"), 0.02, delta(content="b"), 0.02, delta("stop", content="c"), usage(3)]
)


def one(reply: Reply, **options) -> pd.Series:
    """The row of a single request that gets `reply`."""
    with serving(lambda path, body: reply) as server:
        return bench.run(server.url, ["hi"], **({"max_tokens": 16, "repeats": 1, "warmup": 0} | options)).iloc[0]


def test_a_plain_stream_gives_the_times_of_the_script() -> None:
    row = one(PLAIN)
    assert pd.isna(row["error"])
    assert row["ttft_ms"] == pytest.approx(50, abs=25)
    assert row["first_chunk_ms"] < 40  # the role chunk came at once and is no token (vllm#3768)
    assert row["decode_ms"] == pytest.approx(40, abs=15)
    assert row["tpot_ms"] == pytest.approx(row["decode_ms"] / 2)
    assert list(row[["tokens_prompt", "tokens_reasoning", "tokens_answer", "tokens_total"]]) == [7, 0, 3, 3]
    assert row["tokens_source"] == "usage"
    assert row["finish_reason"] == "stop"
    assert not row["budget_exhausted"]
    assert len(row["gaps_ms"]) == 2
    assert row["answer_text"] == "abc"


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_both_names_of_reasoning(key: str) -> None:
    """vllm#27752 renamed the field; a client that knows one name reports no tokens with the other."""
    thinking = [delta(**{key: "hm", "content": None}), 0.04, delta(**{key: "m", "content": ""})]
    row = one(Reply([ROLE, *thinking, 0.04, delta("stop", content="yes"), usage(3)]))
    assert row["ttft_ms"] < 30
    assert row["ttft_answer_ms"] == pytest.approx(80, abs=30)
    assert row["reasoning_text"] == "hmm"
    assert row["answer_text"] == "yes"
    assert row["reasoning_source"] == "characters"
    assert row["tokens_reasoning"] + row["tokens_answer"] == 3


def test_reasoning_counts_prefer_usage_then_token_ids() -> None:
    stream = [ROLE, delta(ids=[1, 2, 3], reasoning="x"), delta("stop", ids=[4], content="a longer answer")]
    by_ids = one(Reply([*stream, usage(4)]))
    assert (by_ids["tokens_reasoning"], by_ids["reasoning_source"]) == (3, "token_ids")
    details = {"completion_tokens_details": {"reasoning_tokens": 2}}
    by_usage = one(Reply([*stream, usage(4, **details)]))
    assert (by_usage["tokens_reasoning"], by_usage["reasoning_source"]) == (2, "usage")
    top_level = one(Reply([*stream, usage(4, reasoning_tokens=2)]))
    assert top_level["tokens_reasoning"] == 2
    false_zero = one(Reply([*stream, usage(4, reasoning_tokens=0)]))  # sglang#17156
    assert (false_zero["tokens_reasoning"], false_zero["reasoning_source"]) == (3, "token_ids")


def test_reasoning_that_eats_the_budget() -> None:
    """vllm#42548, tenstorrent/vllm#377: no answer, and then a division by zero."""
    with serving(
        lambda *_: Reply([ROLE, delta(reasoning="so"), 0.02, delta("length", reasoning="..."), usage(2)])
    ) as s:
        rows = bench.run(s.url, ["hi"], max_tokens=2, repeats=2, warmup=0, variant="v")
    assert rows["budget_exhausted"].all()
    assert (rows["tokens_answer"] == 0).all()
    assert rows["ttft_answer_ms"].isna().all()
    assert rows["tpot_ms"].notna().all()
    line = bench.summary(rows, by=["variant"]).iloc[0]
    assert line["budget_exhausted"] == 2
    assert "all 2 tokens went into reasoning; raise max_tokens (to 16, say)" in line["advice"]
    assert np.isfinite(line["tok_s"])


def test_reasoning_that_ends_without_an_answer_leaves_no_answer_token() -> None:
    """vLLM counts the end-of-sequence token to the answer; there is no answer."""
    details = {"completion_tokens_details": {"reasoning_tokens": 1}}
    row = one(Reply([ROLE, delta(reasoning="done"), delta("stop"), usage(2, **details)]))
    assert (row["tokens_reasoning"], row["tokens_answer"]) == (2, 0)
    assert not row["budget_exhausted"]  # it stopped by itself


def test_hidden_reasoning_is_not_timed() -> None:
    """litellm-docs#559, genai-bench#81: 98 of 100 tokens were never streamed, so two tokens took decode_ms."""
    details = {"completion_tokens_details": {"reasoning_tokens": 98}}
    stream = [ROLE, delta(content="a"), 0.05, delta("stop", content="b"), usage(100, **details)]
    row = one(Reply(stream))
    assert list(row[["tokens_reasoning", "tokens_answer", "tokens_total", "tokens_timed"]]) == [98, 2, 100, 2]
    assert row["tpot_ms"] == pytest.approx(50, abs=15)
    assert "hidden" in bench.summary(bench_rows.frame([dict(row)])).iloc[0]["advice"]


@pytest.mark.parametrize(
    ("chunks", "reasoning", "answer"),
    [
        (["<thi", "nk>a", "b</th", "ink>", "c"], "<think>ab</think>", "c"),
        (["a", "b</think>c", "d"], "ab</think>", "cd"),  # the template opened the tag in the prompt
        (["<think>", "never ", "ends"], "<think>never ends", ""),
        (["◁think▷x◁/think▷", "y"], "◁think▷x◁/think▷", "y"),
        (
            ["write ", "<think> to open", " and </think> to close"],
            "",
            "write <think> to open and </think> to close",
        ),
        (["no tags"], "", "no tags"),
    ],
)
def test_inline_think_tags(chunks: list[str], reasoning: str, answer: str) -> None:
    pieces = [Piece(float(i), answer=text) for i, text in enumerate(chunks)]
    move_inline_reasoning(pieces)
    assert "".join(p.reasoning for p in pieces) == reasoning
    assert "".join(p.answer for p in pieces) == answer


def test_a_token_without_text_is_a_token() -> None:
    """Half of a UTF-8 character, or EOS: the ids tell that it came."""
    row = one(
        Reply([ROLE, delta(ids=[5]), 0.03, delta(ids=[6], content="é"), 0.03, delta("stop", ids=[2]), usage(3)])
    )
    assert row["ttft_ms"] < 25
    assert row["ttft_answer_ms"] == pytest.approx(30, abs=20)
    assert row["decode_ms"] == pytest.approx(60, abs=20)
    assert list(row["output_token_ids"]) == [5, 6, 2]


def test_without_usage_chunks_are_counted_and_said_to_be() -> None:
    row = one(Reply([ROLE, delta(content="a"), 0.01, delta("stop", content="b")]))
    assert (row["tokens_total"], row["tokens_source"]) == (2, "chunks")
    assert pd.isna(row["tokens_prompt"])
    assert "no usage" in bench.summary(bench_rows.frame([dict(row)])).iloc[0]["advice"]


@pytest.mark.parametrize("tokens", [0, 1])
def test_answers_too_short_for_a_rate(tokens: int) -> None:
    events = [ROLE, *[delta(content="a")] * tokens, delta("stop", content=""), usage(tokens)]
    row = one(Reply(events))
    assert pd.isna(row["error"])
    assert np.isnan(row["tpot_ms"])
    assert np.isnan(bench.summary(bench_rows.frame([dict(row)])).iloc[0]["tok_s"])


FAILURES = {
    "status": (Reply(status=503, body={"error": {"message": "overloaded"}}), "HTTP 503: overloaded"),
    "inside the stream": (
        Reply([ROLE, delta(content="a"), {"error": {"message": "engine died", "code": 500}}]),
        "error inside the stream: engine died",
    ),
    "broken": (Reply([ROLE, delta(content="a"), BREAK]), "stream broke off"),
    "no finish reason": (Reply([ROLE, delta(content="a")]), "without a finish reason"),
    "no json": (Reply([ROLE, "{half"]), "unreadable event"),
    "not a stream": (Reply(body={"error": "no"}), "no event stream"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_is_a_row_and_never_a_success(kind: str) -> None:
    failing, message = FAILURES[kind]

    def script(path: str, body: dict) -> Reply:
        return failing if body["messages"][0]["content"] == "bad" else PLAIN

    with serving(script) as server:
        rows = bench.run(server.url, ["good", "bad"], max_tokens=4, repeats=2, warmup=0)
    bad = rows[rows["prompt_id"] == "prompt-001"]
    assert bad["error"].str.contains(message).all(), bad["error"].tolist()
    assert bad[["ttft_ms", "tpot_ms", "e2e_ms", "decode_ms", "tokens_total"]].isna().all(axis=None)
    line = bench.summary(rows, by=["variant"]).iloc[0]
    assert (line["requests"], line["failed"]) == (4, 2)
    assert "2 of 4 requests failed" in line["advice"]


def test_a_time_out_is_a_row() -> None:
    slow = Reply([ROLE, 2.0, delta("stop", content="late"), usage(1)])
    with serving(lambda path, body: slow if body["messages"][0]["content"] == "bad" else PLAIN) as server:
        rows = bench.run(server.url, ["good", "bad"], max_tokens=4, repeats=1, warmup=0, timeout_s=0.5)
    assert rows["error"].isna().tolist() == [True, False]
    assert rows["error"].iloc[1] == "time-out after 0.5 s"


def test_when_everything_fails_the_rows_are_kept() -> None:
    reply = Reply(status=404, body={"error": {"message": "no such model"}})
    expected = pytest.raises(bench.NothingMeasured, match="no such model")
    with serving(lambda *_: reply) as server, expected as caught:
        bench.run(server.url, ["hi"], max_tokens=4, repeats=3, model="other")
    assert len(caught.value.rows) == 3


def test_a_server_that_dies_midway() -> None:
    calls = []

    def script(path: str, body: dict) -> Reply:
        calls.append(1)
        if len(calls) < 3:
            return PLAIN
        server.http.socket.close()  # nothing can connect any more
        return Reply([ROLE, BREAK])

    with (
        serving(script) as server,
        pytest.raises(bench.ServerGone, match="2 of 6 requests were measured") as caught,
    ):
        bench.run(server.url, ["hi", "there"], max_tokens=4, repeats=3, warmup=0)
    rows = caught.value.rows
    assert rows["error"].isna().sum() == 2
    assert (rows["error"] == "not sent: the server had gone").sum() == 3


def test_the_lab_s_own_server_says_why_it_died() -> None:
    class Own:
        process = object()

        def alive(self) -> bool:
            return False

        def check(self) -> None:
            raise LabError("it ran out of memory; the end of server.log: ...", "use fewer streams")

    with serving(lambda *_: Reply([ROLE, BREAK])) as fake:
        own = Own()
        own.base_url = fake.url
        own.model = "toy"
        fake.script = lambda *_: fake.http.socket.close() or Reply([ROLE, BREAK])
        with pytest.raises(bench.ServerGone, match="out of memory"):
            bench.run(own, ["hi"], max_tokens=4, repeats=2, warmup=0)


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/v1", "{}/v1/", "{}/v1/v1"])
def test_every_form_of_the_address(form: str) -> None:
    """BACKGROUND.md's 404: a doubled /v1."""
    paths = []
    with serving(lambda path, body: paths.append(path) or PLAIN) as server:
        bench.run(form.format(server.url), ["hi"], max_tokens=4, repeats=1, warmup=0)
    assert paths == ["/v1/chat/completions"]


def test_a_server_that_refuses_unknown_fields() -> None:
    def script(path: str, body: dict) -> Reply:
        if "return_token_ids" in body or "cache_salt" in body:
            return Reply(status=400, body={"detail": "extra fields not permitted"})
        return PLAIN

    with serving(script) as server:
        rows = bench.run(server.url, ["hi"], max_tokens=4, repeats=2, warmup=1)
    assert rows["error"].isna().all()
    assert len(server.requests) == 4  # once refused, then three without


def test_a_bad_request_stays_one() -> None:
    reply = Reply(status=400, body={"error": {"message": "too long"}})
    with serving(lambda *_: reply) as server, pytest.raises(bench.NothingMeasured, match="too long"):
        bench.run(server.url, ["hi"], max_tokens=4, repeats=1, warmup=0)
    assert len(server.requests) == 2


def test_requests_do_not_find_each_other_in_the_prefix_cache() -> None:
    """vllm#52884: repeats of a prompt hit the cache unless each request is salted."""
    with serving(lambda *_: PLAIN) as server:
        bench.run(server.url, ["hi"], max_tokens=4, repeats=3, warmup=1)
    assert len({body["cache_salt"] for body in server.requests}) == 4


def test_cached_prompt_tokens_are_reported() -> None:
    cached = usage(2, prompt_tokens_details={"cached_tokens": 6})
    row = one(Reply([ROLE, delta(content="a"), delta("stop", content="b"), cached]))
    assert row["tokens_cached"] == 6
    assert "prefix cache" in bench.summary(bench_rows.frame([dict(row)])).iloc[0]["advice"]


def test_warm_up_ends_before_anything_is_timed() -> None:
    """guidellm#1078: warm-up requests must not overlap with timed ones."""
    running, overlaps, started = [], [], []

    def script(path: str, body: dict) -> Reply:
        started.append(body)
        running.append(1)
        overlaps.append(len(started) <= 3)
        return PLAIN

    with serving(script) as server:
        rows = bench.run(server.url, ["a", "b", "c"], max_tokens=4, repeats=2, warmup=1, concurrency=3)
    assert len(server.requests) == 9
    assert len(rows) == 6
    assert min(server.sent_at[3:]) - max(server.sent_at[:3]) >= 0.08  # a request takes 90 ms


def test_what_is_sent() -> None:
    with serving(lambda *_: PLAIN) as server:
        bench.run(
            server.url,
            [[{"role": "user", "content": "chat"}], {"prompt": "plain", "id": "p"}, [1, 2, 3]],
            max_tokens=9,
            repeats=2,
            warmup=0,
            temperature=0.7,
            seed=10,
            extra_body={"top_p": 0.9},
            shuffle=False,
        )
    bodies = server.requests
    assert [body["seed"] for body in bodies] == [10, 10, 10, 11, 11, 11]
    assert all(body["temperature"] == 0.7 and body["top_p"] == 0.9 and body["model"] == "toy" for body in bodies)
    assert bodies[0]["messages"][0]["content"] == "chat"
    assert bodies[1]["prompt"] == "plain"
    assert bodies[2]["prompt"] == [1, 2, 3]


def test_completions_stream_text() -> None:
    events = [
        {"choices": [{"index": 0, "text": "a", "token_ids": [1], "prompt_token_ids": [8, 9]}]},
        {"choices": [{"index": 0, "text": "b", "token_ids": [2], "finish_reason": "length"}]},
        usage(2),
    ]
    with serving(lambda *_: Reply(events)) as server:
        row = bench.run(server.url, [{"prompt": "x"}], max_tokens=2, repeats=1, warmup=0).iloc[0]
    assert list(row["prompt_token_ids"]) == [8, 9]
    assert list(row["output_token_ids"]) == [1, 2]
    assert row["answer_text"] == "ab"


def test_it_runs_inside_a_running_event_loop() -> None:
    """As in Jupyter, whose kernel occupies the main thread's loop."""

    async def cell() -> pd.DataFrame:
        with serving(lambda *_: PLAIN) as server:
            return bench.run(server.url, ["hi"], max_tokens=4, repeats=1, warmup=0)

    assert asyncio.run(cell())["error"].isna().all()


def test_concurrency_is_kept() -> None:
    import threading

    lock, now, peak = threading.Lock(), [0], [0]

    def script(path: str, body: dict) -> Reply:
        with lock:
            now[0] += 1
            peak[0] = max(peak[0], now[0])
        threading.Timer(0.09, lambda: now.__setitem__(0, now[0] - 1)).start()
        return PLAIN

    with serving(script) as server:
        rows = bench.run(server.url, [f"p{i}" for i in range(6)], max_tokens=4, repeats=1, warmup=0, concurrency=3)
    assert 2 <= peak[0] <= 3
    assert rows["prompt_id"].nunique() == 6


def test_step_times_are_the_gaps_between_tokens() -> None:
    """A server whose tokens come every 20 ms, whatever the load, and slowly at both ends of a stream."""

    def script(path: str, body: dict) -> Reply:
        assert body["ignore_eos"] is True
        pauses = [0.06] * 4 + [0.02] * (body["max_tokens"] - 9) + [0.06] * 4
        events = [event for pause in pauses for event in (pause, completion("x"))]
        usage = {"prompt_tokens": 3, "completion_tokens": len(pauses) + 1, "total_tokens": len(pauses) + 4}
        return Reply([completion("x"), *events, completion("", finish_reason="length"), usage_chunk(usage)])

    with serving(script) as server:
        times = bench.step_times(server.url, [2, 1, 2], tokens=24, repeats=1)
        sent = [str(body["messages"]) for body in server.requests]
    assert times["n"].tolist() == [1, 2]
    assert times["samples"].tolist() == [15, 30], "the gaps of both ends are left out"
    assert times["step_ms"].between(19, 35).all(), "20 ms, on a machine that may be busy"
    assert (times["low_ms"] <= times["step_ms"]).all()
    assert (times["step_ms"] <= times["high_ms"]).all()
    assert len(set(sent)) == 2, "streams side by side have prompts of their own"


def completion(text: str, **choice: object) -> dict:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None} | choice]}


def usage_chunk(usage: dict) -> dict:
    return {"choices": [], "usage": usage}


def test_acceptance_from_the_response() -> None:
    detailed = {
        "num_spec_tokens": 3,
        "acceptance_histogram": [1, 0, 1, 0],
        "num_draft_tokens": 5,
        "per_step_drafted": [3, 2],
        "per_step_accepted": [0, 2],
    }
    for metrics in (detailed, {k: v for k, v in detailed.items() if not k.startswith("per_step")}):
        last = usage(5) | {"metrics": {"speculative_decoding": metrics}}
        row = one(Reply([ROLE, delta(content="a"), delta(content="b"), delta("stop", content="cde"), last]))
        assert (row["drafts"], row["drafted"], row["accepted"]) == (2, 5, 2)
        assert list(row["accepted_at"]) == [1, 1, 0]
        assert row["acceptance_source"] == "response"
        pooled = acceptance.from_rows(bench_rows.frame([dict(row)]))
        assert pooled.mean_length == 2.0
        assert pooled.tokens_per_step == 2.0  # 4 tokens after the first, in 2 chunks


def vllm_metrics(requests: int, foreign: int = 0) -> str:
    """A vLLM page after `requests` requests of 3 tokens, each with one draft of 2 of which 1 was accepted."""
    lines = [
        f'vllm:spec_decode_num_drafts_total{{engine="0"}} {requests}',
        f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {2 * requests}',
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {requests}',
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {requests}',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 0',
        f'vllm:generation_tokens_total{{engine="0"}} {3 * requests + foreign}',
        f'vllm:request_success_total{{engine="0",finished_reason="stop"}} {requests}',
    ]
    return "\n".join(lines) + "\n"


def test_acceptance_from_counters_request_by_request() -> None:
    with serving(lambda *_: PLAIN, lambda: vllm_metrics(len(server.requests))) as server:
        rows = bench.run(server.url, ["a", "b"], max_tokens=4, repeats=1, warmup=1)
    assert rows["drafts"].tolist() == [1, 1]
    assert rows["acceptance_source"].tolist() == ["counters"] * 2
    pooled = acceptance.from_rows(rows)
    assert (pooled.mean_length, pooled.rate, tuple(pooled.per_position)) == (2.0, 0.5, (1.0, 0.0))


def test_foreign_traffic_spoils_the_counts_not_the_times() -> None:
    served = iter(range(100))
    with serving(lambda *_: PLAIN, lambda: vllm_metrics(len(server.requests), foreign=next(served))) as server:
        rows = bench.run(server.url, ["a"], max_tokens=4, repeats=1, warmup=0)
    assert rows["drafts"].isna().all()
    assert "this client was sent 3" in rows["acceptance_source"].iloc[0]
    assert rows["tpot_ms"].notna().all()


def test_bad_arguments_are_named() -> None:
    with pytest.raises(bench.BadRun, match="repeats=0"):
        bench.run("http://127.0.0.1:9", ["hi"], max_tokens=4, repeats=0)
    with pytest.raises(bench.BadPrompts, match="no prompts"):
        bench.run("http://127.0.0.1:9", [], max_tokens=4)
    with pytest.raises(bench.NoModel, match="nothing answers"):
        bench.run("http://127.0.0.1:9", ["hi"], max_tokens=4)
    with serving(lambda *_: PLAIN) as server, pytest.raises(bench.NoModel, match="HTTP 404: Not Found"):
        bench.run(f"{server.url}/elsewhere", ["hi"], max_tokens=4)


def made(variant: str, prompt: str, tok_s: float, tokens: int = 101, **more) -> dict:
    """A row of a request that decoded `tokens` at `tok_s`."""
    decode = (tokens - 1) / tok_s * 1e3
    return {
        "variant": variant,
        "prompt_id": prompt,
        "category": prompt[0],
        "ttft_ms": 10.0,
        "decode_ms": decode,
        "tpot_ms": decode / (tokens - 1),
        "tokens_total": tokens,
        "tokens_timed": tokens,
        "tokens_answer": tokens,
        "tokens_reasoning": 0,
        "tokens_source": "usage",
        "gaps_ms": [decode / (tokens - 1)] * (tokens - 1),
        "budget_exhausted": False,
    } | more


def test_speedup_is_paired_and_pools_repeats() -> None:
    rows = bench_rows.frame(
        [
            made("base", "a1", 10),
            made("base", "a1", 30),  # pooled with the first: 200 tokens in 10 + 3.33 s = 15 tok/s
            made("fast", "a1", 30),
            made("base", "a2", 10),
            made("fast", "a2", 30),
            made("base", "b1", 10),
            made("fast", "b1", 5),
            made("base", "b2", 10),  # no partner
        ]
    )
    pairs = bench.paired(rows, "base", "fast").set_index("prompt_id")
    assert pairs["ratio"].to_dict() == pytest.approx({"a1": 2.0, "a2": 3.0, "b1": 0.5})
    line = bench.speedup(rows, "base", "fast").iloc[0]
    assert line["speedup"] == pytest.approx(2.0)
    assert line["speedup_low"] == pytest.approx(0.5)  # the median of 3 values resampled: 0.5 has 7/27 of the mass
    assert line["speedup_high"] == pytest.approx(3.0)
    assert (line["prompts"], line["left_out"]) == (3, 1)
    by_category = bench.speedup(rows, "base", "fast", by="category").set_index("category")
    assert by_category.loc["b", "speedup"] == pytest.approx(0.5)
    assert np.isnan(by_category.loc["b", "speedup_low"])  # one prompt has no spread


def test_total_ratio_weighs_by_tokens_and_drift_is_reported() -> None:
    rows = bench_rows.frame(
        [
            made("base", "a1", 10, 101),
            made("fast", "a1", 20, 101, output_token_ids=[1]),
            made("base", "a2", 10, 1001),
            made("fast", "a2", 10, 901),
        ]
    )
    line = bench.speedup(rows, "base", "fast").iloc[0]
    # 1102 tokens in 110.2 s against 1002 tokens in 5.05 + 90.1 s
    assert line["total_ratio"] == pytest.approx((1002 / (101 / 20 + 901 / 10)) / 10)
    assert line["length_drift"] == pytest.approx(1002 / 1102 - 1)


def test_failed_requests_never_enter_a_ratio() -> None:
    rows = bench_rows.frame(
        [made("base", "a1", 10), made("fast", "a1", 99, error="HTTP 500: no"), made("fast", "a1", 20)]
    )
    assert bench.speedup(rows, "base", "fast").iloc[0]["speedup"] == pytest.approx(2.0)


def test_different_ways_of_counting_are_not_compared() -> None:
    """Spec-Bench counts the two sides differently; the ratio then means nothing."""
    rows = bench_rows.frame([made("base", "a1", 10), made("fast", "a1", 20, tokens_source="chunks")])
    with pytest.raises(bench.MixedCounts):
        bench.speedup(rows, "base", "fast")


def test_without_a_variant_the_speedup_is_unknown() -> None:
    line = bench.speedup(bench_rows.frame([made("base", "a1", 10)]), "base", "fast").iloc[0]
    assert line["prompts"] == 0
    assert np.isnan(line["speedup"])


def test_same_output() -> None:
    ids = [{"output_token_ids": [1, 2]}, {"output_token_ids": [1, 2]}, {"output_token_ids": [1, 3]}]
    rows = bench_rows.frame(
        [made("base", "a1", 10, **ids[0]), made("fast", "a1", 10, **ids[1]), made("fast", "a1", 10, **ids[2])]
    )
    assert bench.speedup(rows, "base", "fast").iloc[0]["same_output"] == 0.5


def test_rates_of_a_summary_are_pooled() -> None:
    rows = bench_rows.frame([made("base", "a1", 10, 101), made("base", "a2", 30, 101)])
    line = bench.summary(rows, by=["variant"]).iloc[0]
    assert line["tok_s"] == pytest.approx(200 / (10 + 100 / 30))
    assert line["tpot_ms"] == pytest.approx((100 + 1000 / 30) / 2)


def test_rows_are_the_same_after_parquet(tmp_path) -> None:
    with serving(lambda *_: PLAIN) as server:
        rows = bench.run(server.url, ["hi"], max_tokens=4, repeats=1, warmup=0)
    files.write_parquet(tmp_path / "rows.parquet", rows)
    again = files.read_parquet(tmp_path / "rows.parquet")
    assert list(again) == list(bench_rows.COLUMNS)
    pd.testing.assert_series_equal(bench.summary(rows).iloc[0], bench.summary(again).iloc[0])


def test_measure_keeps_and_reuses(tmp_path) -> None:
    calls = []

    def run_it(error: str | None = None) -> pd.DataFrame:
        calls.append(1)
        return bench_rows.frame([made("base", "a1", 10, error=error)])

    elsewhere = tmp_path / "other"
    bench.measure(tmp_path, "base", "one", run_it)
    bench.measure(tmp_path, "base", "one", run_it)
    bench.measure(elsewhere, "base", "one", run_it, also=[tmp_path])
    assert len(calls) == 1
    bench.measure(tmp_path, "base", "two", run_it)
    assert len(calls) == 2
    for _ in range(2):  # incomplete rows are kept, but measured again
        bench.measure(tmp_path, "base", "three", lambda: run_it("HTTP 500: no"))
    assert len(calls) == 4
    assert (tmp_path / "measured" / "base-incomplete.parquet").exists()


def test_measure_keeps_the_rows_of_a_failure(tmp_path) -> None:
    def run_it() -> pd.DataFrame:
        raise bench.ServerGone("gone", "start it", bench_rows.frame([made("base", "a1", 10, error="x")]))

    with pytest.raises(bench.ServerGone):
        bench.measure(tmp_path, "base", "one", run_it)
    assert len(files.read_parquet(tmp_path / "measured" / "base-incomplete.parquet")) == 1


def test_the_fingerprint_changes_with_what_matters() -> None:
    chosen = bench.prompts("benchmark", 1)
    plain = settings.NgramBaseline()
    base = bench.fingerprint(plain, "ngram", chosen, k=5)
    assert bench.fingerprint(settings.NgramBaseline(run_id="other"), "ngram", chosen, k=5) == base
    for other in (
        bench.fingerprint(settings.NgramBaseline(max_tokens=7), "ngram", chosen, k=5),
        bench.fingerprint(plain, "baseline", chosen, k=5),
        bench.fingerprint(plain, "ngram", chosen, k=4),
        bench.fingerprint(plain, "ngram", bench.prompts("benchmark", 2), k=5),
    ):
        assert other != base
    demo = [
        bench.fingerprint(kind(scale="demo"), "baseline", chosen)
        for kind in (settings.NgramBaseline, settings.Evaluation)
    ]
    assert demo[0] == demo[1]  # notebook 05 finds the rows of notebook 02


def attached(tmp_path, monkeypatch, **urls: str) -> settings.NgramBaseline:
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    return settings.NgramBaseline(repeats=1, max_tokens=4, run_id="r", **urls)


def test_measure_variant_on_attached_servers(tmp_path, monkeypatch) -> None:
    chosen = bench.prompts("story", 2)
    with serving(lambda *_: PLAIN) as server:
        plan = attached(tmp_path, monkeypatch, server=server.url)
        first = bench.measure_variant(plan, "baseline", chosen)
        again = bench.measure_variant(plan, "baseline", chosen)
        assert len(server.requests) == 3  # a warm-up and two prompts, once
        pd.testing.assert_frame_equal(first, again, check_exact=False)
        assert first["variant"].tolist() == ["baseline"] * 2
        assert bench.measure_variant(plan, "ngram", chosen).empty  # the baseline is attached, the variant is not
        assert bench.measure_variant(plan, "baseline", chosen.iloc[:0]).empty
        both = attached(
            tmp_path, monkeypatch, server=server.url, variant_server=server.url.replace("127.0.0.1", "localhost")
        )
        assert len(bench.measure_variant(both, "ngram", chosen)) == 2


def test_measure_variant_on_a_shared_server(tmp_path, monkeypatch) -> None:
    from labkit import engine

    plan = attached(tmp_path, monkeypatch)
    with serving(lambda *_: PLAIN) as server, engine.on_demand("none", "baseline", url=server.url) as shared:
        for category in ("story", "code"):
            rows = bench.measure_variant(plan, "baseline", bench.prompts(category, 1), server=shared)
            assert rows["category"].tolist() == [category]


def test_the_finish_chunk_ends_the_timing_without_token_ids_too() -> None:
    """The end-of-sequence token is counted by the usage, and its chunk has no text."""
    row = one(Reply([ROLE, delta(content="a"), 0.05, delta("stop"), usage(2)]))
    assert row["decode_ms"] == pytest.approx(50, abs=15)
    assert row["tpot_ms"] == row["decode_ms"]


def test_the_interval_is_of_the_median() -> None:
    # One outlier of 7 carries the median of a resample with probability 0.0099, below the 0.025 of a tail.
    assert bench.interval(np.array([1.0] * 6 + [100.0])) == (1.0, 1.0)
    # Two of 7: at least 4 of 7 draws with p = 2/7 has probability 0.101, so the upper end is the outlier.
    assert bench.interval(np.array([1.0] * 5 + [100.0] * 2)) == (1.0, 100.0)
    for few in ([1.0], [1.0, 2.0]):  # of two the bootstrap gives these two, as if they were its ends
        assert all(np.isnan(bench.interval(np.array(few))))
    assert bench.interval(np.array([1.0, 2.0, 3.0])) == (1.0, 3.0)


def test_a_rate_has_an_interval_over_prompts() -> None:
    """Three prompts of 100 tokens at 10, 20 and 40 tok/s: all three the slowest has p = 1/27 > 0.025."""
    rows = bench_rows.frame([made("base", name, rate) for name, rate in (("a1", 10), ("a2", 20), ("b1", 40))])
    assert bench.rate_interval(rows) == pytest.approx((10, 40))
    assert bench.rate_interval(rows) == bench.rate_interval(rows)
    failed = bench_rows.frame([made("base", "b2", 9999, error="HTTP 500: no")])
    assert bench.rate_interval(pd.concat([rows, failed])) == pytest.approx((10, 40))
    assert all(np.isnan(bench.rate_interval(rows.head(2))))
    # Repeats of one prompt are no prompts: they go together, 200 tokens in 10 + 5 s.
    again = pd.concat([rows, bench_rows.frame([made("base", "a1", 20)])])
    assert bench.rate_interval(again) == pytest.approx((200 / 15, 40))
    assert all(np.isnan(bench.rate_interval(again[again["prompt_id"] != "a2"])))


def test_a_rate_is_told_with_its_interval_or_why_it_has_none() -> None:
    base = pd.Series({"tok_s": 33.68})
    assert bench.rate_told(base, (31.9, 35.21)) == "33.7 tok/s (95% interval 31.9 to 35.2)"
    assert bench.rate_told(base, (np.nan, np.nan)) == "33.7 tok/s (too few prompts for an interval)"


def test_a_head_is_told_by_its_content_not_by_its_path(tmp_path) -> None:
    """A retrained head lies at the same path: its rows must not be those of the old one."""
    from labkit.bench.conditions import content

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"old")
    before = content(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"new")
    assert content(str(tmp_path)) != before
    assert content("text") == "text"
    assert content(5) == 5


def test_forced_measurement_does_not_take_rows_from_disk(tmp_path, monkeypatch) -> None:
    calls = []

    def once() -> pd.DataFrame:
        calls.append(1)
        return pd.DataFrame({"error": [None]})

    for _ in range(2):
        bench.measure(tmp_path, "baseline", "d", once)
    assert len(calls) == 1
    monkeypatch.setenv("LABKIT_FORCE", "1")
    bench.measure(tmp_path, "baseline", "d", once)
    assert len(calls) == 2


def test_an_id_in_two_files_of_a_folder_is_refused(tmp_path) -> None:
    row = '{"id": "1", "category": "c", "messages": [{"role": "user", "content": "hello there"}]}'
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(row)
    with pytest.raises(bench.BadPrompts, match="'1'"):
        bench.prompts(tmp_path)
