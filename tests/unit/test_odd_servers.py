"""Servers, keys and arguments as nobody should have them: a row or a named error each time, never a crash."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from labkit import bench
from labkit.bench import client, rows
from labkit.bench.stream import Stream
from labkit.engine.urls import BadKey, base_url
from labkit.errors import LabError
from tests.unit.sse_server import ROLE, Reply, delta, serving, usage

OPTIONS = {"max_tokens": 4, "repeats": 1, "warmup": 0}
ANSWER = [ROLE, delta(content="a"), 0.01, delta(content="b"), delta("stop"), usage(3)]
DETAILS = {"prompt_tokens_details": {"cached_tokens": 1}, "completion_tokens_details": {"reasoning_tokens": 1}}
WHOLE = [
    {**ROLE, "prompt_token_ids": [1, 2], "usage": {"prompt_tokens": 2, "completion_tokens": 0}},
    delta(reasoning="x", ids=[3]),
    delta(content="a", ids=[4, 5], tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]),
    {**delta("stop", ids=[]), "metrics": {"speculative_decoding": {"num_spec_tokens": 1}}, "meta_info": {}},
    usage(3, **DETAILS),
]
ODD = [None, 5, -1, 1.5, math.nan, math.inf, 10**30, "x", "", [], ["x"], [1], [None], {}, {"a": 1}, True]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a nested value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in [(value, key), *places(value[key])]]


def test_a_stream_of_any_types_is_a_row_or_a_named_error() -> None:
    rng, found = random.Random(0), []
    for _ in range(2000):
        events = copy.deepcopy(WHOLE)
        for _ in range(rng.randint(1, 2)):
            container, key = rng.choice(places(events))
            container[key] = rng.choice(ODD)
        stream = Stream(0.0)
        try:
            for at, event in enumerate(events):
                client.fed(stream, client.json.dumps(event), 1.0 + at)
            stream.close()
            found.append(rows.of_stream(stream) | {"variant": str(len(found))})
        except LabError:
            continue
    assert len(found) > 500
    table = rows.frame(found)
    assert (table["tokens_total"] >= 0).all()
    assert not (bench.summary(table.head(20), by="variant")["tok_s"] <= 0).any()
    assert bench.summary(table.assign(variant="v"), by="variant")["itl_p50_ms"].iloc[0] > 0


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_server_gave_up_is_no_success(reason: str) -> None:
    cut = Reply([ROLE, delta(content="a"), 0.01, delta(content="b"), delta(reason), usage(2)])
    with serving(lambda path, body: cut if body["messages"][0]["content"] == "bad" else Reply(ANSWER)) as server:
        table = bench.run(server.url, ["good", "bad"], **OPTIONS)
    assert f"gave the answer up after 2 chunks (finish reason '{reason}')" in table["error"].iloc[1]
    assert bench.summary(table).iloc[0]["failed"] == 1


def test_a_gateway_that_counts_nothing_has_its_chunks_counted() -> None:
    with serving(lambda *_: Reply([*ANSWER[:-1], usage(0)])) as server:
        row = bench.run(server.url, ["hi"], **OPTIONS).iloc[0]
    assert (row["tokens_total"], row["tokens_source"]) == (2, "chunks")


@pytest.mark.parametrize(
    ("status", "advice"), [(401, "LABKIT_API_KEY"), (307, "redirects to https://other/v1"), (404, "model name")]
)
def test_a_refusal_says_what_to_do(status: int, advice: str) -> None:
    refused = Reply(status=status, body={}, headers={"Location": "https://other/v1"} if status == 307 else {})
    with serving(lambda *_: refused) as server, pytest.raises(bench.NothingMeasured, match=advice):
        bench.run(server.url, ["hi"], **OPTIONS)


@pytest.mark.parametrize("form", ["/v1/chat/completions", "/v1/completions/", "/v1/models", "//v1/v1"])
def test_a_pasted_endpoint_is_an_address(form: str) -> None:
    assert base_url(f"http://host:8000/gateway{form}") == "http://host:8000/gateway/v1"
    assert base_url("http://host/models/v1") == "http://host/models/v1"


@pytest.mark.parametrize("key", ["sk-SECRET\n", "sk-\nSECRET", "sk-SECRET\u00e9"])
def test_a_key_never_gets_into_an_error(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_API_KEY", key)
    with serving(lambda *_: Reply(ANSWER)) as server:
        if key == key.strip() or not key.isascii():
            for model in (None, "toy"):
                with pytest.raises(BadKey, match=r"^(?!.*SECRET)"):
                    bench.run(server.url, ["hi"], model=model, **OPTIONS)
        else:
            assert bench.run(server.url, ["hi"], **OPTIONS)["error"].isna().all()


def test_a_local_server_is_not_asked_for_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving(lambda *_: Reply(ANSWER)) as server:
        assert bench.run(server.url, ["hi"], **OPTIONS)["error"].isna().all()
    with serving(lambda *_: Reply(status=500)) as server, pytest.raises(bench.NothingMeasured):
        bench.run(server.url, ["hi"], **OPTIONS)


NONSENSE = [
    *({name: value} for name in ("repeats", "max_tokens") for value in (1.5, "2", None, True, -1)),
    *({"concurrency": value} for value in (2.0, "2", None, [], [1, 0], ["a"])),
    *({"temperature": value} for value in (-1, math.nan, None)),
    *({"timeout_s": value} for value in (0, -1, math.nan)),
    *({"cooldown_s": value} for value in (-1, math.inf)),
    *({"seed": value} for value in (1.5, None)),
    *({"extra_body": value} for value in ("x", {"a": math.nan}, {"a": {1}}, [1])),
    {"warmup": -1},
]


@pytest.mark.parametrize("wrong", NONSENSE, ids=str)
def test_nonsense_is_named_before_anything_is_sent(wrong: dict[str, Any]) -> None:
    with pytest.raises(bench.BadRun, match=next(iter(wrong))):
        bench.run("http://127.0.0.1:9", ["hi"], **OPTIONS | wrong)


@pytest.mark.parametrize(
    "prompts",
    [[{"prompt": math.nan}], [{"prompt": 5}], [5], [{"messages": math.nan}], [{"id": "a", "prompt": "x"}] * 2],
)
def test_prompts_that_are_none_or_share_an_id_are_refused(prompts: list) -> None:
    with pytest.raises(bench.BadPrompts):
        bench.run("http://127.0.0.1:9", prompts, **OPTIONS)


def test_a_journal_gives_back_only_the_same_requests(tmp_path: Path) -> None:
    def sent(prompt: str, **changed: Any) -> int:
        before = len(server.requests)
        table = bench.run(server.url, [prompt], journal=str(tmp_path / "j.jsonl"), **OPTIONS | changed)
        assert len(table) == 1
        assert table["max_tokens"].iloc[0] == changed.get("max_tokens", 4)
        return len(server.requests) - before

    with serving(lambda *_: Reply(ANSWER)) as server:
        assert [sent("hi"), sent("hi")] == [1, 0]
        assert sent("something else") == 1  # under the same id
        for other in (
            {"max_tokens": 9},
            {"temperature": 0.5},
            {"seed": 3},
            {"model": "m"},
            {"extra_body": {"a": 1}},
        ):
            assert [sent("hi", **other), sent("hi", **other)] == [1, 0]
        assert sent("hi", concurrency=np.int64(1), extra_body={"a": 1}) == 0


def test_a_category_in_which_a_variant_failed_stays_in_the_table() -> None:
    with serving(lambda *_: Reply(ANSWER)) as server:
        prompts = [{"id": name, "category": name, "messages": name} for name in "abc"]
        base = bench.run(server.url, prompts, variant="base", **OPTIONS)
    fast = base.assign(variant="fast")
    fast.loc[fast["category"] == "b", ["error", "tpot_ms", "decode_ms"]] = ["boom", math.nan, math.nan]
    both = pd.concat([base, fast])
    table = bench.speedup(both, "base", "fast", by="category").set_index("category")
    assert list(table.index) == ["a", "b", "c"]
    assert table["left_out"].tolist() == [0, 1, 0]
    assert math.isnan(table.loc["b", "speedup"])
    unnamed = both.assign(category=both["category"].where(both["category"] != "a"))
    assert bench.speedup(unnamed, "base", "fast", by="category")["left_out"].tolist() == [0, 1, 0]
    assert bench.summary(both, by="variant")["variant"].tolist() == ["base", "fast"]
    assert bench.levels(both, by="variant")["variant"].tolist() == ["base", "fast"]
