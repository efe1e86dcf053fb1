"""What users of other tools complained about, by number (facts/measuring.md, section 2): each is a test here.

Streams and pages have the shapes that servers were seen to send, are our own, and are played over real sockets.
Expected times are those at which the stand-in server wrote, expected counts are worked out by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sse_server import BREAK, ROLE, Fake, Reply, delta, serving, usage

from labkit import acceptance, bench
from labkit.bench import rows as bench_rows

COMPLAINTS = {
    1: "test_reasoning_under_either_name_is_the_same_reasoning",
    2: "test_ttft_is_the_first_reasoning_token",
    3: "test_only_reasoning_still_has_a_ttft",
    4: "test_a_dialogue_whose_budget_goes_into_thinking_says_so",
    5: "test_no_answer_token_divides_nothing_by_zero",
    6: "test_reasoning_that_only_the_usage_tells_of",
    7: "test_the_role_is_no_token",
    10: "test_reasoning_is_counted_without_usage_details",
    11: "test_reasoning_tokens_missing_from_the_stream_are_counted_and_named",
    12: "test_a_huge_first_chunk_is_not_decode_time",
    14: "test_the_address_with_and_without_v1_and_behind_a_path",
    15: "test_itl_is_of_a_token_and_a_gap_is_of_a_chunk",
    16: "test_tpot_and_gaps_differ_under_speculation",
    17: "test_tpot_leaves_ttft_out_and_itl_is_no_mean",
    18: "test_lengths_come_from_the_server_never_from_a_tokenizer",
    19: "test_warm_up_is_in_no_row_no_count_and_no_time",
    20: "test_a_cold_first_request_is_warmed_away_or_named",
    21: "test_repeats_do_not_meet_in_a_prefix_cache",
    22: "test_ignore_eos_is_not_set_unasked_and_named_when_asked",
    23: "test_placeholder_prompts_are_refused",
    24: "test_both_sides_count_tokens_alike_or_are_not_compared",
    25: "test_every_source_of_acceptance_includes_the_bonus_token",
    28: "test_nothing_is_counted_twice",
    29: "test_pooled_and_request_mean_are_two_figures",
    30: "test_sglang_is_differenced_never_read_from_its_gauge",
}
# The numbers that section 2 lists under Streaming, Latency maths, Workload and Speculation metrics.
LISTED = {1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 28, 29, 30}


def test_every_complaint_has_its_test() -> None:
    assert set(COMPLAINTS) == LISTED
    for number, name in COMPLAINTS.items():
        assert callable(globals().get(name)), f"complaint {number}: {name} does not exist"


class Played:
    """A request that was played: its row, and when the server wrote what."""

    def __init__(self, server: Fake, row: pd.Series) -> None:
        self.row, self.sent, self.written = row, server.sent_at[-1], server.written[-1]

    def __getitem__(self, name: str) -> Any:
        return self.row[name]

    def ms(self, to: int, since: int | None = None) -> float:
        """Milliseconds until event `to` was written, since the request came or event `since` was written."""
        return (self.written[to] - (self.sent if since is None else self.written[since])) * 1e3

    @property
    def advice(self) -> str:
        return bench.summary(bench_rows.frame([dict(self.row)])).iloc[0]["advice"]


OPTIONS = {"max_tokens": 16, "repeats": 1, "warmup": 0}


def play(*events: Any, **options: Any) -> Played:
    """Send one request that gets these events."""
    with serving(lambda *_: Reply(list(events))) as server:
        return Played(server, bench.run(server.url, ["hi"], **OPTIONS | options).iloc[0])


def near(ms: float) -> Any:
    """Equal up to what two busy cores and a socket may add."""
    return pytest.approx(ms, abs=25)


# Streaming


@pytest.mark.parametrize("form", ["reasoning", "reasoning_content", "both"])
def test_reasoning_under_either_name_is_the_same_reasoning(form: str) -> None:
    def thought(text: str, ids: list[int]) -> dict:
        names = ("reasoning", "reasoning_content") if form == "both" else (form,)
        return delta(ids=ids, content=None, **dict.fromkeys(names, text))

    found = play(
        ROLE, thought("hm", [1, 2]), thought("m", [3]), delta("stop", ids=[4, 5], content="yes"), usage(5)
    )
    assert (found["reasoning_text"], found["answer_text"]) == ("hmm", "yes")
    assert (found["tokens_reasoning"], found["tokens_answer"], found["tokens_total"]) == (3, 2, 5)


def test_ttft_is_the_first_reasoning_token() -> None:
    found = play(
        ROLE, 0.06, delta(reasoning="a"), 0.12, delta(content="b"), 0.02, delta("stop", content="c"), usage(3)
    )
    assert found["ttft_ms"] == near(found.ms(1))
    assert found["ttft_answer_ms"] == near(found.ms(2))
    assert found["ttft_answer_ms"] - found["ttft_ms"] == near(found.ms(2, since=1))


@pytest.mark.parametrize("empty", [{}, {"content": None}, {"content": ""}], ids=["absent", "null", "empty"])
def test_only_reasoning_still_has_a_ttft(empty: dict) -> None:
    """DeepSeek's content:"" beside the reasoning is no answer."""
    thoughts = [delta(reasoning_content=word, **empty) for word in ("we", " think")]
    found = play(ROLE, 0.06, thoughts[0], 0.06, thoughts[1], 0.06, delta("length", **empty), usage(3))
    assert found["ttft_ms"] == near(found.ms(1))
    assert math.isnan(found["ttft_answer_ms"])
    assert found["tpot_ms"] == near(found.ms(3, since=1) / 2)
    assert (found["tokens_reasoning"], found["tokens_answer"]) == (3, 0)
    assert found["budget_exhausted"]


