"""Which drafts fit, in which order they are tried, and what next-steps.md says."""

from __future__ import annotations

import dataclasses

import pytest

from labkit import costmodel, files, options
from labkit.costmodel import StepModel, drafting
from labkit.options import Engine
from labkit.options.possible import hard, installed_engine
from labkit.targets import geometry

NEW, OLD = Engine("vllm", "0.32.0"), Engine("vllm", "0.16")


def kimi(**changes) -> StepModel:
    return StepModel("kimi-k2.5", "rtx-pro-6000-pcie-x8", reuse=(0.6, 0.8, 1.0), **changes)


@pytest.fixture(scope="module")
def ranked():
    return options.rank(kimi(), engine=NEW)


def test_the_story_of_the_background(ranked):
    by = ranked.set_index(["option", "draft"])
    # No MTP layers; DeepSeek's draft has another vocabulary; n-gram is the cheapest test, training the dearest.
    assert not ranked[ranked["option"] == "M"]["possible"].any()
    assert "no MTP layers (num_nextn_predict_layers 0)" in ranked.set_index("option").loc["M", "why"]
    deepseek = by.loc[("C", "DeepSeek-V3's MTP layer")]
    assert not deepseek["possible"]
    assert "vocabulary 129,280 against 163,840" in deepseek["why"]
    assert by.loc[("C", "lightseekorg/kimi-k2.5-eagle3-mla"), "possible"]
    assert "not known to serve" in by.loc[("B", "lightseekorg/kimi-k2.5-eagle3-mla"), "why"]
    assert by.loc[("B", "AQ-MedAI/Kimi-K2-Instruct-eagle3"), "possible"]  # another target's head: it loads
    assert "made for kimi-k2" in by.loc[("B", "AQ-MedAI/Kimi-K2-Instruct-eagle3"), "why"]
    order = ranked[ranked["possible"]].drop_duplicates("option")["option"].tolist()
    assert order == ["A", "C", "B", "D", "E"]


def test_the_order_is_by_possible_then_pays_then_hours(ranked):
    keys = [(not r.possible, r.verdict == "no-go", r.hours, -r.speedup) for r in ranked.itertuples() if r.possible]
    assert keys == sorted(keys)
    assert ranked["possible"].tolist() == sorted(ranked["possible"], reverse=True)
    assert ranked["rank"].tolist() == list(range(1, len(ranked) + 1))


def test_what_does_not_pay_comes_after_what_may():
    told = options.rank(kimi(), engine=NEW, acceptance={"A": (1.0, 1.02, 1.05)})
    first = told[told["option"] == "A"].iloc[0]
    assert first["verdict"] == "no-go"
    assert first["rank"] > told[(told["option"] == "D")]["rank"].iloc[0]


def test_an_old_engine_serves_no_head():
    told = options.rank(kimi(), engine=OLD)
    heads = told[(told["option"] == "C") & told["draft"].str.contains("k2.5")]
    assert not heads["possible"].any()
    assert heads["why"].str.contains("vllm 0.16 is older than 0.18").all()
    assert told.set_index("option").loc["A", "possible"]


def test_predictions_are_the_step_models(ranked):
    row = ranked.set_index(["option", "draft"]).loc[("C", "lightseekorg/kimi-k2.5-eagle3-mla")]
    head = drafting.head("kimi-k2.5-eagle3-mla")
    cost = drafting.draft_ms(head, kimi().hardware, 8, 3)
    expected = kimi(draft_ms=cost).speedup((2.597, 2.94, 3.139), 3)
    assert row[["speedup_low", "speedup", "speedup_high"]].tolist() == pytest.approx(expected)
    assert row["verdict"] == costmodel.verdict(kimi(draft_ms=cost), (2.597, 2.94, 3.139), 3).word


def test_a_measured_acceptance_replaces_the_assumed_one():
    told = options.rank(kimi(), engine=NEW, acceptance={"A": 1.1}).set_index("option").loc["A"]
    expected = kimi().speedup(1.1, 5)
    assert told[["speedup_low", "speedup", "speedup_high"]].tolist() == pytest.approx(expected)


