"""Several turns regenerated, the data set's own answers, prompts of the target's own: with a server in memory.

The server renders with a real chat template, so what the lab puts together from its ids can be compared with the
rendering of the whole conversation.
"""

import json
import random
import threading

import httpx
import numpy as np
import pandas as pd
import pytest
from test_conversations_template import CHATML, STRIPPING, THINKING, answer, rows, tokenizer, user

from labkit import conversations, files, vocab
from labkit.conversations import asking, sources
from labkit.conversations.template import Template
from labkit.conversations.tokens import encode

CLIENT = httpx.Client


class Fake:
    """A chat and completions server: `say` makes an answer (text, reasoning, finish reason) of the messages."""

    base_url, model = "http://fake/v1", "m"

    def __init__(self, monkeypatch, tok, say, fail_after=None):
        self.tok, self.say, self.fail_after = tok, say, fail_after
        self.bodies, self.lock = [], threading.Lock()
        monkeypatch.setattr(asking.time, "sleep", lambda _: None)
        monkeypatch.setattr(asking.httpx, "Client", lambda **_: CLIENT(transport=httpx.MockTransport(self.reply)))

    def check(self):
        """An attached server that the lab cannot look into."""

    def reply(self, request):
        body = json.loads(request.content)
        with self.lock:
            if self.fail_after is not None and len(self.bodies) >= self.fail_after:
                raise httpx.ConnectError("gone")
            self.bodies.append(body)
        if request.url.path.endswith("/completions") and "prompt" in body:
            text, finish = self.say(body)
            return httpx.Response(200, json={"choices": [{"text": text, "finish_reason": finish}]})
        known = Template(self.tok)
        messages = [known.dressed(turn) for turn in body["messages"]]
        prompt = encode(self.tok, known.render(messages, body.get("tools"), prompt=True))[0]
        text, reasoning, finish = self.say(body)
        if finish == "refused":
            return httpx.Response(400, text="too long")
        spelled = (f"{reasoning}</think>" if reasoning else "") + text + ("<|im_end|>" if finish == "stop" else "")
        message = {"content": text or None, "reasoning": reasoning}
        choice = {"token_ids": encode(self.tok, spelled)[0], "finish_reason": finish, "message": message}
        return httpx.Response(200, json={"prompt_token_ids": prompt, "choices": [choice], "model": "served"})


def echo(body):
    """Says how many messages there were, and what the last one was."""
    return f"{len(body['messages'])}: {body['messages'][-1]['content']}", None, "stop"


def frame(*dialogues, tools=None):
    rows = [sources.row("c", str(i), list(turns), tools) for i, turns in enumerate(dialogues)]
    return pd.DataFrame(rows).assign(split="train")


def collect(prompts, server, folder, **more):
    options = {"max_tokens": 50, "max_length": 500, "concurrency": 2} | more
    return conversations.collect(prompts, server, folder, **options)


TWO = [user("fox"), answer("never"), user("dog"), answer("nor this")]


def test_later_turns_follow_the_targets_own_answers_in_one_row(tmp_path, monkeypatch):
    tok = tokenizer(CHATML)
    data = collect(frame(TWO), Fake(monkeypatch, tok, echo), tmp_path)
    own = [user("fox"), answer("1: fox"), user("dog"), answer("3: dog")]
    [wanted] = rows(tok, own)
    row = data.iloc[0]
    assert len(data) == 1
    assert list(row.input_ids) == wanted.input_ids[:-1]  # nobody says the line break after the last turn
    assert list(row.loss_mask) == wanted.loss_mask[:-1]
    assert row.prompt_tokens == wanted.loss_mask.index(True)
    assert row.answer_tokens == sum(wanted.loss_mask)
    assert row.messages == [user("fox")]
    assert (row.text, row.turn, row.origin, row.model) == ("3: dog", 0, "target", "served")


def test_a_history_that_is_shown_otherwise_begins_a_new_row(tmp_path, monkeypatch):
    """The template drops earlier reasoning, so the second prompt does not go on the first row's tokens."""
    tok = tokenizer(STRIPPING)

    def say(body):
        text, _, finish = echo(body)
        return text, "what is it", finish

    server = Fake(monkeypatch, tok, say)
    data = collect(frame(TWO), server, tmp_path)
    assert list(data.turn) == [0, 1]
    assert data.prompt_id.is_unique
    assert [body["messages"][-1]["content"] for body in server.bodies] == ["fox", "dog"]
    assert server.bodies[1]["messages"][1]["reasoning"] == "what is it"
    for row in data.itertuples():
        said = tok.decode(np.array(row.input_ids)[np.array(row.loss_mask)])
        assert said == f"what is it</think>{row.text}<|im_end|>"
    assert [len(messages) for messages in data.messages] == [1, 3]