def test_a_dialogue_whose_budget_goes_into_thinking_says_so() -> None:
    turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "How far is the moon?"},
    ]
    events = [ROLE, delta(reasoning="let"), 0.05, delta(reasoning=" me"), 0.05, delta("length", reasoning="…")]
    with serving(lambda *_: Reply([*events, usage(3)])) as server:
        rows = bench.run(server.url, [turns], max_tokens=3, repeats=2, warmup=0)
        seconds = sum(written[3] - written[1] for written in server.written)
    line = bench.summary(rows).iloc[0]
    assert rows["error"].isna().all()
    assert (line["tokens_reasoning"], line["tokens_answer"], line["tokens_total"]) == (3, 0, 6)
    assert line["tok_s"] == pytest.approx(4 / seconds, rel=0.3)  # 2 tokens after the first, twice
    assert "all 3 tokens went into reasoning; raise max_tokens" in line["advice"]


def test_no_answer_token_divides_nothing_by_zero() -> None:
    def script(path: str, body: dict) -> Reply:
        if body["messages"][0]["content"] == "nothing":
            return Reply([ROLE, delta("length"), usage(0)])
        return Reply([ROLE, delta("length", reasoning="x"), usage(1)])

    with serving(script) as server, np.errstate(all="raise"):
        both = [bench.run(server.url, ["one", "nothing"], variant=v, **OPTIONS) for v in ("base", "fast")]
        rows = pd.concat(both, ignore_index=True)
        summary, levels = bench.summary(rows), bench.levels(rows)
        line = bench.speedup(rows, "base", "fast").iloc[0]
    assert rows["error"].isna().all()
    assert rows["tpot_ms"].isna().all()
    assert summary["tok_s"].isna().all()
    assert levels["tok_s"].isna().all()
    assert levels["requests"].tolist() == [2, 2]
    assert (line["prompts"], line["left_out"]) == (0, 2)
    assert math.isnan(line["speedup"])


def test_reasoning_that_only_the_usage_tells_of() -> None:
    """kimi-k2.5 behind a proxy: 199 of 200 tokens were reasoning and nothing was streamed."""
    details = {"completion_tokens_details": {"reasoning_tokens": 199}}
    found = play(ROLE, 0.05, delta("length", content=""), usage(200, **details), max_tokens=200)
    assert pd.isna(found["error"])
    assert (found["tokens_total"], found["tokens_reasoning"], found["tokens_answer"]) == (200, 200, 0)
    assert found["budget_exhausted"]
    assert found["reasoning_hidden"]
    assert math.isnan(found["tpot_ms"])  # 200 tokens in no time is not 4000 tok/s
    assert "all 200 tokens went into reasoning; raise max_tokens" in found.advice


def test_the_role_is_no_token() -> None:
    found = play(ROLE, 0.1, delta(content="a"), 0.03, delta("stop", content="b"), usage(2))
    assert found["first_chunk_ms"] == near(found.ms(0))
    assert found["ttft_ms"] == near(found.ms(1))
    assert found["ttft_ms"] - found["first_chunk_ms"] > 60
    assert found["chunks"] == 2


# What a model thinks, with no parser before it: (chunks with the ids in each, reasoning tokens, answer's text).
UNPARSED = [
    ([("<think>", 1), ("so", 2), ("</think>", 1), ("yes", 1)], 4, "yes"),
    ([("◁think▷", 3), ("so", 2), ("◁/think▷", 3), ("yes", 1)], 8, "yes"),
    ([("so", 2), ("</think>", 1), ("yes", 1)], 3, "yes"),  # the chat template opened the tag
    ([("◁thi", 1), ("nk▷so◁/", 2), ("think▷", 1), ("yes", 2)], 4, "yes"),
    ([("<think>", 1), ("and", 1), (" on", 1)], 3, ""),  # never closed
]


