"""The grammar of prompts; and answers made without a server, which have to be the ones a server would give."""

import itertools
import random
import shutil

import pytest
from typer.testing import CliRunner

from labkit import bench, conversations, targets
from labkit.conversations import offline, wide
from labkit.conversations.__main__ import app
from labkit.conversations.answers import Sampling, generate
from labkit.conversations.store import Store
from labkit.errors import LabError


def test_prompts_are_different_filled_and_of_every_kind_in_turn():
    frame = wide.prompts(900, seed=1)
    assert frame.prompt_id.is_unique
    assert frame.category.value_counts().between(80, 120).all()
    assert set(frame.category) == {
        *("explanation", "code", "maths", "summarise", "translation", "extraction", "story", "dialogue")
    }
    said = [turn["content"] for messages in frame.messages for turn in messages]
    assert not [text for text in said if wide.PLACE.search(text)]


def test_a_smaller_set_is_a_prefix_of_a_larger_one_and_another_seed_another_set():
    assert list(wide.prompts(40, 3).prompt_id) == list(wide.prompts(80, 3).prompt_id[:40])
    assert set(wide.prompts(40, 4).prompt_id) != set(wide.prompts(40, 3).prompt_id)


def test_none_is_nearly_one_of_the_benchmarks():
    assert conversations.near_copies(wide.prompts(4000), bench.prompts("benchmark")).empty


def test_forms_are_filled_through_and_numbers_stay_in_their_range():
    words = {"a": ["{b} and {2-4}"], "b": ["x"]}
    found = {wide.filled("{a}!", words, random.Random(seed)) for seed in range(40)}
    assert found == {"x and 2!", "x and 3!", "x and 4!"}
    with pytest.raises(wide.UnknownWord, match="nothing"):
        wide.filled("{nothing}", words, random.Random(0))


def test_more_than_the_grammar_has_is_refused(monkeypatch):
    monkeypatch.setattr(wide, "filled", lambda *_: "always the same")
    with pytest.raises(conversations.TooFewPrompts, match="different prompts"):
        wide.prompts(50)


def test_they_survive_a_file_with_their_names(tmp_path):
    frame = wide.prompts(30, 5)
    offline.write_prompts(tmp_path / "p.jsonl", frame)
    assert list(conversations.read(tmp_path / "p.jsonl").prompt_id) == list(frame.prompt_id)


class Parrot:
    """Stands for the engine: answers with the last word of the prompt, two jobs at a time."""

    def __init__(self, tokenizer, stop_after=10**9):
        self.tokenizer, self.left, self.seen = tokenizer, stop_after, []
        self.llm = type("llm", (), {"model_config": type("config", (), {"max_model_len": 400})})()

    def run(self, jobs, done, _until):
        waiting = list(itertools.islice(jobs, 2))
        while waiting and self.left:
            name, ids, options = waiting.pop(0)
            self.seen.append((name, self.tokenizer.decode(ids), options))
            self.left -= 1
            words = self.tokenizer(f"answer {len(self.seen)}")["input_ids"]
            following = done(name, [*words, self.tokenizer.eos_token_id], "stop")
            waiting += [following] if following else itertools.islice(jobs, 1)


@pytest.fixture(scope="module")
def target():
    return targets.resolve("smollm2")


def dialogues():
    frame = wide.prompts(90, 2)
    return frame[frame.category == "dialogue"].head(4).reset_index(drop=True)


def test_a_server_would_find_everything_answered(target, tmp_path):
    """Turn by turn, each on the target's own answers before it; notebook 04 then asks nobody."""
    chosen, store, sampling = dialogues(), Store(tmp_path / "a.jsonl"), Sampling(32)
    engine = Parrot(target.tokenizer())
    written = offline.answer(engine, target, chosen, store, sampling, 0)
    turns = [sum(turn["role"] == "user" for turn in messages) for messages in chosen.messages]
    assert len(engine.seen) == sum(turns)
    assert all(wide.OPEN not in text for _, text, _ in engine.seen if text.count("answer"))

    def nobody():
        raise AssertionError("a server was asked for")

    said = generate(chosen, nobody, tmp_path / "a.jsonl", model_key=target.revision, sampling=sampling)
    assert [len(answers) for answers in said] == turns
    assert written == sum(len(a["token_ids"]) for answers in said for a in answers)
    last = said[0][-1]
    earlier = target.tokenizer().decode(last["prompt_token_ids"])
    assert all(answer["text"] in earlier for answer in said[0][:-1])


def test_what_was_not_finished_is_left_out_and_answered_the_next_time(target, tmp_path):
    chosen, store, sampling = dialogues(), Store(tmp_path / "a.jsonl"), Sampling(32)
    offline.answer(Parrot(target.tokenizer(), stop_after=3), target, chosen, store, sampling, 0)
    assert len(offline.finished(chosen, store, target, sampling)) < len(chosen)
    again = Parrot(target.tokenizer())
    offline.answer(again, target, chosen, Store(tmp_path / "a.jsonl"), sampling, 0)
    turns = sum(sum(turn["role"] == "user" for turn in messages) for messages in chosen.messages)
    assert len(again.seen) == turns - 3
    assert len(offline.finished(chosen, Store(tmp_path / "a.jsonl"), target, sampling)) == len(chosen)


