"""The benchmark's own prompts, and what happens with other people's files."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from labkit import bench
from labkit.bench.prompts import as_prompts

GOOD = {"id": "a-1", "category": "a", "messages": [{"role": "user", "content": "hi"}]}


def test_our_own_prompts() -> None:
    own = bench.prompts()
    assert own["category"].value_counts().to_dict() == dict.fromkeys(
        ["code", "dialogue", "explanation", "extraction", "maths", "story", "summarise", "translation"], 10
    )
    assert own["prompt_id"].is_unique
    texts = own["messages"].map(lambda m: " ".join(turn["content"] for turn in m))
    assert texts.is_unique
    assert texts.str.len().between(60, 2000).all()
    assert own["messages"].map(lambda m: m[-1]["role"] == "user").all()
    turns = own[own["category"] == "dialogue"]["messages"].map(len)
    assert (turns >= 3).all()
    roles = own["messages"].map(lambda m: [t["role"] for t in m if t["role"] != "system"])
    assert roles.map(lambda r: r == [("user", "assistant")[i % 2] for i in range(len(r))]).all()


def test_selection_is_seeded_and_nested() -> None:
    two, five = bench.prompts(per_category=2, seed=3), bench.prompts(per_category=5, seed=3)
    assert len(two) == 16
    assert set(two["prompt_id"]) < set(five["prompt_id"])
    assert set(two["prompt_id"]) != set(bench.prompts(per_category=2, seed=4)["prompt_id"])
    pd.testing.assert_frame_equal(two, bench.prompts(per_category=2, seed=3))


def test_a_category_a_file_and_a_folder(tmp_path: Path) -> None:
    assert set(bench.prompts("story")["category"]) == {"story"}
    (tmp_path / "own.jsonl").write_text(json.dumps(GOOD) + "\n\n")
    assert bench.prompts(tmp_path / "own.jsonl")["prompt_id"].tolist() == ["a-1"]
    assert bench.prompts(str(tmp_path))["prompt_id"].tolist() == ["a-1"]


BAD = {
    "": r"own.jsonl holds no prompts",
    "\n \n": r"own.jsonl holds no prompts",
    "{half": r"own.jsonl, line 1 is no JSON",
    "[1]": r"line 1 lacks id, category, messages",
    '{"id": 1, "category": "a"}': r"line 1 lacks messages",
    '{"id": 1, "category": "a", "messages": []}': r"line 1: messages is \[\]",
    '{"id": 1, "category": "a", "messages": [{"role": "user"}]}': r"no content",
    '{"id": 1, "category": "a", "messages": [{"role": "king", "content": "x"}]}': r"no known role",
    f"{json.dumps(GOOD)}\n{{half": r"line 2 is no JSON",
    f"{json.dumps(GOOD)}\n{json.dumps(GOOD)}": r"prompts 1 and 2 have the same id 'a-1'",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_file_is_named_with_its_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text(text)
    with pytest.raises(bench.BadPrompts, match=BAD[text]):
        bench.prompts(tmp_path / "own.jsonl")


def test_a_missing_file_and_binary(tmp_path: Path) -> None:
    with pytest.raises(bench.BadPrompts, match=r"there are no prompts 'nowhere\.jsonl'"):
        bench.prompts("nowhere.jsonl")
    with pytest.raises(bench.BadPrompts, match="there are no prompts"):
        bench.prompts(tmp_path)  # an empty folder
    (tmp_path / "own.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(bench.BadPrompts, match="cannot be read"):
        bench.prompts(tmp_path / "own.jsonl")


def test_placeholder_texts_are_refused(tmp_path: Path) -> None:
    """The public SPEED-Bench ships placeholders instead of its prompts."""
    rows = [GOOD | {"id": f"a-{i}"} for i in range(6)]
    (tmp_path / "own.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(bench.BadPrompts, match="placeholders"):
        bench.prompts(tmp_path / "own.jsonl")


def test_every_accepted_form() -> None:
    chat = [{"role": "user", "content": "hi"}]
    found = as_prompts(["hi", chat, GOOD, {"prompt_id": "p", "prompt": "raw"}, [1, 2]])
    assert [p.content for p in found] == [chat, chat, chat, "raw", [1, 2]]
    assert [p.id for p in found] == ["prompt-000", "prompt-001", "a-1", "p", "prompt-004"]
    assert [p.category for p in as_prompts(pd.DataFrame([GOOD]))] == ["a"]
    assert len(as_prompts("one string")) == 1
    for empty in ([], [""], [[]], [{"messages": None}], [{"prompt": ""}]):
        with pytest.raises(bench.BadPrompts):
            as_prompts(empty)