@pytest.mark.parametrize(("chunks", "reasoning", "answer"), UNPARSED)
def test_reasoning_is_counted_without_usage_details(chunks: list, reasoning: int, answer: str) -> None:
    total = sum(tokens for _, tokens in chunks)
    events = [delta(content=text, ids=list(range(tokens))) for text, tokens in chunks]
    found = play(ROLE, *events, delta("stop"), usage(total))
    assert (found["tokens_total"], found["tokens_reasoning"]) == (total, reasoning)
    assert found["answer_text"] == answer
    assert found["reasoning_source"] == ("token_ids" if answer else "stream")
    told = play(ROLE, *events, delta("stop"), usage(total, reasoning_tokens=reasoning))  # SGLang, top level
    assert (told["tokens_reasoning"], told["reasoning_source"]) == (reasoning, "usage" if answer else "stream")


def test_reasoning_tokens_missing_from_the_stream_are_counted_and_named() -> None:
    """A stream interval of 4 that drops the end of the reasoning: 10 were generated, 8 arrived."""
    events = [delta(ids=[1, 2, 3, 4], reasoning="we think"), delta(ids=[7, 8, 9], content="so yes")]
    found = play(ROLE, *events, delta("stop", ids=[2]), usage(10, reasoning_tokens=6))
    assert (found["tokens_total"], found["tokens_streamed"], found["tokens_source"]) == (10, 8, "usage")
    assert (found["tokens_reasoning"], found["tokens_answer"]) == (6, 4)
    assert found["output_token_ids"] is None  # a part of the answer would replay as another one
    assert "fewer token ids arrived than were counted" in found.advice


def test_a_huge_first_chunk_is_not_decode_time() -> None:
    """Fifty tokens at once, then one every 60 ms: 60 ms a token, not 2."""
    shown = [delta(ids=list(range(50)), reasoning="so " * 50), 0.06, delta(ids=[1], content="a")]
    found = play(ROLE, *shown, 0.06, delta("stop", ids=[2], content="b"), usage(52))
    assert (found["tokens_total"], found["tokens_timed"]) == (52, 3)
    assert found["tpot_ms"] == near(found.ms(3, since=1) / 2)
    details = {"completion_tokens_details": {"reasoning_tokens": 49}}
    hidden = play(ROLE, 0.1, delta(content="a"), 0.06, delta("stop", content="b"), usage(51, **details))
    assert hidden["tokens_timed"] == 2
    assert hidden["tpot_ms"] == near(hidden.ms(2, since=1))
    unsaid = play(ROLE, delta(content="a"), 0.06, delta("stop", content="b"), usage(51))  # and no details either
    assert math.isnan(unsaid["tpot_ms"])
    assert "generated and not streamed" in unsaid.advice


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        ("{}", "/v1/chat/completions"),
        ("{}/v1/", "/v1/chat/completions"),
        ("{}/v1/v1", "/v1/chat/completions"),
        ("{}/gateway/kimi", "/gateway/kimi/v1/chat/completions"),
        ("{}/gateway/kimi/v1", "/gateway/kimi/v1/chat/completions"),
    ],
)
def test_the_address_with_and_without_v1_and_behind_a_path(typed: str, path: str) -> None:
    asked = []
    reply = Reply([ROLE, delta("stop", content="a"), usage(1)])
    with serving(lambda path, _: asked.append(path) or reply) as server:
        bench.run(typed.format(server.url).removeprefix("http://"), ["hi"], model="toy", **OPTIONS)
    assert asked == [path]


# Latency maths


def running(total: int, finish: str | None = None, **fields: Any) -> dict:
    """A chunk that carries the usage so far, as vLLM's continuous_usage_stats makes it."""
    return delta(finish, **fields) | {"usage": usage(total)["usage"]}


def in_threes(**how: Any) -> list:
    """One token, then three every 90 ms, as a step with two accepted drafts sends them."""
    if how.get("ids"):
        chunks = [delta(ids=[n, n, n], content="abc") for n in range(4)]
        return [ROLE, delta(ids=[9], content="x"), *(e for c in chunks for e in (0.09, c)), delta("stop", ids=[])]
    chunks = [running(4 + 3 * n, content="abc") for n in range(4)]
    return [ROLE, running(1, content="x"), *(e for c in chunks for e in (0.09, c)), running(13, "stop")]


@pytest.mark.parametrize("ids", [True, False], ids=["token ids", "running usage"])
def test_itl_is_of_a_token_and_a_gap_is_of_a_chunk(ids: bool) -> None:
    found = play(*in_threes(ids=ids), usage(13))
    gaps = [found.ms(event, since=event - 1) for event in (2, 3, 4, 5)]
    assert list(found["chunk_tokens"]) == [1, 3, 3, 3, 3]
    assert found["gaps_ms"] == pytest.approx(gaps, abs=25)
    line = bench.summary(bench_rows.frame([dict(found.row)])).iloc[0]
    assert line["chunk_gap_p50_ms"] == near(np.median(gaps))
    assert line["itl_p50_ms"] == pytest.approx(np.median(gaps) / 3, abs=8)


