"""Rows of other people's data sets: each form, each fault, each place that they lie in."""

import json

import datasets
import pandas as pd
import pytest

from labkit import conversations
from labkit.conversations import raw
from labkit.conversations.forms import COLUMNS, BadRow, conversation

USER, ANSWER = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
RESULT = {"role": "tool", "content": "2", "tool_call_id": "c"}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ("u", [USER]),
        ({"prompt": "u"}, [USER]),
        ({"prompt": "u", "response": "a"}, [USER, ANSWER]),
        ({"instruction": "u", "output": "a"}, [USER, ANSWER]),
        ({"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
        ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
        ({"messages": json.dumps([USER, ANSWER])}, [USER, ANSWER]),
        ({"prompt": "other", "messages": [USER, ANSWER]}, [USER, ANSWER]),
        ({"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]}, [USER, ANSWER]),
        ({"messages": [USER], "system": "s"}, [{"role": "system", "content": "s"}, USER]),
        ({"messages": [{"role": "developer", "content": "s"}, USER]}, [{"role": "system", "content": "s"}, USER]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "u"}]}]}, [USER]),
        ({"messages": [USER, {**ANSWER, "reasoning": "r"}]}, [USER, {**ANSWER, "reasoning": "r"}]),
        ({"messages": [USER, {**ANSWER, "reasoning_content": "r\n"}]}, [USER, {**ANSWER, "reasoning": "r"}]),
        (
            {"messages": [USER, {"role": "assistant", "content": "r</think>a"}]},
            [USER, {**ANSWER, "reasoning": "r"}],
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "<think>\nr\n</think>\n\na"}]},
            [USER, {**ANSWER, "reasoning": "r"}],
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT, ANSWER]},
            [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, ANSWER],
        ),
        (  # arguments as values, and what Arrow fills up with None
            {
                "messages": [
                    {**USER, "tool_calls": None},
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": {"x": 1, "y": None}}}],
                    },
                ]
            },
            [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "u"},
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'},
                    {"from": "observation", "value": "2"},
                    {"from": "gpt", "value": "a"},
                ]
            },
            [
                USER,
                {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "call_0"}]},
                {"role": "tool", "content": "2"},
                ANSWER,
            ],
        ),
    ],
)
def test_forms(row, messages):
    assert conversation(row).messages == messages


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (7, "no conversation"),
        (None, "no conversation"),
        ({"text": "u"}, "no conversation"),
        ({"messages": 3}, "no conversation"),
        ({"messages": "not json"}, "no conversation"),
        ({"messages": [{"role": "narrator", "content": "u"}]}, "unknown role"),
        ({"messages": ["u"]}, "unknown role"),
        ({"messages": [{"role": "user", "content": " "}]}, "empty turn"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "empty turn"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
        (json.loads('{"prompt": "half of a pair: \\ud83d"}'), "broken characters"),
        ({"messages": [ANSWER]}, "no user turn"),
        ({"messages": []}, "no user turn"),
        ({"messages": [ANSWER, USER]}, "begins with an answer"),
        ({"messages": [USER, USER]}, "two turns of one role"),
        ({"messages": [USER, ANSWER, ANSWER]}, "two turns of one role"),
        ({"messages": [USER, {"role": "system", "content": "s"}]}, "system turn in the middle"),
        ({"messages": [USER, RESULT]}, "tool result out of place"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"id": "c"}]}]}, "broken tool call"),
        ({"messages": [USER], "tools": "{"}, "broken tools"),
        ({"messages": [USER], "tools": ["x"]}, "broken tools"),
        ({"messages": [USER, {**ANSWER, "content": 5}]}, "not text"),
        ({"messages": [USER, {**ANSWER, "content": {"text": "x"}}]}, "not text"),
        ({"messages": [USER, {**ANSWER, "reasoning": True}]}, "not text"),
        ({"messages": [USER, ANSWER], "system": 7}, "not text"),
        ({"messages": [USER, {**ANSWER, "tool_calls": 3}]}, "broken tool call"),
        ({"messages": [USER], "tools": [{"name": "half \ud83d"}]}, "broken characters"),
        ({"messages": [USER], "category": "half \ud83d"}, "broken characters"),
        ({"messages": "[" * 100_000}, "no conversation"),
    ],
)
def test_faults_have_a_kind(row, kind):
    with pytest.raises(BadRow) as caught:
        conversation(row)
    assert caught.value.kind == kind


def test_tools_come_as_schemas_or_json_and_lose_what_arrow_filled_up():
    schema = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"x": {}}}}}
    padded = json.loads(json.dumps(schema))
    padded["function"]["parameters"]["properties"]["y"] = None
    for tools in ([schema], json.dumps([schema]), [padded], [schema["function"]]):
        assert conversation({"messages": [USER], "tools": tools}).tools == [schema]


def test_bad_rows_are_counted_by_kind_and_the_good_ones_kept(tmp_path):
    path = tmp_path / "mixed.jsonl"
    lines = [
        '{"prompt": "one"}',
        "{broken",
        '{"text": 1}',
        '{"text": 2}',
        '{"prompt": "one"}',
        '{"prompt": "two"}',
    ]
    path.write_text("\n".join(lines))
    frame = conversations.read(path)
    assert [messages[0]["content"] for messages in frame.messages] == ["one", "two"]
    told = conversations.report(frame).set_index("kind")
    assert told["rows"].to_dict() == {"no conversation": 2, "duplicate": 1, "no JSON": 1}
    assert told.loc["no conversation", "first"].startswith("row 3")
    assert not told.kept.any()


