"""Prompts, splits, stored answers, tokens and masks, against values worked out by hand."""

import json
from contextlib import contextmanager

import httpx
import pandas as pd
import pytest

from labkit import conversations
from labkit.conversations import asking, sources
from labkit.conversations.dataset import kept, of_answers
from labkit.conversations.forms import Report


def test_templates_give_enough_distinct_prompts():
    frame = conversations.templated()
    assert len(frame) >= 4000
    assert frame.prompt_id.is_unique
    assert frame.category.nunique() == 8
    assert not frame.messages.map(lambda m: "{" in m[0]["content"]).any()


def test_split_is_by_topic_balanced_and_the_same_for_a_seed():
    frame = conversations.split(conversations.templated(), 80, 16, seed=3)
    train, held_out = frame[frame.split == "train"], frame[frame.split == "held_out"]
    assert (len(train), len(held_out)) == (80, 16)
    assert not set(train.topic) & set(held_out.topic)
    assert train.category.value_counts().between(8, 12).all()
    assert held_out.category.value_counts().between(1, 3).all()
    pd.testing.assert_frame_equal(frame, conversations.split(conversations.templated(), 80, 16, seed=3))
    assert set(frame.prompt_id) != set(conversations.split(conversations.templated(), 80, 16, seed=4).prompt_id)


def test_a_smaller_training_part_is_a_prefix_of_a_larger_one():
    small, large = (conversations.split(conversations.templated(), n, 8, seed=0) for n in (20, 60))
    assert list(small.prompt_id[:20]) == list(large.prompt_id[:20])


@pytest.mark.parametrize("wanted", [(5000, 1), (10, 500)])
def test_too_few_prompts_says_how_many_there_are(wanted):
    with pytest.raises(conversations.TooFewPrompts, match="4070 distinct"):
        conversations.split(conversations.templated(), *wanted, seed=0)


