"""What notebook 04 says of its own steps."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from labkit import bench, conversations, extract, pipeline, targets, train, vocab
from labkit.errors import LabError
from labkit.runs import dry
from labkit.settings import BadParameter, Eagle3Pipeline


def dataset() -> pd.DataFrame:
    """Three training answers and one held out, with token ids that can be counted by hand."""
    rows = [("train", [1, 2, 2], 2), ("train", [1, 3, 3], 2), ("train", [1, 2, 4], 1), ("held_out", [1, 2, 9], 2)]
    return pd.DataFrame(
        [
            {
                "split": split,
                "input_ids": ids,
                "loss_mask": [False] * (3 - answer) + [True] * answer,
                "seq_len": 3,
                "answer_tokens": answer,
            }
            for split, ids, answer in rows
        ]
    )


def test_disk_is_four_states_a_token():
    """SmolLM2: 4 x 576 numbers of 2 bytes and an int64 id for each token."""
    settings = Eagle3Pipeline(num_prompts=10, held_out=2, max_tokens=100, max_model_len=2048)
    found = pipeline.estimate(settings, targets.resolve("smollm2"))
    assert found.disk_bytes == found.tokens * (4 * 576 * 2 + 8)
    assert found.tokens == 12 * (pipeline.PROMPT_TOKENS + 100)


def test_a_training_that_makes_its_states_stores_those_of_held_out_prompts_alone(monkeypatch):
    """On a disk that all states would not fit, such a run is not refused (they were 85 GB on a disk of 65)."""
    from labkit.planner import here

    monkeypatch.setattr(here, "free_disk_gb", lambda *_: 65.0)
    amounts = {"num_prompts": 32_900, "held_out": 200, "max_tokens": 512, "max_model_len": 2048}
    target = targets.resolve("smollm2")
    found = pipeline.estimate(Eagle3Pipeline(states_from="on-the-fly", **amounts), target)
    assert found.disk_bytes == 200 * (pipeline.PROMPT_TOKENS + 512) * (4 * 576 * 2 + 8)
    with pytest.raises(LabError, match="of disk"):
        pipeline.estimate(Eagle3Pipeline(**amounts), target)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"hidden_states": "int4"}, extract.UnknownForm),
        ({"states_backend": "sglang"}, extract.UnknownBackend),
        ({"shard": "0/4"}, extract.BadShard),
        ({"aux_layers": "2,15,30"}, extract.BadLayers),
        ({"loss": "mse"}, train.BadLoss),
        ({"loss": '{"ce": -1}'}, train.BadLoss),
        ({"loss": '{"ce": NaN}'}, train.BadLoss),
        ({"loss": '{"ce": 0, "tv": 0}'}, train.BadLoss),
        ({"start": "/nowhere/head"}, train.BadStart),
    ],
)
def test_choices_that_do_not_exist_are_refused_before_anything_is_spent(wrong, error):
    with pytest.raises(error):
        pipeline.estimate(Eagle3Pipeline(**wrong), targets.resolve("smollm2"))
    text, well = dry.report("04", wrong)
    assert not well
    assert next(iter(wrong.values())).strip("{}") in text


def test_smaller_forms_need_less_disk():
    plain, small = (
        pipeline.estimate(Eagle3Pipeline(hidden_states=form), targets.resolve("smollm2")).disk_bytes
        for form in ("bf16", "fp8")
    )
    assert 0.5 < small / plain < 0.52


def test_coverage_counts_answer_tokens_only_and_renders_the_template_once(monkeypatch):
    asked, real = [], vocab.required_ids
    monkeypatch.setattr(vocab, "required_ids", lambda tokenizer: asked.append(1) or real(tokenizer))
    chosen, target = Eagle3Pipeline(draft_vocab_size=1000), targets.resolve("smollm2")
    mapping, table = pipeline.vocabulary(chosen, dataset(), target)
    assert len(asked) == 1
    table = table.set_index(["draft_vocab_size", "split"])
    assert table.loc[(1000, "train"), "coverage"] == mapping.coverage(pipeline.counts(dataset(), target, "train"))
    assert table.loc[(1024, "train"), "coverage"] == 1.0
    assert table.loc[(49152, "held_out"), "coverage"] == 1.0
    found = pipeline.counts(dataset(), targets.resolve("smollm2"), "train")
    assert {int(i): int(found[i]) for i in np.flatnonzero(found)} == {2: 2, 3: 2, 4: 1}


def test_special_tokens_can_always_be_drafted():
    target = targets.resolve("smollm2")
    mapping, _ = pipeline.vocabulary(Eagle3Pipeline(draft_vocab_size=64), dataset(), target)
    assert mapping.t2d[target.tokenizer().all_special_ids].all()
    assert mapping.t2d[[2, 3, 4]].all()


def test_problems_stop_the_pipeline_with_the_first_one():
    pipeline.refuse(pd.DataFrame(columns=["row", "check", "value", "limit", "remedy"]))
    problem = {"row": 3, "check": "top_1", "value": 0.1, "limit": 0.9, "remedy": "other layers"}
    with pytest.raises(pipeline.UnusableStates, match="top_1"):
        pipeline.refuse(pd.DataFrame([problem]))


def test_costs_are_tokens_over_seconds():
    metrics = pd.DataFrame({"tokens": [100, 200], "loss": [2.0, 1.0], "seconds": [1.0, 2.0]})
    table = pipeline.costs(dataset(), metrics, {"answers": 2.0, "training": 3.0}).set_index("step")
    assert table.loc["answers", "tokens_per_s"] == 7 / 2.0
    assert table.loc["training", "tokens_per_s"] == 100.0


def prompts_of(*texts):
    rows = [{"prompt_id": text, "messages": [{"role": "user", "content": text}]} for text in texts]
    return pd.DataFrame(rows)


def test_held_out_prompts_that_training_repeats_are_told():
    same = "Please explain in a few words how rain comes about in the mountains."
    train = prompts_of("Something else.", same.replace("Please", "Kindly")).assign(split="train")
    held_out = prompts_of(same, "Write a poem.").assign(split="held_out")
    assert "1 of 2 held-out" in pipeline.copies(pd.concat([train, held_out], ignore_index=True))
    assert pipeline.copies(pd.concat([train, held_out[1:]], ignore_index=True)).startswith("No training prompt")


def test_prompts_of_the_benchmark_are_left_out_of_training(tmp_path):
    judged = bench.prompts("benchmark").messages[0][-1]["content"]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("A question of my own?", judged.upper())))
    known = pipeline.prompts(Eagle3Pipeline(prompts=str(path)), targets.resolve("smollm2"))
    assert [messages[0]["content"] for messages in known.messages] == ["A question of my own?"]
    assert "near copy of an evaluation prompt" in set(conversations.report(known).kind)


def test_the_data_sets_own_answers_need_no_server(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    monkeypatch.setattr("labkit.pipeline.data.serve", None)
    path = tmp_path / "own.jsonl"
    rows = [{"prompt": f"Question number {i}?", "answer": f"Answer number {i}."} for i in range(6)]
    path.write_text("\n".join(map(json.dumps, rows)))
    settings = Eagle3Pipeline(prompts=str(path), answers="dataset", num_prompts=4, held_out=2)
    target = targets.resolve("smollm2")
    chosen = conversations.split(pipeline.prompts(settings, target), 4, 2, seed=0)
    data = pipeline.answers(settings, target, chosen)
    for row, prompt in zip(data.itertuples(), chosen.itertuples(), strict=True):
        said = target.tokenizer().decode(np.array(row.input_ids)[np.array(row.loss_mask)])
        assert said == f"{prompt.messages[1]['content']}<|im_end|>"
    with pytest.raises(BadParameter, match="nobody"):
        Eagle3Pipeline(answers="somebody")


def test_counts_are_of_training_answers_only():
    frame = pd.DataFrame(
        {
            "split": ["train", "train", "held_out"],
            "input_ids": [np.array([1, 2, 2, 3]), np.array([1, 3]), np.array([4, 4])],
            "loss_mask": [np.array([False, True, True, True]), np.array([False, True]), np.array([True, True])],
        }
    )
    target = SimpleNamespace(geometry=SimpleNamespace(vocab_size=6))
    assert list(pipeline.counts(frame, target, "train")) == [0, 0, 2, 2, 0, 0]


@pytest.mark.parametrize(
    ("origin", "temperature", "said"),
    [
        ("target", 0.0, "the target's own greedy answers"),
        ("target", 0.7, "the target's own (sampled, temperature 0.7) answers"),
        ("dataset", 1.0, "the data set's own answers"),
    ],
)
def test_the_conclusion_says_whose_answers_were_learned(origin, temperature, said):
    metrics = pd.DataFrame({"tokens": [10], "seconds": [1.0], "acceptance_length": [1.5], "loss": [1.0]})
    rows = dataset().assign(origin=origin, temperature=temperature)
    found = SimpleNamespace(mean_length=1.5)
    assert said in pipeline.conclusion(rows, found, metrics, 3)