def test_tpot_and_gaps_differ_under_speculation() -> None:
    found = play(*in_threes(ids=True), usage(13))
    line = bench.summary(bench_rows.frame([dict(found.row)])).iloc[0]
    assert found["tpot_ms"] == pytest.approx(found.ms(5, since=1) / 12, abs=8)
    assert line["chunk_gap_p50_ms"] / line["tpot_ms"] == pytest.approx(3, rel=0.35)
    plain = play(*[delta(content=text) for text in "abc"], delta("stop"), usage(9)).row  # who tells of chunks?
    assert len(plain["gaps_ms"]) == 2  # gaps, but no ITL
    assert math.isnan(bench.summary(bench_rows.frame([dict(plain)])).iloc[0]["itl_p50_ms"])


def test_tpot_leaves_ttft_out_and_itl_is_no_mean() -> None:
    chunks = [event for word in "bcdefghij" for event in (0.02, delta(content=word, ids=[1]))]
    chunks[8] = 0.15  # one stall
    found = play(ROLE, 0.3, delta(content="a", ids=[1]), *chunks, delta("stop", ids=[]), usage(10))
    assert found["ttft_ms"] >= 295
    assert found["tpot_ms"] == near(found.ms(10, since=1) / 9)
    assert found["tpot_ms"] < found["ttft_ms"] / 3
    line = bench.summary(bench_rows.frame([dict(found.row)])).iloc[0]
    gaps = [found.ms(event, since=event - 1) for event in range(2, 11)]
    assert line["itl_p50_ms"] == near(np.median(gaps))
    assert line["itl_p99_ms"] == near(np.quantile(gaps, 0.99))
    assert line["itl_p99_ms"] > 3 * line["itl_p50_ms"]  # a mean a request would hide the stall


def test_lengths_come_from_the_server_never_from_a_tokenizer() -> None:
    """Eleven words that any tokenizer cuts into at least eleven tokens; the server generated six."""
    text = "one two three four five six seven eight nine ten eleven"
    found = play(ROLE, delta(content=text[:20]), 0.05, delta("stop", content=text[20:]), usage(6))
    assert (found["tokens_total"], found["tokens_source"]) == (6, "usage")
    assert found["tpot_ms"] == near(found.ms(2, since=1) / 5)
    by_ids = play(ROLE, delta(content=text, ids=[1, 2, 3]), delta("stop", ids=[4]))
    assert (by_ids["tokens_total"], by_ids["tokens_source"]) == (4, "token_ids")
    neither = play(ROLE, delta(content=text), delta("stop", content="."))
    assert (neither["tokens_total"], neither["tokens_source"]) == (2, "chunks")
    assert "no usage" in neither.advice


def drafting_page(requests: int, warm: int) -> str:
    """vLLM's page after so many requests of 3 tokens: the first `warm` accepted nothing, the others 1 of 2."""
    good = max(requests - warm, 0)
    return "\n".join(
        [
            f"vllm:spec_decode_num_drafts_total {requests}",
            f"vllm:spec_decode_num_draft_tokens_total {2 * requests}",
            f"vllm:spec_decode_num_accepted_tokens_total {good}",
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {good}',
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 0',
            f"vllm:generation_tokens_total {3 * requests}",
            f'vllm:request_success_total{{finished_reason="stop"}} {requests}\n',
        ]
    )


THREE = [ROLE, delta(content="a"), 0.03, delta("stop", content="bc"), usage(3)]


def test_warm_up_is_in_no_row_no_count_and_no_time() -> None:
    with serving(lambda *_: Reply(THREE), lambda: drafting_page(len(server.requests), warm=2)) as server:
        rows = bench.run(server.url, ["a", "b"], max_tokens=4, repeats=2, warmup=2)
    assert len(server.requests) == 6
    assert len(rows) == 4
    counted = acceptance.from_rows(rows)
    assert (counted.drafts, counted.accepted, counted.mean_length) == (4, 4, 2.0)  # the warm-up accepted nothing
    assert rows["started_s"].min() < 0.02  # the clock starts after it
    with serving(lambda *_: Reply(THREE)) as server:
        bench.run(server.url, ["a", "b"], max_tokens=4, repeats=1, warmup=1, concurrency=2)
    ended = [written[-1] for written in server.written[:2]]
    assert min(server.sent_at[2:]) >= max(ended)  # none of it runs beside a timed request