def test_a_model_with_mtp_layers_may_use_them():
    machine = dataclasses.replace(costmodel.hardware("rtx-pro-6000-pcie-x8"), measured={})
    told = options.rank(StepModel("deepseek-v3", machine), engine=NEW).set_index("option")
    assert told.loc["M", "possible"]
    assert told.loc["M", "speedup"] > 0
    heads = told.loc[["C"]].set_index("draft")
    assert "vocabulary 163,840 against 129,280" in heads.loc["lightseekorg/kimi-k2.5-eagle3-mla", "why"]


def test_a_dense_model_has_no_expert_budget_and_no_known_head():
    told = options.rank(StepModel("smollm2", "nvidia-h200"), engine=NEW).set_index("option")
    assert not told.loc["E", "possible"]
    assert "does not route" in told.loc["E", "why"]
    assert "hidden size 576" in told.loc["C", "why"]
    assert told.loc["D", "possible"]


def test_a_budget_saves_nothing_pair_by_pair():
    told = options.rank(StepModel("qwen3-30b-a3b", "nvidia-h200"), engine=NEW).set_index("option")
    assert "pair by pair" in told.loc["E", "why"]
    assert told.loc["E", "speedup"] == pytest.approx(told.loc["D", "speedup"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hidden_size": 4096}, "hidden size 4,096 against 7,168"),
        ({"vocab_size": 129280}, "vocabulary 129,280 against 163,840"),
        ({"engines": {"sglang": ""}}, "vllm is not known to serve"),
        ({"engines": {"vllm": "0.40"}}, "vllm 0.32.0 is older than 0.40"),
    ],
)
def test_obstacles(change, why):
    head = drafting.head("kimi-k2.5-eagle3-mla")
    assert options.obstacles(head, geometry("kimi-k2.5"), NEW) == []
    found = options.obstacles(head | change, geometry("kimi-k2.5"), NEW)
    assert why in " ".join(found)
    assert all(map(hard, found))


def test_a_short_head_limits_the_context_only():
    head = drafting.head("kimi-k2.5-eagle3-mla") | {"max_position_embeddings": 2048}
    found = options.obstacles(head, geometry("kimi-k2.5"), NEW)
    assert "--max-model-len 2048" in found[0]
    assert not hard(found[0])


def test_a_tokenizer_larger_than_the_vocabulary_fits_no_head():
    class Larger:
        def __len__(self) -> int:
            return 170_000

    told = options.rank(kimi(), engine=NEW, tokenizer=Larger())
    heads = told[told["option"].isin(["B", "C"])]
    assert not heads["possible"].any()
    assert heads["why"].str.contains("170,000 tokens").any()


def test_an_unknown_version_is_not_called_old():
    assert not Engine("vllm").older_than("0.18")
    assert not Engine("vllm", "nightly").older_than("0.18")
    assert Engine("vllm", "0.9.1").older_than("0.18")  # by version, not by letters
    assert installed_engine().name == "vllm"


def test_every_draft_has_its_facts_and_source():
    for head in drafting.drafts()["heads"]:
        assert head["source"], head["name"]
        assert head["draft_vocab_size"] <= head["vocab_size"]
        length = head["acceptance_length"]
        assert (
            length is None
            or 1 <= length["low"] <= length["mid"] <= length["high"] <= 1 + head["num_speculative_tokens"]
        )
    for letter, told in drafting.drafts()["options"].items():
        assert told["hours"]["source"], letter


def test_the_frame_can_be_saved(ranked, tmp_path):
    files.write_parquet(tmp_path / "options.parquet", ranked)
    assert files.read_parquet(tmp_path / "options.parquet")["option"].tolist() == ranked["option"].tolist()


def test_next_steps_names_order_reasons_and_sources(ranked, tmp_path):
    path = options.write_next_steps(tmp_path, ranked, title="a title", verdict="unclear: measure")
    text = path.read_text()
    assert text.startswith("# Next steps: a title\n")
    assert "**unclear: measure**" in text
    table, _, impossible = text.partition("## Not possible")
    for row in ranked.itertuples():
        assert (row.draft in table) if row.possible else (row.why in impossible)
        if row.possible:
            assert row.source in table
            assert f"{row.speedup:.2f} [{row.speedup_low:.2f}, {row.speedup_high:.2f}]" in table
