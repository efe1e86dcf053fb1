"""Which differences of greedy outputs are a bug, at one stream and where the batch itself rounds otherwise."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest

from labkit import agreement
from labkit.evaluation import judging

GAPS = {1: 0.0, 2: 0.2, 3: 0.5, 4: 0.9}  # nats by which a token lies below token 1 after any context


@pytest.fixture
def settings(tmp_path, monkeypatch):
    told = {token: -1.0 - gap for token, gap in GAPS.items()}
    monkeypatch.setattr(agreement, "next_logprobs", lambda server, context: told)
    return SimpleNamespace(concurrency=1, folder=tmp_path)


def rows(**outputs: int) -> pd.DataFrame:
    """Rows of two prompts each: a `variant_k_streams` and the token that it says second to the second of them."""
    found = []
    for name, token in outputs.items():
        variant, k, streams = name.split("_")
        marks = {"variant": variant, "k": int(k), "streams": int(streams), "temperature": 0.0}
        for prompt, second in (("p", 1), ("q", token)):
            answer = {"output_token_ids": [7, second], "prompt_token_ids": [5], "error": None, "repeat": 0}
            found.append(marks | answer | {"prompt_id": prompt, "category": "c"})
    return pd.DataFrame(found)


@pytest.mark.parametrize(
    ("outputs", "wrong", "allowed"),
    [
        ({"eagle3_3_1": 1}, [], [0.25]),
        ({"eagle3_3_1": 2}, [], [0.25]),
        ({"eagle3_3_1": 3}, [1], [0.25]),
        # At 4 streams the baseline says 3 instead of 1 itself: the head may too, but nothing further off.
        ({"baseline_0_4": 3, "eagle3_3_1": 1, "eagle3_3_4": 3}, [], [0.25, 0.5]),
        ({"baseline_0_4": 3, "eagle3_3_1": 3, "eagle3_3_4": 3}, [1], [0.25, 0.5]),
        ({"baseline_0_4": 3, "eagle3_3_1": 1, "eagle3_3_4": 4}, [4], [0.25, 0.5]),
        # A baseline that is far off itself is no witness, and allows nothing.
        ({"baseline_0_4": 4, "eagle3_3_1": 1, "eagle3_3_4": 3}, [4], [0.25, 0.25]),
        ({"baseline_0_4": 1, "eagle3_3_1": 1, "eagle3_3_4": 3}, [4], [0.25, 0.25]),
        # A step of the head's at 4 streams has 16 tokens: the baseline at 16 streams is a witness too.
        ({"baseline_0_4": 1, "baseline_0_16": 3, "eagle3_3_1": 1, "eagle3_3_4": 3}, [], [0.25, 0.5]),
        ({"eagle3_3_1": 1, "eagle3_3_4": 3}, [4], [0.25, 0.25]),  # the baseline was not measured there
    ],
)
def test_a_head_may_differ_by_as_much_as_the_baseline_does_from_itself(settings, outputs, wrong, allowed):
    judged = judging.judged_points(rows(baseline_0_1=1, **outputs), None, settings)
    assert agreement.unexplained(judged)["streams"].tolist() == wrong
    assert judged.groupby("streams")["allowed_nats"].first().tolist() == allowed
    said = judging.sentence(judged)
    assert ("bug" in said) == bool(wrong)
    assert ("up to 0.5, as the baseline from itself" in said) == (allowed[-1] == 0.5)


def test_a_token_beyond_the_likeliest_allows_nothing(settings):
    measured = rows(baseline_0_1=1, baseline_0_4=9, eagle3_3_4=3)
    assert len(agreement.unexplained(judging.judged_points(measured, None, settings))) == 1


def test_one_point_without_ids_takes_no_other_with_it(settings):
    measured = rows(baseline_0_1=1, baseline_0_4=1, eagle3_3_1=3, eagle3_3_4=1)
    measured["output_token_ids"] = measured["output_token_ids"].where(measured["streams"] == 1, None)
    judged = judging.judged_points(measured, None, settings)
    assert judged["streams"].tolist() == [1, 1]
    assert len(agreement.unexplained(judged)) == 1


def test_several_streams_as_the_settings_own_have_witnesses_too(settings):
    settings.concurrency = 8
    judged = judging.judged_points(rows(baseline_0_8=1, baseline_0_1=3, eagle3_3_8=3), None, settings)
    assert judged["allowed_nats"].unique().tolist() == [0.5]
    assert agreement.unexplained(judged).empty


def test_no_shared_prompt_is_nothing_compared(settings):
    measured = rows(baseline_0_1=1, eagle3_3_1=1)
    measured.loc[measured["variant"] == "eagle3", "prompt_id"] = ["x", "y"]
    assert judging.judged_points(measured, None, settings).empty