def test_a_cold_first_request_is_warmed_away_or_named() -> None:
    """z-lab/dflash#135: 43 tok/s in the first request, 69 in the next."""

    def script(path: str, body: dict) -> Reply:
        pause = 0.4 if len(server.requests) == 1 else 0.1  # a busy machine is late by tens of milliseconds
        return Reply([ROLE, *(e for text in "abc" for e in (pause, delta(content=text))), delta("stop"), usage(3)])

    options = {"max_tokens": 4, "repeats": 3, "shuffle": False}
    with serving(script) as server:
        cold = bench.run(server.url, ["hi"], warmup=0, **options)
    with serving(script) as server:
        warmed = bench.run(server.url, ["hi"], warmup=1, **options)
    assert cold["tpot_ms"].iloc[0] > 2 * cold["tpot_ms"].iloc[1:].max()
    assert "first request was far slower" in bench.summary(cold).iloc[0]["advice"]
    assert warmed["tpot_ms"].max() < 350
    assert "first request" not in bench.summary(warmed).iloc[0]["advice"]


# Workload


def prefix_cache(salts: bool) -> Callable[[str, dict], Reply]:
    """A server that keeps every prompt's prefix (a character is a token), apart by salt where it knows salts."""
    seen: list[tuple[str, str]] = []

    def script(path: str, body: dict) -> Reply:
        if not salts and "cache_salt" in body:
            return Reply(status=400, body={"error": {"message": "unknown field cache_salt"}})
        salt, text = body.get("cache_salt", ""), body["messages"][0]["content"]
        hits = [common(text, other) for known, other in seen if known == salt]
        seen.append((salt, text))
        details = {"cached_tokens": max(hits, default=0)}
        return Reply([ROLE, delta("stop", content="a"), usage(1, len(text), prompt_tokens_details=details)])

    return script


def common(one: str, other: str) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_repeats_do_not_meet_in_a_prefix_cache() -> None:
    prompts = ["Tell me of the sea. " * 10, "Tell me of the sea. " * 9 + "And of ships."]
    options = {"max_tokens": 4, "repeats": 3, "warmup": 1, "seed": 0}  # one seed, the same prompts again and again
    with serving(prefix_cache(salts=True)) as server:
        salted = bench.run(server.url, prompts, **options)
    assert salted["tokens_cached"].tolist() == [0] * 6
    with serving(prefix_cache(salts=False)) as server:
        hit = bench.run(server.url, prompts, **options)
        marked = bench.run(server.url, prompts, unique_prompts=True, **options)
    assert hit["tokens_cached"].min() >= 180  # what happens on a server without salts is said
    assert "served from the prefix cache" in bench.summary(hit).iloc[0]["advice"]
    assert marked["tokens_cached"].max() <= len("[request 12345678]")
    assert marked["prompt_id"].tolist() == hit["prompt_id"].tolist()  # still the same prompts to pair by


def test_ignore_eos_is_not_set_unasked_and_named_when_asked() -> None:
    with serving(lambda *_: Reply(THREE)) as server:
        plain = bench.run(server.url, ["hi"], **OPTIONS)
        forced = bench.run(server.url, ["hi"], extra_body={"ignore_eos": True}, **OPTIONS)
    assert ["ignore_eos" in body for body in server.requests] == [False, True]
    assert "ignore_eos" not in bench.summary(plain).iloc[0]["advice"]
    assert "do not read acceptance or a speedup" in bench.summary(forced).iloc[0]["advice"]
    own = bench.prompts()["messages"].map(lambda messages: messages[-1]["content"])
    assert own.str.contains(r"[a-z]+ [a-z]+ [a-z]+").all()  # words, not random tokens


BLANKED = {
    "one text": lambda number: "FULL DATA SHOULD BE FETCHED FROM THE SOURCE",
    "numbered": lambda number: f"item {number}",
    "said": lambda number: f"{'abcdefgh'[number] * 9}: placeholder",
}


@pytest.mark.parametrize("kind", BLANKED)
def test_placeholder_prompts_are_refused(kind: str, tmp_path: Any) -> None:
    """Also where only one category of many was published blanked out."""
    fine = [
        f"Why is the {thing} blue?" for thing in ("sea", "sky", "whale", "flag", "ink", "berry", "smoke", "ice")
    ]
    texts = {"fine": fine, "blanked": [BLANKED[kind](number) for number in range(8)]}
    lines = [
        json.dumps({"id": f"{name}-{i}", "category": name, "messages": [{"role": "user", "content": text}]})
        for name, found in texts.items()
        for i, text in enumerate(found)
    ]
    (tmp_path / "set.jsonl").write_text("\n".join(lines))
    with pytest.raises(bench.BadPrompts, match=r"category 'blanked'.*placeholders"):
        bench.prompts(tmp_path / "set.jsonl")