def test_reasoning_stays_in_the_history_and_can_be_left_out_of_training(tmp_path, monkeypatch):
    tok = tokenizer(THINKING)

    def say(body):
        return "yes", "what is it", "stop"

    shown = collect(frame(TWO), Fake(monkeypatch, tok, say), tmp_path / "a")
    hidden = collect(frame(TWO), Fake(monkeypatch, tok, say), tmp_path / "b", tokenizer=tok, train_reasoning=False)
    assert len(shown) == len(hidden) == 1
    assert list(shown.input_ids[0]) == list(hidden.input_ids[0])
    said = [tok.decode(np.array(d.input_ids[0])[np.array(d.loss_mask[0])]) for d in (shown, hidden)]
    assert said == ["what is it</think>yes<|im_end|>" * 2, "yes<|im_end|>" * 2]
    assert tok.decode(shown.input_ids[0]).count("<think>what is it</think>yes<|im_end|>") == 2


def test_reasoning_cannot_be_left_out_where_no_token_ends_it(tmp_path, monkeypatch):
    tok = tokenizer(CHATML, specials=["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    with pytest.raises(conversations.NoEndOfThought, match="</think>"):
        collect(frame(TWO), Fake(monkeypatch, tok, echo), tmp_path, tokenizer=tok, train_reasoning=False)


@pytest.mark.parametrize(("finish", "kept"), [("length", 1), ("refused", 1)])
def test_a_cut_or_refused_turn_ends_the_conversation(tmp_path, monkeypatch, finish, kept):
    def say(body):
        return ("a b c d", None, "stop") if len(body["messages"]) == 1 else ("e f g h", None, finish)

    three = [*TWO, user("more"), answer("x")]
    server = Fake(monkeypatch, tokenizer(CHATML), say)
    data = collect(frame(three), server, tmp_path)
    assert len(server.bodies) == 2
    assert len(data) == kept
    assert data.finish_reason[0] == ("length" if finish == "length" else "stop")
    if finish == "length":
        assert "answer cut at max_tokens" in set(conversations.report(data).kind)
    again = Fake(monkeypatch, tokenizer(CHATML), say)
    collect(frame(three), again, tmp_path)
    assert again.bodies == []


def test_a_tool_result_follows_its_own_call_and_every_answer_is_the_targets(tmp_path, monkeypatch):
    tok = tokenizer(CHATML)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    turns = [user("1+1"), answer("", tool_calls=[call]), {"role": "tool", "content": "2"}, answer("It is 2.")]
    server = Fake(monkeypatch, tok, echo)
    data = collect(frame(turns, tools=tools), server, tmp_path)
    assert list(data.turn) == [0, 1]
    assert list(data.text) == ["1: 1+1", "3: 2"]
    assert all(body["tools"] == tools and body["tool_choice"] == "none" for body in server.bodies)
    assert server.bodies[1]["messages"][1]["tool_calls"] == [call]
    [own] = rows(tok, [*turns[:3], answer("3: 2")], tools)
    assert list(data.input_ids[1]) == own.input_ids[:-1]
    assert json.loads(conversations.load(tmp_path).tools[0]) == tools
    assert conversations.load(tmp_path).messages[1] == turns[:3]  # no None of Arrow's


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("messages", value) for value in ([["a"]], [[None]], [[1]], [None], [5], ["text"], [[["a", "b"]]])),
        *(("loss_mask", value) for value in ([[True]], [None], [7])),
        *(("input_ids", value) for value in ([[1, 2, 3]], [None], [7])),
    ],
)
def test_a_data_set_of_other_things_is_called_broken(tmp_path, column, value):
    whole = {"messages": [[user("a")]], "input_ids": [[1, 2]], "loss_mask": [[False, True]]}
    pd.DataFrame(whole).to_parquet(tmp_path / "dataset.parquet")
    assert conversations.load(tmp_path).messages[0] == [user("a")]
    pd.DataFrame(whole | {column: value}).to_parquet(tmp_path / "dataset.parquet")
    with pytest.raises(files.BrokenFile, match=r"dataset\.parquet is no data set"):
        conversations.load(tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_after_any_interruption_every_prompt_is_there_once_and_the_file_is_the_same(tmp_path, monkeypatch, seed):
    """The server dies after some requests, then the store is cut at a random byte, as by a kill."""
    tok = tokenizer(CHATML)
    dialogues = [[user(f"fox {i}"), answer("x"), user(f"dog {i}"), answer("y")] for i in range(6)]
    prompts = frame(*dialogues)
    collect(prompts, Fake(monkeypatch, tok, echo), tmp_path / "undisturbed")
    order, alone = random.Random(seed), {"concurrency": 1}  # no other thread writes while the store is cut
    for _ in range(3):
        with pytest.raises(conversations.ServerLost):
            collect(
                prompts, Fake(monkeypatch, tok, echo, fail_after=order.randrange(2, 4)), tmp_path / "cut", **alone
            )
        store = tmp_path / "cut" / "answers.jsonl"
        store.write_bytes(store.read_bytes()[: order.randrange(store.stat().st_size)])
    collect(prompts, Fake(monkeypatch, tok, echo), tmp_path / "cut")
    one, two = ((tmp_path / name / "dataset.parquet").read_bytes() for name in ("undisturbed", "cut"))
    assert one == two
    assert conversations.load(tmp_path / "cut").prompt_id.tolist() == prompts.prompt_id.tolist()


def test_sampling_is_sent_recorded_and_decides_what_can_be_reused(tmp_path, monkeypatch):
    tok = tokenizer(CHATML)
    options = {"temperature": 0.7, "top_p": 0.9, "seed": 5, "max_tokens": 40}
    server = Fake(monkeypatch, tok, echo)
    data = collect(frame([user("fox")]), server, tmp_path, **options)
    assert {name: server.bodies[0][name] for name in options} == options
    assert {name: data[name][0] for name in options} == options
    for change in ({"temperature": 0.8}, {"top_p": 1.0}, {"seed": 6}, {"max_tokens": 41}):
        other = Fake(monkeypatch, tok, echo)
        collect(frame([user("fox")]), other, tmp_path, **options | change)
        assert len(other.bodies) == 1


def test_options_of_the_template_are_sent_and_decide_what_can_be_reused(tmp_path, monkeypatch):
    tok = tokenizer(CHATML)
    server = Fake(monkeypatch, tok, echo)
    for options in ({"thinking": False}, {"thinking": False}, None):
        collect(frame([user("fox")]), server, tmp_path, template=options)
    assert [body.get("chat_template_kwargs") for body in server.bodies] == [{"thinking": False}, None]


def test_the_data_sets_own_answers_are_rendered_cut_and_counted(tmp_path):
    tok = tokenizer(CHATML)
    long = [user("a"), answer("b"), user("c"), answer("fox " * 200)]
    prompts = frame(
        TWO, [user("no answer")], long, [user("x " * 200), answer("late")], [user("<|im_end|>"), answer("b")]
    )
    data = conversations.render(prompts, tok, tmp_path, max_length=120)
    [whole] = rows(tok, TWO)
    assert list(data.input_ids[0]) == whole.input_ids
    assert list(data.loss_mask[0]) == whole.loss_mask
    assert list(data.prompt_id) == [prompts.prompt_id[0], prompts.prompt_id[2]]
    assert list(data.truncated) == [False, True]
    assert list(data.finish_reason) == ["stop", "length"]
    assert data.seq_len[1] == 120
    assert all(any(mask) for mask in data.loss_mask)
    told = conversations.report(conversations.load(tmp_path))
    assert dict(zip(told.kind, told.kept, strict=True)) == {
        "no answer": False,
        "nothing trained within max_length": False,
        "text of a special token": False,
        "cut at max_length": True,
    }


def test_a_rendered_set_is_made_again_only_when_something_changed(tmp_path):
    tok = tokenizer(CHATML)

    def made(template, **more):
        before = (tmp_path / "dataset.parquet").stat().st_mtime_ns if more.pop("after", True) else 0
        conversations.render(frame(TWO), tokenizer(template), tmp_path, **{"max_length": 100} | more)
        return (tmp_path / "dataset.parquet").stat().st_mtime_ns != before

    assert tok is not None
    assert made(CHATML, after=False)
    assert not made(CHATML)
    assert made(CHATML, max_length=90)
    assert made(STRIPPING, max_length=90)


def test_a_data_set_without_answers_says_so(tmp_path):
    with pytest.raises(conversations.TooFewAnswers, match="no answer"):
        conversations.render(frame([user("a")]), tokenizer(CHATML), tmp_path, max_length=100)


def test_a_file_goes_through_to_tokens(tmp_path):
    """ShareGPT rows with reasoning and tools, one of each fault, to a data set that training can read."""
    path = tmp_path / "sharegpt.jsonl"
    good = {
        "conversations": [{"from": "human", "value": "fox"}, {"from": "gpt", "value": "<think>dog</think>yes"}]
    }
    path.write_text("\n".join(json.dumps(row) for row in (good, {"conversations": []}, {"x": 1})))
    prompts = conversations.read(path).assign(split="train")
    data = conversations.render(prompts, tokenizer(THINKING), tmp_path, max_length=100)
    tok = tokenizer(THINKING)
    assert tok.decode(np.array(data.input_ids[0])[np.array(data.loss_mask[0])]) == "dog</think>yes<|im_end|>"
    counts = vocab.count(data.input_ids, data.loss_mask, len(tok))
    assert counts.sum() == data.answer_tokens.sum() == sum(data.loss_mask[0])
    assert counts[tok.convert_tokens_to_ids("<think>")] == 0


class Writer:
    """Writes a prompt a request: every third doubled, every fifth cut off, every seventh nearly empty."""

    def __call__(self, body):
        n = body["seed"]
        if n % 5 == 4:
            return f"Tell me about number {n} and", "length"
        if n % 7 == 6:
            return " ?! ", "stop"
        return ("What is the SAME thing?" if n % 3 == 2 else f"  What is thing number {n}? "), "stop"


def synthesise(server, tok, folder, **more):
    return conversations.synthesise(
        server, tok, folder / "prompts.jsonl", **{"count": 20, "concurrency": 1} | more
    )


def test_the_target_writes_prompts_after_the_user_prefix(tmp_path, monkeypatch):
    tok = tokenizer(CHATML)
    server = Fake(monkeypatch, tok, Writer())
    found = synthesise(server, tok, tmp_path)
    body = server.bodies[0]
    assert tok.decode(body["prompt"]) == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"
    assert set(body["stop_token_ids"]) == {tok.convert_tokens_to_ids(t) for t in ("<|im_end|>", "</s>")}
    asked = len(server.bodies)
    kinds = {n: "cut off" if n % 5 == 4 else "nearly empty" if n % 7 == 6 else n % 3 == 2 for n in range(asked)}
    assert sorted(body["seed"] for body in server.bodies) == list(range(asked))
    assert len(found) == sum(kind is False for kind in kinds.values()) + 1 >= 20
    told = conversations.report(found).set_index("kind")["rows"].to_dict()
    assert told == {
        "cut off": sum(kind == "cut off" for kind in kinds.values()),
        "nearly empty": sum(kind == "nearly empty" for kind in kinds.values()),
        "doubled": sum(kind is True for kind in kinds.values()) - 1,
    }
    assert found.prompt_id.is_unique
    assert found.messages[0] == [user("What is thing number 0?")]


def test_written_prompts_are_kept_over_interruptions(tmp_path, monkeypatch):
    tok = tokenizer(CHATML)
    whole = synthesise(Fake(monkeypatch, tok, Writer()), tok, tmp_path / "whole")
    with pytest.raises(conversations.ServerLost):
        synthesise(Fake(monkeypatch, tok, Writer(), fail_after=9), tok, tmp_path / "cut")
    again = Fake(monkeypatch, tok, Writer())
    found = synthesise(again, tok, tmp_path / "cut")
    assert min(body["seed"] for body in again.bodies) == 9
    common = min(len(whole), len(found))
    assert list(found.prompt_id[:common]) == list(whole.prompt_id[:common])
    idle = Fake(monkeypatch, tok, Writer())
    pd.testing.assert_frame_equal(synthesise(idle, tok, tmp_path / "cut"), found)
    assert idle.bodies == []


def test_a_target_that_always_writes_the_same_is_given_up(tmp_path, monkeypatch):
    tok = tokenizer(CHATML)
    server = Fake(monkeypatch, tok, lambda body: ("The same question again?", "stop"))
    with pytest.raises(conversations.NoSynthesis, match="1 usable prompts of 80"):
        synthesise(server, tok, tmp_path)
    assert len(server.bodies) == 80


def test_a_template_without_an_end_token_stops_at_its_text():
    from labkit.conversations.synthesis import opening

    tok = tokenizer("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '###' }}{% endfor %}")
    found = opening(tok)
    assert (tok.decode(found.prompt), found.stop) == ("user: ", ["###"])


def test_the_store_of_one_turn_is_as_it_was(tmp_path, monkeypatch):
    """Keys of first turns are a digest of model, sampling and prompt."""
    prompts = frame([user("fox")])
    collect(prompts, Fake(monkeypatch, tokenizer(CHATML), echo), tmp_path, model_key="k")
    [line] = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().split("\n") if line]
    options = {"max_tokens": 50, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    assert line["key"] == files.digest(["k", options, prompts.prompt_id[0]])
