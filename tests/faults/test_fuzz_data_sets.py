"""The reader of data sets against damage by chance: rows or a LabError, and an end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import conversations
from labkit.conversations import raw, sources
from labkit.errors import LabError
from tests.faults import figures
from tests.faults.fuzzing import LIMIT_S, STRUCTURED, VALUE, parts, share
from tests.faults.mutations import Mutator, ends_within

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


def test_the_whole_data_sets_are_read(tmp_path: Path) -> None:
    """What the damage is done to is sound."""
    for ending, contents in dataset_files().items():
        for content in contents[:2]:
            (tmp_path / f"d{ending}").write_bytes(content)
            assert len(sources.read(tmp_path / f"d{ending}")) in (1, 5), ending
    (tmp_path / "dataset.parquet").write_bytes(dataset_files()[".parquet"][2])
    assert isinstance(conversations.load(tmp_path), pd.DataFrame)
