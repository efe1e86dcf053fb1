"""Four readers against damage by chance: a valid result or a LabError, and an end, whatever they are given."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labkit import acceptance, conversations, files, trace
from labkit.bench import client, rows
from labkit.bench.plan import Plan
from labkit.bench.prompts import Prompt
from labkit.conversations import raw, sources
from labkit.errors import LabError
from labkit.trace import rank
from tests.faults import figures
from tests.faults.mutations import Mutator, ends_within
from tests.unit import kineto
from tests.unit.sse_server import ROLE, delta, usage

PARTS = 4  # so that no part of the whole count takes minutes
LIMIT_S = 60
STRUCTURED = settings(
    max_examples=300 if figures.SOAK else 20,
    deadline=None,
    database=None,
    derandomize=not figures.SOAK,
    suppress_health_check=list(HealthCheck),
)
parts = pytest.mark.parametrize("part", range(PARTS))
LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["user", "X", "1e999"]),
)
VALUE = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def share(name: str) -> int:
    """How many inputs a part draws; counted for the summary."""
    count = figures.inputs() // PARTS
    figures.DONE[f"fuzzed {name}"] += count
    return count


# Traces


def trace_events() -> list[dict[str, Any]]:
    """Two marked steps with kernels, a launch and collectives that tell of themselves in several ways."""
    found = []
    for step in range(2):
        at = 1000.0 * step
        name = "execute_context_0(sq0sk0)_generation_1(sq1sk9)"
        found += kineto.marked(name, at, 900.0, step + 1)
        found.append(kineto.event("cuda_runtime", "cudaLaunchKernel", at + 1, 2.0, correlation=step + 1))
        found.append(kineto.kernel("gemm", at + 10, 50.0, correlation=step + 1))
        told = {"Collective name": "allreduce", "In msg nelems": 64, "dtype": "BFloat16"}
        found.append(kineto.kernel("ncclDevKernel_AllReduce_Sum_bf16", at + 100, 40.0, **told))
        shapes = {"Input Dims": [[4, 8]], "Input type": ["c10::BFloat16"]}
        found.append(kineto.event("cpu_op", "vllm::all_reduce", at + 90, 60.0, **shapes))
    return found


def trace_files() -> list[bytes]:
    """The same trace in every form, and packed."""
    meta = kineto.rank_meta(0, 2) | {"baseTimeNanoseconds": 1_700_000_000_000_000_000}
    whole = [form(trace_events(), **meta) for form in (kineto.canonical, kineto.plain, kineto.sorted_keys)]
    return [*whole, *whole, gzip.compress(whole[0])]


def read_trace(path: Path, everything: bool) -> None:
    """One file to a reduced rank, or further to all tables."""
    try:
        if not everything:
            found = rank.reduce(path)
            assert (found.end >= found.start).all()
            return
        loaded = trace.load(path)
        for table in (loaded.collectives(), loaded.steps()):
            assert (table["dur_us"] >= 0).all()
        parts = loaded.breakdown()
        assert parts["share"].between(0, 1 + 1e-9).all()
        loaded.summary(), loaded.parts(), loaded.counts()
    except LabError:
        return


@parts
def test_traces(tmp_path: Path, part: int) -> None:
    mutator, path = Mutator(trace_files(), part), tmp_path / "rank0.json"
    for number in range(share("traces")):
        path.write_bytes(data := mutator.draw())
        with ends_within(LIMIT_S, data):
            read_trace(path, everything=number % 20 == 0)


@given(st.lists(st.dictionaries(st.sampled_from(["ph", "cat", "name", "pid", "tid", "ts", "dur", "args"]), VALUE)))
@STRUCTURED
def test_traces_of_any_values(tmp_path_factory: pytest.TempPathFactory, events: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.getbasetemp() / "rank0.json"
    path.write_text(json.dumps({"traceEvents": [*trace_events(), *({"ph": "X", "ts": 5} | e for e in events)]}))
    figures.DONE["fuzzed traces"] += 1
    read_trace(path, everything=True)


# Streams of events


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


# Pages of metrics

PAGE = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 17.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 51.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 8.0
vllm:generation_tokens_total{engine="0",model_name="a\\"b\\\\c\\n"} 40.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 3.0
process_start_time_seconds 1.7e+09
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3"} 0.0
"""
SGLANG = "sglang:spec_verify_calls_total 4.0\nsglang:generation_tokens_total 9\nsglang:spec_accept_length 1.9\n"


def read_page(text: str, before: acceptance.Counters) -> None:
    """A page to counters, and to what happened since an earlier one."""
    try:
        found = acceptance.parse(text)
        assert found.generated >= 0
        made = acceptance.between(before, found)
        assert math.isnan(made.mean_length) or made.mean_length >= 0
    except LabError:
        return


@parts
def test_pages_of_metrics(part: int) -> None:
    mutator = Mutator([PAGE.encode(), SGLANG.encode()], part)
    before = acceptance.parse(PAGE.replace("17.0", "10.0").replace("51.0", "30.0"))
    for _ in range(share("pages of metrics")):
        data = mutator.draw()
        with ends_within(LIMIT_S, data):
            read_page(data.decode("utf-8", "replace"), before)