def test_bytes_that_are_no_text_cost_their_row_alone(tmp_path):
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "after a BOM"}\n{"prompt": "caf\xe9"}\n' + b"[" * 100_000 + b'\n{"prompt": "b"}'
    )
    frame = conversations.read(path)
    assert [messages[0]["content"] for messages in frame.messages] == ["after a BOM", "b"]
    assert conversations.report(frame).set_index("kind")["rows"].to_dict() == {"no JSON": 2}


def test_a_directory_that_cannot_be_loaded_says_why(tmp_path):
    (tmp_path / "a.jsonl").write_text("{broken")
    with pytest.raises(conversations.BadPromptFile, match="JSON parse error"):
        conversations.read(tmp_path)


def test_a_prompt_has_one_id_whatever_its_answer(tmp_path):
    path = tmp_path / "twice.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "u", "answer": answer}) for answer in ("a", "b")))
    assert len(conversations.read(path)) == 1
    assert conversations.read(path).prompt_id[0] == conversations.sources.row("", "", [USER])["prompt_id"]


ROWS = {  # a row of each preset as its columns are on the hub
    "open-perfectblend": {
        "conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}],
        "source": "s",
    },
    "ultrachat": {"prompt": "u", "prompt_id": "1", "messages": [USER, ANSWER]},
    "sharegpt": {"id": "1", "conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]},
    "magpie": {
        "instruction": "x",
        "conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}],
    },
    "gsm8k": {"question": "u", "answer": "a"},
    "nemotron": {"input": [USER], "output": "a", "category": "chat"},
    "hermes-fc": {
        "conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}],
        "tools": "[]",
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_every_preset_is_read_from_a_copy_on_disk(tmp_path, name):
    """In the forms that `datasets` itself writes: files, and save_to_disk with the preset's split."""
    preset = raw.presets()[name]
    assert set(preset.columns) <= set(COLUMNS)
    files, saved = tmp_path / "files", tmp_path / "saved"
    files.mkdir()
    pd.DataFrame([ROWS[name]]).to_parquet(files / "train-00000-of-00001.parquet")
    other = datasets.Dataset.from_list([{"prompt": "another split"}])
    datasets.DatasetDict({preset.split: datasets.Dataset.from_list([ROWS[name]]), "rest": other}).save_to_disk(
        saved
    )
    for folder in (files, saved):
        frame = conversations.prompts(f"{name}@{folder}")
        assert frame.messages.tolist() == [[USER, ANSWER]]
        assert frame.category[0] == ROWS[name].get("category", ROWS[name].get("source", "file"))


def test_presets_are_all_tried():
    assert set(ROWS) == set(raw.presets())


def test_part_of_a_large_set_is_drawn_by_seed(tmp_path):
    datasets.Dataset.from_list([{"prompt": f"p{i}"} for i in range(50)]).save_to_disk(tmp_path / "set")
    one, same, other = (conversations.prompts(str(tmp_path / "set"), most=7, seed=seed) for seed in (1, 1, 2))
    assert len(one) == 7
    assert list(one.prompt_id) == list(same.prompt_id) != list(other.prompt_id)


def test_a_data_set_that_cannot_be_had_says_what_else_to_do(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    for name in ("ultrachat", "owner/name"):
        with pytest.raises(conversations.DatasetUnreachable, match="prompts=self"):
            conversations.prompts(name)


def test_an_empty_directory_is_an_error(tmp_path):
    with pytest.raises(conversations.BadPromptFile, match="cannot be loaded"):
        conversations.prompts(str(tmp_path))


def test_near_copies_by_hand():
    def frame(*texts):
        rows = [
            {"prompt_id": f"{i}", "messages": [{"role": "user", "content": text}]} for i, text in enumerate(texts)
        ]
        return pd.DataFrame(rows)

    evaluation = frame("one two three four five six seven", "Hello, World!", "天气怎么样啊")
    train = frame(
        "ONE two, three four five six eight nine",  # 2 of the 3 runs of five words
        "one two three four five other words here",  # 1 of 3
        "hello world",  # all words, in other case
        "hello to the world",  # neither
        "今天天气怎么样啊朋友",  # the whole question within another
    )
    found = conversations.near_copies(train, evaluation)
    pairs = {(row.prompt_id, row.train_prompt_id): row.overlap for row in found.itertuples()}
    assert pairs == {("0", "0"): pytest.approx(2 / 3), ("1", "2"): 1.0, ("2", "4"): 1.0}
    strict = conversations.near_copies(train, evaluation, share=0.9)
    assert set(strict.train_prompt_id) == {"2", "4"}
    left = conversations.without_copies(train, evaluation)
    assert list(left.prompt_id) == ["1", "3"]
    assert conversations.report(left).rows.tolist() == [3]


def test_none_of_our_benchmark_prompts_is_in_the_templates():
    from labkit import bench

    assert conversations.near_copies(conversations.templated(), bench.prompts("benchmark")).empty