def test_both_sides_count_tokens_alike_or_are_not_compared() -> None:
    """A baseline without usage would be counted by chunks, its rival by tokens: a ratio of nothing."""
    events = [ROLE, delta(content="a"), 0.03, delta(content="b"), 0.03, delta("stop", content="c")]
    with serving(lambda *_: Reply(list(events))) as bare, serving(lambda *_: Reply([*events, usage(9)])) as full:
        parts = [
            bench.run(server.url, ["hi"], variant=name, **OPTIONS)
            for server, name in ((bare, "chunks"), (full, "usage"), (full, "again"))
        ]
    rows = pd.concat(parts, ignore_index=True)
    with pytest.raises(bench.MixedCounts):
        bench.speedup(rows, "chunks", "usage")
    assert bench.speedup(rows, "usage", "again").iloc[0]["speedup"] == pytest.approx(1, abs=0.5)


# Speculation metrics

# Four drafts of three tokens, of which 3, 0, 2 and 1 were accepted: 6 of 12, so 1 + 6 / 4 tokens a draft.
VLLM = {
    "num_spec_tokens": 3,
    "acceptance_histogram": [1, 1, 1, 1],
    "num_draft_tokens": 12,
    "mean_acceptance_length": 2.5,
    "draft_acceptance_rate": 0.5,
}
SGLANG = {"spec_verify_ct": 4, "spec_accept_token_num": 6, "spec_draft_token_num": 12, "completion_tokens": 11}
PAGE = """vllm:spec_decode_num_drafts_total{{engine="{engine}"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{engine="{engine}"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="{engine}"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}",position="1"}} {second}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="{engine}",position="2"}} {third}
vllm:generation_tokens_total{{engine="{engine}"}} {generated}
vllm:request_success_total{{engine="{engine}",finished_reason="stop"}} {requests}
"""
NAMES = ("drafts", "drafted", "accepted", "first", "second", "third", "generated", "requests")


def page(*counts: int, engine: int = 0) -> str:
    """vLLM's page of one engine."""
    return PAGE.format(engine=engine, **dict(zip(NAMES, counts, strict=True)))


IDLE, WORKED = page(0, 0, 0, 0, 0, 0, 0, 0), page(4, 12, 6, 3, 2, 1, 11, 1)


def snapshots(*pages: str) -> list[acceptance.Counters]:
    return [acceptance.snapshot(text) for text in pages]


def test_every_source_of_acceptance_includes_the_bonus_token() -> None:
    steps = {"per_step_accepted": [3, 0, 2, 1], "per_step_drafted": [3, 3, 3, 3]}
    found = {
        "counters": acceptance.between(*snapshots(IDLE, WORKED)),
        "vLLM's response": acceptance.from_response(VLLM, 11),
        "vLLM's response, detailed": acceptance.from_response(VLLM | steps, 11),
        "SGLang's response": acceptance.from_response(SGLANG, 11),
        "SGLang's histogram": acceptance.from_response(SGLANG | {"spec_accept_histogram": [1, 1, 1, 1]}, 11),
        "its other form": acceptance.from_response(SGLANG | {"spec_accept_histogram": [0, 1, 1, 1, 1]}, 11),
        "the stream": acceptance.from_chunks([[1, 4, 1, 3, 2]], k=3, every_step_drafts=True),
    }
    table = acceptance.table(found)
    assert table["acceptance_length"].tolist() == [2.5] * len(found)
    assert table["acceptance_rate"].tolist() == [0.5] * len(found)
    assert table["tokens_per_step"].dropna().unique().tolist() == [2.5]
    for name, a in found.items():
        if name != "SGLang's response":  # which tells no positions
            assert tuple(a.per_position) == (3 / 4, 2 / 4, 1 / 4), name
            assert a.per_position.mean_length == 2.5, name


def test_nothing_is_counted_twice() -> None:
    expected = acceptance.between(*snapshots(IDLE, WORKED), expect_tokens=11)
    bare = WORKED.replace("_total", "")
    for shape in (WORKED + WORKED, WORKED + bare, bare):  # a page strung together, both names, the short names
        assert acceptance.between(*snapshots(IDLE, shape), expect_tokens=11) == expected
    share, rest = page(3, 9, 5, 2, 2, 1, 8, 1, engine=0), page(1, 3, 1, 1, 0, 0, 3, 0, engine=1)
    assert acceptance.between(*snapshots(IDLE, share + rest), expect_tokens=11) == expected
    with pytest.raises(acceptance.Unreadable, match="stands there twice, as 4 and 5"):
        acceptance.snapshot(WORKED + page(5, 12, 6, 3, 2, 1, 11, 1))
    both = WORKED + page(4, 12, 6, 3, 2, 1, 11, 1, engine=1)  # two API servers, each with the whole count
    with pytest.raises(acceptance.ForeignTraffic, match=r"22 tokens .* sent 11; exactly 2 times"):
        acceptance.between(*snapshots(IDLE, both), expect_tokens=11)