def test_a_prompt_that_leaves_no_room_for_its_answer_is_not_asked(target, tmp_path):
    chosen, engine = dialogues(), Parrot(target.tokenizer())
    engine.llm.model_config.max_model_len = 20
    assert offline.answer(engine, target, chosen, Store(tmp_path / "a.jsonl"), Sampling(32), 0) == 0


def test_its_prompts_are_the_ids_that_the_template_gives(target):
    ids = offline.rendered(target.tokenizer(), [{"role": "user", "content": "Hello"}], [])
    text = target.tokenizer().decode(ids)
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


def test_prompts_about_texts_hold_one_whole_text_and_share_its_side_of_a_split():
    texts = ["A river {rose} over {1-3} nights.", 'def f(): return {"a": 1}', "Short."]
    frame = wide.about(texts, 20, seed=2)
    assert len(frame) == 20
    assert frame.prompt_id.is_unique
    held = [[text for text in texts if text in messages[0]["content"]] for messages in frame.messages]
    assert all(len(found) == 1 for found in held)
    assert frame.topic.groupby([found[0] for found in held]).nunique().eq(1).all()
    assert not frame.messages.map(lambda m: "{length}" in m[0]["content"] or wide.HOLE in m[0]["content"]).any()


def test_more_about_texts_than_there_is_to_ask_is_refused():
    for texts in ([], ["One text."]):
        with pytest.raises(conversations.TooFewPrompts, match=f"{len(texts)} texts gave"):
            wide.about(texts, 2000)


@pytest.fixture(scope="module")
def written(target, tmp_path_factory):
    """Two parts as `answer` leaves them: the first whole, the second stopped after its first answer."""
    folder = tmp_path_factory.mktemp("written")
    for name, chosen, most in (("1", dialogues()[:2], 99), ("2", dialogues()[2:], 1)):
        offline.write_prompts(folder / name / "prompts.jsonl", chosen)
        store, engine = Store(folder / name / "answers.jsonl"), Parrot(target.tokenizer(), most)
        offline.answer(engine, target, chosen, store, Sampling(32), 0)
    return folder


@pytest.fixture
def parts(written, tmp_path):
    """A copy of theirs for each test."""
    shutil.copytree(written, tmp_path / "parts")
    return [tmp_path / "parts" / name for name in ("1", "2")]


def command(*words):
    return CliRunner().invoke(app, list(map(str, words)))


def test_gathered_parts_are_what_notebook_04_finds_answered(target, parts, tmp_path):
    done = command("gather", *parts, "--run", tmp_path / "run", "--max-tokens", 32)
    assert done.exit_code == 0, done.output
    assert "2 prompts answered whole" in done.output
    known = conversations.read(tmp_path / "run" / "prompts.jsonl")
    assert list(known.prompt_id) == list(dialogues().prompt_id[:2])
    answers = tmp_path / "run" / "data" / "answers.jsonl"
    said = generate(known, None, answers, model_key=target.revision, sampling=Sampling(32))
    assert all(said)


@pytest.mark.parametrize("missing", [("prompts.jsonl",), ("answers.jsonl",), ("prompts.jsonl", "answers.jsonl")])
@pytest.mark.parametrize("verb", ["gather", "dataset"])
def test_a_folder_that_is_no_part_is_named_with_what_it_lacks(parts, tmp_path, verb, missing):
    for name in missing:
        (parts[1] / name).unlink()
    more = [parts[0], "--run", tmp_path / "run"] if verb == "gather" else []
    error = command(verb, parts[1], *more, "--max-tokens", 32).exception
    assert isinstance(error, LabError)
    assert error.what == f"{parts[1]} has no {' and no '.join(missing)}"
    assert "labkit.conversations answer" in error.remedy
    assert not (tmp_path / "run").exists(), "nothing half gathered"


@pytest.mark.parametrize(("part", "given"), [(1, []), (0, ["--temperature", 1]), (0, ["--seed", 1])])
@pytest.mark.parametrize("verb", ["gather", "dataset"])
def test_no_finished_answer_is_an_error_that_says_how_many_there_are(parts, tmp_path, verb, part, given):
    """A part that was stopped, and one that was answered with other sampling than is asked for."""
    more = ["--run", tmp_path / "run"] if verb == "gather" else []
    error = command(verb, parts[part], *more, "--max-tokens", 32, *given).exception
    assert isinstance(error, LabError)
    stored = len(Store(parts[part] / "answers.jsonl").rows)
    assert "of 2 prompts none is answered" in error.what
    assert f"{stored} answers are stored" in error.what
    assert "--max-tokens" in error.remedy
    assert not (tmp_path / "run").exists()
    assert not (parts[part] / "dataset.parquet").exists()