def test_every_row_form_of_a_file_is_understood(tmp_path):
    rows = [
        "plain",
        {"prompt": "a field", "category": "x"},
        {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "kept"}]},
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "h"},
                {"from": "gpt", "value": "g"},
            ]
        },
        "plain",  # a duplicate
    ]
    lines, listed, table = (tmp_path / f"p.{end}" for end in ("jsonl", "json", "parquet"))
    lines.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    listed.write_text(json.dumps(rows))
    pd.DataFrame({"prompt": ["plain", "other"]}).to_parquet(table)
    frame = conversations.read(lines)
    asked = [[turn["content"] for turn in messages if turn["role"] == "user"] for messages in frame.messages]
    assert asked == [["plain"], ["a field"], ["u"], ["h"]]
    assert conversations.report(frame).to_dict("records") == [
        {"kind": "duplicate", "kept": False, "rows": 1, "first": "row 5"}
    ]
    assert [len(m) for m in frame.messages] == [1, 1, 2, 3]
    assert list(frame.category) == ["file", "x", "file", "file"]
    assert list(conversations.read(listed).prompt_id) == list(frame.prompt_id)
    assert list(conversations.read(table).prompt_id[:1]) == list(frame.prompt_id[:1])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.jsonl", "", "holds no prompts"),
        ("blank.jsonl", "\n\n", "holds no prompts"),
        ("list.json", "[]", "holds no prompts"),
        ("cut.json", '[{"prompt": "x"', "cannot be read"),
        ("words.jsonl", "no json here", "no JSON.*row 1"),
        ("binary.parquet", "PAR1", "cannot be read"),
        ("what.csv", "prompt\nx", "unknown ending"),
        ("field.jsonl", '{"text": "x"}\n{"text": "y"}', "no conversation .*row 1"),
        ("void.jsonl", '{"prompt": ""}', "empty turn .*row 1"),
        ("number.jsonl", "7", "no conversation .*int"),
        ("image.jsonl", '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "image_url"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(conversations.BadPromptFile, match=said) as caught:
        conversations.read(path)
    assert name in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(conversations.BadPromptFile, match=r"no prompt file .*nowhere\.jsonl"):
        conversations.read(tmp_path / "nowhere.jsonl")


def shortened(answer, max_length):
    prompt = {"prompt_id": "p", "messages": [{"role": "user", "content": "u"}], "finish_reason": "stop"}
    [(tokens, _)] = of_answers([answer], None)
    report = Report()
    return kept(prompt, tokens, max_length, report), report.rows


def test_the_mask_marks_the_answer_and_nothing_else():
    answer = {"prompt_token_ids": [5, 6, 7], "token_ids": [8, 9, 2], "text": "t", "finish_reason": "stop"}
    [whole], nothing = shortened(answer, 10)
    assert whole["input_ids"] == [5, 6, 7, 8, 9, 2]
    assert whole["loss_mask"] == [False, False, False, True, True, True]
    assert (whole["prompt_tokens"], whole["answer_tokens"], whole["finish_reason"]) == (3, 3, "stop")
    assert nothing == []
    [cut], marked = shortened(answer, 5)
    assert (cut["input_ids"], cut["answer_tokens"], cut["finish_reason"]) == ([5, 6, 7, 8, 9], 2, "length")
    assert (marked[0]["kind"], marked[0]["kept"]) == ("cut at max_length", True)


@pytest.mark.parametrize("max_length", [2, 3, 4])
def test_truncation_never_leaves_a_row_without_an_answer(max_length):
    answer = {"prompt_token_ids": [5, 6, 7], "token_ids": [8, 9, 2], "text": "t", "finish_reason": "stop"}
    rows, counted = shortened(answer, max_length)
    assert rows == []
    assert [(entry["kind"], entry["rows"]) for entry in counted] == [("nothing trained within max_length", 1)]


CLIENT = httpx.Client


class FakeChat:
    """An OpenAI-compatible chat endpoint in memory that answers, refuses or breaks off."""

    base_url, model = "http://fake/v1", "m"

    def __init__(self, monkeypatch, fail_after=None, refuse=()):
        monkeypatch.setattr(asking.time, "sleep", lambda _: None)
        self.asked, self.fail_after, self.refuse = [], fail_after, refuse

        monkeypatch.setattr(asking.httpx, "Client", lambda **_: CLIENT(transport=httpx.MockTransport(self.reply)))

    def check(self):
        """An attached server that the lab cannot look into."""

    def reply(self, request):
        body = json.loads(request.content)
        text = body["messages"][-1]["content"]
        if self.fail_after is not None and len(self.asked) >= self.fail_after:
            raise httpx.ConnectError("gone")
        self.asked.append(text)
        if text in self.refuse:
            return httpx.Response(400, text="too long")
        choice = {"token_ids": [len(text), 3, 2], "finish_reason": "stop", "message": {"content": text.upper()}}
        return httpx.Response(200, json={"prompt_token_ids": [1, 1], "choices": [choice]})


def some_prompts(*texts):
    return pd.DataFrame(
        [sources.row("c", text, [{"role": "user", "content": text}]) | {"split": "train"} for text in texts]
    )


def ask(frame, server, folder, **more):
    options = {"max_tokens": 8, "max_length": 100, "concurrency": 1} | more
    return conversations.collect(frame, server, folder, **options)


def test_what_was_answered_before_a_server_died_is_not_asked_again(tmp_path, monkeypatch):
    frame = some_prompts("a", "bb", "ccc", "dddd")
    with pytest.raises(conversations.ServerLost, match=r"after 2 of 4 requests .*gone"):
        ask(frame, FakeChat(monkeypatch, fail_after=2), tmp_path)
    server = FakeChat(monkeypatch)
    data = ask(frame, server, tmp_path)
    assert sorted(server.asked) == ["ccc", "dddd"]
    assert [list(ids) for ids in data.input_ids] == [[1, 1, n, 3, 2] for n in (1, 2, 3, 4)]
    assert list(data.text) == ["A", "BB", "CCC", "DDDD"]


def test_a_doubled_bos_of_the_server_is_reported(tmp_path, monkeypatch):
    """The server here writes token 1 twice before every prompt."""
    data = ask(some_prompts("a", "bb"), FakeChat(monkeypatch), tmp_path)
    told = conversations.report(data).set_index("kind")
    assert told.loc["the first token stands twice (a doubled BOS?)", ["rows", "kept"]].tolist() == [2, True]


def test_a_complete_set_starts_no_server_and_other_settings_do(tmp_path, monkeypatch):
    frame = some_prompts("a", "bb")
    started = []

    @contextmanager
    def start():
        started.append(1)
        yield FakeChat(monkeypatch)

    for more in ({}, {}, {"max_tokens": 9}, {"model_key": "other"}, {}):
        ask(frame, start, tmp_path, **more)
    assert len(started) == 3


def test_a_line_cut_short_by_a_kill_costs_only_itself(tmp_path, monkeypatch):
    frame = some_prompts("a", "bb")
    ask(frame, FakeChat(monkeypatch), tmp_path)
    store = tmp_path / "answers.jsonl"
    store.write_bytes(store.read_bytes()[:-7])
    server = FakeChat(monkeypatch)
    ask(frame, server, tmp_path)
    again = FakeChat(monkeypatch)
    ask(frame, again, tmp_path)
    assert (len(server.asked), len(again.asked)) == (1, 0)


def test_a_refused_prompt_is_left_out_and_half_of_them_is_an_error(tmp_path, monkeypatch):
    frame = some_prompts("a", "bb", "ccc")
    data = ask(frame, FakeChat(monkeypatch, refuse=["bb"]), tmp_path)
    assert list(data.topic) == ["a", "ccc"]
    with pytest.raises(conversations.TooFewAnswers, match=r"2 of 3 .*too long"):
        ask(frame, FakeChat(monkeypatch, refuse=["a", "bb"]), tmp_path / "other")