def test_pooled_and_request_mean_are_two_figures() -> None:
    """8 drafts that accept 1 of 3 each, 2 drafts that accept all 3: the one pools drafts, the other requests."""
    told = {"long": [0, 8, 0, 0], "short": [0, 0, 0, 2]}

    def script(path: str, body: dict) -> Reply:
        histogram = told[body["messages"][0]["content"]]
        drafts, accepted = sum(histogram), sum(j * n for j, n in enumerate(histogram))
        metrics = VLLM | {"acceptance_histogram": histogram, "num_draft_tokens": 3 * drafts}
        last = usage(1 + drafts + accepted) | {"metrics": {"speculative_decoding": metrics}}
        return Reply([ROLE, delta(content="x"), 0.01, delta("stop", content="y" * 40), last])

    with serving(script) as server:
        rows = bench.run(server.url, ["long", "short"], **OPTIONS)
    assert rows["acceptance_source"].tolist() == ["response", "response"]
    assert acceptance.from_rows(rows).mean_length == pytest.approx(1 + (8 + 6) / 10)
    assert acceptance.request_mean(rows) == pytest.approx((2 + 4) / 2)


def sglang_page(requests: int, *, counters: bool = True) -> str:
    """SGLang's page: before us 1000 tokens in 900 verify calls, then a request of 11 tokens in 4."""
    lines = [
        "# TYPE sglang:spec_accept_length gauge",
        'sglang:spec_accept_length{model_name="toy",tp_rank="0"} 1.11',
        'sglang:spec_accept_rate{model_name="toy",tp_rank="0"} 0.04',
        f'sglang:generation_tokens_total{{model_name="toy"}} {1000 + 11 * requests}.0',
        f'sglang:num_requests_total{{model_name="toy"}} {50 + requests}.0',
    ]
    lines += [f'sglang:spec_verify_calls_total{{model_name="toy"}} {900 + 4 * requests}.0'] if counters else []
    return "\n".join(lines) + "\n"


def test_sglang_is_differenced_never_read_from_its_gauge() -> None:
    events = [ROLE, delta(content="a"), 0.01, delta("stop", content="b" * 10), usage(11)]
    with serving(lambda *_: Reply(list(events)), lambda: sglang_page(len(server.requests))) as server:
        rows = bench.run(server.url, ["a", "b"], max_tokens=16, repeats=1, warmup=1)
    assert rows["acceptance_source"].tolist() == ["counters"] * 2
    found = acceptance.from_rows(rows)
    assert (found.drafts, found.accepted, found.tokens) == (8, 12, 20)
    assert found.mean_length == 2.5  # 10 tokens after the first in 4 steps; 11 / 4 would count the first one, too
    assert math.isnan(found.rate)  # drafted tokens are not counted: no figure, rather than the gauge's
    assert found.by_position().empty

    def bare() -> str:
        return sglang_page(len(server.requests), counters=False)

    with serving(lambda *_: Reply(list(events)), bare) as server:
        rows = bench.run(server.url, ["a"], max_tokens=16, repeats=1, warmup=0)
    assert rows["drafts"].isna().all()
    assert "only the gauges sglang:spec_accept_length" in rows["acceptance_source"].iloc[0]


# What is not a numbered complaint, but of the same kind


@pytest.mark.parametrize("clock", ['vllm:generation_tokens_created{engine="0"}', "process_start_time_seconds"])
def test_a_restart_in_between_is_seen_even_where_counters_rose(clock: str) -> None:
    pages = [text + f"{clock} {began}\n" for text, began in ((IDLE, 1.7e9), (WORKED, 1.8e9))]
    with pytest.raises(acceptance.CountersReset):
        acceptance.between(*snapshots(*pages))
    with pytest.raises(acceptance.CountersReset):
        acceptance.between(*snapshots(WORKED, IDLE))


def test_an_idle_server_has_no_acceptance_and_no_error() -> None:
    for text in (WORKED, sglang_page(3)):
        idle = acceptance.between(*snapshots(text, text), expect_tokens=0)
        assert (idle.drafts, idle.accepted, idle.tokens) == (0, 0, 0)
        line = acceptance.table({"idle": idle}).iloc[0]
        assert line[["acceptance_length", "acceptance_rate", "drafting_share", "tokens_per_step"]].isna().all()


def test_an_older_page_without_positions_still_has_its_sum() -> None:
    pages = ["".join(line for line in text.splitlines(True) if "_per_pos" not in line) for text in (IDLE, WORKED)]
    found = acceptance.between(*snapshots(*pages))
    assert (found.mean_length, found.rate, len(found.per_position)) == (2.5, 0.5, 0)
    whole = acceptance.between(*snapshots(IDLE, WORKED))
    assert acceptance.pool([found, whole]).mean_length == 2.5
    assert len(acceptance.pool([found, whole]).per_position) == 0  # positions of a part are not those of all


def test_a_sum_that_its_positions_contradict_is_refused() -> None:
    with pytest.raises(acceptance.Impossible):
        acceptance.between(*snapshots(IDLE, page(4, 12, 7, 3, 2, 1, 11, 1)))