@pytest.mark.parametrize("digits", [25, 400, 5000])
def test_a_count_of_many_digits_is_none(digits: int) -> None:
    """What the soak found: whole numbers come as such from the parser, and a float cannot show them."""
    with pytest.raises(acceptance.Unreadable):
        acceptance.parse("vllm:request_success_total " + "9" * digits)


NAMES = st.sampled_from(
    ["vllm:spec_decode_num_drafts_total", "sglang:spec_verify_calls", "vllm:request_success", "x"]
)
LINE = st.tuples(NAMES, st.text(max_size=12), st.floats().map(str) | st.text(max_size=8)).map(
    lambda drawn: f"{drawn[0]}{{{drawn[1]}}} {drawn[2]}"
)


@given(st.lists(LINE | st.text(max_size=20), max_size=6))
@STRUCTURED
def test_pages_of_any_lines(lines: list[str]) -> None:
    figures.DONE["fuzzed pages of metrics"] += 1
    read_page(PAGE + "\n".join(lines), acceptance.parse(PAGE))


# Data sets

ROWS: list[Any] = [
    "What is a draft?",
    {"prompt": "Why?", "completion": "Because.", "category": "c"},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>t</think>b"}]},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}], "system": "s"},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "content": "1"},
        ],
        "tools": [{"name": "f", "parameters": {}}],
    },
]


def parquet(table: pa.Table, **options: Any) -> bytes:
    """A table as a file's bytes."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


def dataset_files() -> dict[str, list[bytes]]:
    """Whole files by their ending."""
    turns = [ROWS[2]["messages"], ROWS[2]["messages"]]
    table = pa.table({"messages": turns, "id": [1, 2], "when": pa.array([0, 1], pa.timestamp("us"))})
    ids = {
        "input_ids": [[1, 2, 3]],
        "loss_mask": [[False, True, True]],
        "prompt_id": ["p"],
        "messages": [turns[0]],
    }
    return {
        ".jsonl": [b"\n".join(json.dumps(row).encode() for row in ROWS)],
        ".json": [json.dumps(ROWS).encode(), json.dumps(ROWS[4]).encode()],
        ".parquet": [
            parquet(table),
            parquet(table, compression="none", use_dictionary=False),
            parquet(pa.table(ids)),
        ],
    }


def read_dataset(path: Path) -> None:
    """A file of anybody's prompts; a data set of the lab's own where it is parquet."""
    try:
        frame = sources.read(path)
        assert len(frame)
        assert frame["prompt_id"].is_unique
        json.dumps(frame["messages"].tolist(), ensure_ascii=False, default=str).encode()
    except LabError:
        pass
    if path.suffix == ".parquet":
        try:
            conversations.load(path.parent)
        except LabError:
            return


@parts
def test_data_sets(tmp_path: Path, part: int) -> None:
    count = share("data sets")
    for ending, whole in dataset_files().items():
        mutator, path = Mutator(whole, part), tmp_path / f"dataset{ending}"
        for _ in range(count // 3 + 1):
            path.write_bytes(data := mutator.draw())
            with ends_within(LIMIT_S, data):
                read_dataset(path)


TURN = st.dictionaries(st.sampled_from(["role", "content", "from", "value", "tool_calls", "reasoning"]), VALUE)
KEYS = st.sampled_from(["messages", "conversations", "prompt", "completion", "system", "tools", "category"])


@given(st.lists(VALUE | st.dictionaries(KEYS, VALUE | st.lists(TURN, max_size=3)), max_size=4))
@STRUCTURED
def test_data_sets_of_any_values(tmp_path_factory: pytest.TempPathFactory, values: list[Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    path.write_text("\n".join(json.dumps(value) for value in [*ROWS, *values]))
    figures.DONE["fuzzed data sets"] += 1
    read_dataset(path)
    assert len(sources.read(path)) >= len(ROWS)
    assert all(isinstance(row, (str, dict, list, int, float, type(None))) for row in raw.of_file(path))


def test_the_whole_inputs_are_read(tmp_path: Path) -> None:
    """What the damage is done to is sound: without it everything is understood."""
    for number, content in enumerate(trace_files()):
        path = tmp_path / f"{number}.json"
        path.write_bytes(content)
        assert len(trace.load(path).steps()) == 2
        assert len(trace.load(path).collectives()) == 2
    found = asyncio.run(measured([[body] for body in streams()]))
    assert [row.get("error") for row in found] == [None] * 3
    assert acceptance.parse(PAGE).drafts == 17
    for ending, contents in dataset_files().items():
        for content in contents[:2]:
            (tmp_path / f"d{ending}").write_bytes(content)
            assert len(sources.read(tmp_path / f"d{ending}")) in (1, 5), ending
    (tmp_path / "dataset.parquet").write_bytes(dataset_files()[".parquet"][2])
    assert isinstance(conversations.load(tmp_path), pd.DataFrame)
