"""The reader of streamed answers against damage by chance: a row or a named error, and an end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import files
from labkit.bench import client, rows
from labkit.bench.plan import Plan
from labkit.bench.prompts import Prompt
from tests.faults import figures
from tests.faults.fuzzing import LIMIT_S, STRUCTURED, VALUE, parts, share
from tests.faults.mutations import Mutator, ends_within
from tests.unit.sse_server import ROLE, delta, usage


def streams() -> list[bytes]:
    """Answers as vLLM, SGLang and gateways send them."""
    spoken = [{**ROLE, "prompt_token_ids": [1, 2]}, delta(reasoning="x", ids=[3]), delta(content="ab", ids=[4, 5])]
    told = {"num_spec_tokens": 2, "acceptance_histogram": [1, 1, 0], "num_draft_tokens": 4, "num_drafts": 2}
    last = {**delta("stop", ids=[]), "metrics": {"speculative_decoding": told}}
    steps = {
        **delta("stop"),
        "meta_info": {"spec_verify_ct": 2, "completion_tokens": 5, "spec_accept_token_num": 2},
    }
    calls = delta(tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])
    parts = delta(content=[{"type": "thinking", "thinking": [{"text": "t"}]}, {"type": "text", "text": "u"}])
    events = [[*spoken, last, usage(3)], [ROLE, calls, delta(content="c"), steps], [ROLE, parts, delta("length")]]
    lines = [b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in each) for each in events]
    return [line + b"data: [DONE]\n\n" for line in lines]


class Pieces(httpx.AsyncByteStream):
    """A body that comes in pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    async def __aiter__(self) -> Any:
        for piece in self.pieces:
            yield piece


PLAN = Plan(
    base_url="http://127.0.0.1:9/v1", metrics_url="http://127.0.0.1:9/metrics", model="m", max_tokens=8,
    temperature=0.0, seed=0, concurrency=1, timeout_s=30.0, unique_prompts=False, extra_body={},
)  # fmt: skip


async def measured(bodies: list[list[bytes]]) -> list[dict[str, Any]]:
    """A row of the benchmark for each body that a server streams."""
    left = iter(bodies)
    headers = {"content-type": "text/event-stream"}

    def reply(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": []})
        return httpx.Response(200, headers=headers, stream=Pieces(next(left)))

    async with httpx.AsyncClient(transport=httpx.MockTransport(reply), event_hooks=client.ASYNC_HOOKS) as session:
        asked = client.Session(PLAN, session)
        return [await asked.measure(Prompt(str(i), "c", "hi"), i) for i in range(len(bodies))]


def saved(found: list[dict[str, Any]], path: Path) -> None:
    """Rows, failed ones too, are one table that a file takes, and no figure of it is impossible."""
    table = rows.frame([row | {"variant": "v"} for row in found])
    files.write_parquet(path, table)
    whole = table[table["error"].isna()]
    assert (whole["tokens_total"] >= 0).all()
    assert not (whole["tpot_ms"] <= 0).any()
    json.dumps(found, default=str).encode()


@parts
def test_streams(tmp_path: Path, part: int) -> None:
    mutator, count = Mutator(streams(), part), share("streams")
    for start in range(0, count, 250):
        bodies = [mutator.pieces(mutator.draw()) for _ in range(min(250, count - start))]
        with ends_within(LIMIT_S, b"streams"):
            found = asyncio.run(measured(bodies))
        assert len(found) == len(bodies)
        saved(found, tmp_path / "rows.parquet")


@pytest.mark.parametrize("k", [-1, 4097, 2**31, 10**15])
@pytest.mark.parametrize("more", [{}, {"per_step_accepted": [1], "per_step_drafted": [1]}])
def test_an_account_of_endless_drafts_is_unusable(k: int, more: dict[str, Any]) -> None:
    """What the soak found: a count for each of so many positions would take hours."""
    told = {"num_spec_tokens": k, "acceptance_histogram": [1, 1], "num_draft_tokens": 4, **more}
    assert "unusable" in rows.of_response(told, 5)["acceptance_source"]


FIELDS = ["choices", "usage", "error", "object", "prompt_token_ids", "metrics", "meta_info"]
CHOICE = ["index", "delta", "finish_reason", "token_ids", "text", "usage", "prompt_token_ids"]


@given(
    st.lists(
        st.dictionaries(st.sampled_from(FIELDS), VALUE | st.lists(st.dictionaries(st.sampled_from(CHOICE), VALUE)))
    )
)
@STRUCTURED
def test_streams_of_any_values(tmp_path_factory: pytest.TempPathFactory, events: list[dict[str, Any]]) -> None:
    sent = [ROLE, *events, delta(content="a"), delta("stop")]
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in sent)
    figures.DONE["fuzzed streams"] += 1
    saved(asyncio.run(measured([[body]])), tmp_path_factory.getbasetemp() / "rows.parquet")


def test_the_whole_streams_are_read() -> None:
    """What the damage is done to is sound."""
    found = asyncio.run(measured([[body] for body in streams()]))
    assert [row.get("error") for row in found] == [None] * 3