def test_streams_alone_tell_tokens_a_step_and_no_more() -> None:
    """n-gram: a chunk of one token may be a step without a draft, so there is no acceptance length."""
    chunks = [[1, 1, 4, 1, 2, 0], [1, 3]]
    found = acceptance.from_chunks(chunks, k=3, every_step_drafts=False)
    assert (found.steps, found.tokens, found.accepted) == (5, 11, 6)
    assert found.tokens_per_step == 11 / 5
    assert all(math.isnan(x) for x in (found.mean_length, found.rate, found.drafting_share))
    drafted = acceptance.from_chunks(chunks, k=3, every_step_drafts=True)
    assert (drafted.drafts, drafted.mean_length) == (5, 11 / 5)
    with pytest.raises(acceptance.Impossible, match="a chunk holds 5 tokens, a step yields at most 4"):
        acceptance.from_chunks([[1, 5]], k=3, every_step_drafts=True)


def test_rates_never_pass_for_counts_nor_one_kind_for_the_other() -> None:
    found = acceptance.from_positions([4, 4], drafts=4)  # whole numbers, the case that a check of types misses
    for rates in (found.per_position, found.conditional):
        with pytest.raises(acceptance.Impossible, match="holds rates"):
            acceptance.from_positions(rates, drafts=4)
    assert found.per_position != found.conditional  # equal figures, another meaning
    assert not hasattr(found.conditional, "mean_length")


@pytest.mark.parametrize(
    "told",
    [
        {"num_spec_tokens": 3},
        VLLM | {"acceptance_histogram": None},
        VLLM | {"num_draft_tokens": 5},
        SGLANG | {"spec_verify_ct": None},
        SGLANG | {"spec_draft_token_num": 5},
    ],
)
def test_a_response_whose_account_makes_no_sense_spoils_no_times(told: dict) -> None:
    last = usage(11) | (
        {"meta_info": told} if "spec_verify_ct" in told else {"metrics": {"speculative_decoding": told}}
    )
    found = play(ROLE, delta(content="a"), 0.02, delta("stop", content="b" * 20), last)
    assert pd.isna(found["error"])
    assert found["tpot_ms"] > 0
    assert pd.isna(found["drafts"])
    assert found["acceptance_source"].startswith("unusable: ")


def test_sglang_s_own_account_is_read_from_the_stream() -> None:
    last = delta("stop", content="b" * 20)
    last["choices"][0]["meta_info"] = SGLANG | {"spec_accept_histogram": [1, 1, 1, 1]}
    found = play(ROLE, delta(content="a"), 0.02, last, usage(11))
    assert (found["drafts"], found["drafted"], found["accepted"]) == (4, 12, 6)
    assert list(found["accepted_at"]) == [3, 2, 1]
    assert found["acceptance_source"] == "response"


FAILURES: dict[str, tuple[Reply, str]] = {
    "status": (Reply(status=429, body={"error": {"message": "slow down"}}), "HTTP 429: slow down"),
    "error in a 200 stream": (
        Reply([ROLE, delta(content="a"), {"error": {"message": "out of memory"}}]),
        "error inside the stream: out of memory",
    ),
    "error event": (
        Reply([ROLE, b'event: error\ndata: {"message": "gone"}\n\n']),
        "error inside the stream: gone",
    ),
    "broken off": (Reply([ROLE, delta(content="a"), BREAK]), "stream broke off"),
    "ended early": (Reply([ROLE, delta(content="a"), usage(1)]), "without a finish reason"),
    "time-out": (Reply([ROLE, delta(content="a"), 1.0, delta("stop"), usage(1)]), "time-out after 0.4 s"),
    "choices of no known shape": (Reply([ROLE, {"choices": ["a"]}, delta("stop")]), "event of an unknown shape"),
    "nesting without end": (Reply([ROLE, "[" * 100_000]), "unreadable event"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_is_a_row_and_never_a_success(kind: str) -> None:
    failing, message = FAILURES[kind]

    def script(path: str, body: dict) -> Reply:
        return failing if body["messages"][0]["content"] == "bad" else Reply(THREE)

    with serving(script) as server:
        rows = bench.run(server.url, ["good", "bad"], timeout_s=0.4, variant="base", **OPTIONS)
    good, bad = rows.iloc[0], rows.iloc[1]
    assert pd.isna(good["error"])
    assert message in bad["error"]
    measured = ["ttft_ms", "tpot_ms", "e2e_ms", "tokens_total", "finish_reason", "output_token_ids"]
    assert bad[measured].isna().all()
    line = bench.summary(rows).iloc[0]
    assert (line["requests"], line["failed"], line["tokens_total"]) == (2, 1, 3)
    assert bench.levels(rows).iloc[0]["failed"] == 1
    assert len(bench.paired(rows.assign(variant="fast"), "fast", "fast")) == 1  # the failed prompt has no pair
