"""The benchmark's own prompts, and what happens with other people's files."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from pathlib import Path

import pandas as pd
import pytest

from labkit import bench, settings
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


def test_the_manifest_is_of_these_files() -> None:
    """Another text is another version: raise it in data/prompts/manifest.json together with the digests."""
    folder = settings.root() / "data" / "prompts"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["licence"].startswith("own")
    assert set(manifest["files"]) == {path.name for path in folder.glob("*.jsonl")}
    for name, told in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert told["sha256"] == hashlib.sha256(data).hexdigest(), name
        assert told["prompts"] == sum(bool(line.strip()) for line in data.splitlines()) >= 10, name
    assert set(bench.prompts()["source"]) == {f"benchmark {manifest['version']}"}


def test_no_prompt_nearly_repeats_another() -> None:
    """Shared runs of three words, of all of the shorter prompt: 0 for strangers, 1 for a copy."""

    def runs(messages: list) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", " ".join(turn["content"] for turn in messages).lower())
        return set(zip(words, words[1:], words[2:], strict=False))

    own = bench.prompts().set_index("prompt_id")["messages"].map(runs)
    alike = {
        (one, other): len(own[one] & own[other]) / min(len(own[one]), len(own[other]))
        for one, other in itertools.combinations(own.index, 2)
    }
    assert len(alike) == 80 * 79 // 2
    assert max(alike.values()) < 0.35, max(alike, key=alike.__getitem__)


def test_rows_say_which_prompts_they_are_of(tmp_path: Path) -> None:
    from sse_server import ROLE, Reply, delta, serving, usage

    (tmp_path / "own.jsonl").write_text(json.dumps(GOOD))
    own, ours = bench.prompts(tmp_path / "own.jsonl"), bench.prompts("story", 1)
    mixed = pd.concat([ours, own, own.drop(columns="source").assign(prompt_id="b-1")])
    with serving(lambda *_: Reply([ROLE, delta("stop", content="a"), usage(1)])) as server:
        rows = bench.run(server.url, mixed, max_tokens=1, repeats=1, warmup=0)
    digest = hashlib.sha256(json.dumps(GOOD).encode()).hexdigest()[:16]
    assert rows["prompt_source"].tolist() == ["benchmark 1", f"own.jsonl {digest}", ""]


def test_a_changed_copy_is_no_longer_the_published_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = settings.root() / "data" / "prompts"
    copy = tmp_path / "data" / "prompts"
    copy.mkdir(parents=True)
    for name in ("manifest.json", "story.jsonl", "code.jsonl"):
        (copy / name).write_bytes((ours / name).read_bytes())
    with (copy / "story.jsonl").open("a") as file:
        file.write(json.dumps(GOOD | {"category": "story"}) + "\n")
    monkeypatch.setenv("LABKIT_ROOT", str(tmp_path))
    assert set(bench.prompts("code")["source"]) == {"benchmark 1"}
    assert bench.prompts("story")["source"].str.match(r"story\.jsonl [0-9a-f]{16}$").all()


def test_what_editors_do_to_a_file(tmp_path: Path) -> None:
    """A byte-order mark, Windows line ends, blank lines, separators of Unicode inside a text."""
    second = {"id": "a-2", "category": "a", "messages": [{"role": "user", "content": "x\u2028y"}]}
    lines = ["", json.dumps(GOOD), "  ", json.dumps(second, ensure_ascii=False), ""]
    (tmp_path / "own.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    found = bench.prompts(tmp_path / "own.jsonl")
    assert found["prompt_id"].tolist() == ["a-1", "a-2"]
    assert found["messages"][1][0]["content"] == "x\u2028y"
    (tmp_path / "own.jsonl").write_text("\n\n" + json.dumps(GOOD) + "\n\n{half\n")
    with pytest.raises(bench.BadPrompts, match="line 5 is no JSON"):  # blank lines count, as editors number them
        bench.prompts(tmp_path / "own.jsonl")


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


def test_what_was_sent_of_what_there_is(tmp_path: Path) -> None:
    """Two of support and three of sql: two of each leave one sql prompt out, 0 none."""
    names = ["support-1", "support-2", "sql-1", "sql-2", "sql-3"]
    texts = ["My order is late", "I cannot log in", "All customers", "Sales by month", "Drop a column"]
    messages = [[{"role": "user", "content": text}] for text in texts]
    rows = [{"id": i, "category": i[:-2], "messages": m} for i, m in zip(names, messages, strict=True)]
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    two = bench.selection(file, bench.prompts(file, 2))
    assert two.startswith("**4 of 5 prompts** are sent (support 2 of 2, sql 2 of 3)")
    assert bench.selection(file, bench.prompts(file, 0)) == "All 5 prompts are sent."
    assert len(bench.prompts(file, 0)) == 5
    only = bench.prompts(file)
    assert "support 0 of 2, sql 3 of 3" in bench.selection(file, only[only["category"] == "sql"])


BAD = {
    "": r"own.jsonl holds no prompts",
    "\n \n": r"own.jsonl holds no prompts",
    "{half": r"own.jsonl, line 1 is no JSON",
    "[" * 100_000: r"line 1 is no JSON",
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
    with pytest.raises(bench.BadPrompts, match=r"there is no file nowhere\.jsonl"):
        bench.prompts("nowhere.jsonl")
    with pytest.raises(bench.BadPrompts, match=r"holds no \.jsonl file"):
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
