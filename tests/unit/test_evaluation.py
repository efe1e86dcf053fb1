"""Verdict and headline of an evaluation."""

import math

import pandas as pd
import pytest

from labkit import evaluation
from labkit.acceptance import from_positions


def table(low: float, high: float) -> pd.DataFrame:
    line = {"variant": "eagle3", "prompts_set": "benchmark", "speedup": (low + high) / 2}
    return pd.DataFrame([line | {"speedup_low": low, "speedup_high": high}])


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (1.01, 1.5, "go"),
        (0.5, 0.99, "no-go"),
        (0.9, 1.1, "unclear"),
        (1.0, 1.2, "unclear"),
        (math.nan, math.nan, "not measured"),
    ],
)
def test_verdict(low, high, said):
    assert evaluation.verdict(table(low, high)) == said


def test_verdict_of_another_set_is_not_borrowed():
    assert evaluation.verdict(table(1.1, 1.2), evaluation.HELD_OUT) == "not measured"


def test_headline_names():
    accepted = {"engine, benchmark prompts": from_positions([40, 20, 10], drafts=100)}
    values = evaluation.headline(table(1.1, 1.3), accepted, None, 0.75)
    assert values["eagle3_acceptance_length"] == pytest.approx(1.7)
    assert values["eagle3_speedup_low"] == 1.1
    assert values["verdict"] == "go"
    assert values["verdict_held_out"] == "not measured"
    assert "eagle3_acceptance_length_held_out" not in values


def test_pipeline_that_never_ran_gives_no_held_out_prompts(tmp_path):
    pipeline = evaluation.Pipeline(tmp_path)
    assert pipeline.held_out(5).empty
    assert list(pipeline.held_out(5)) == ["prompt_id", "category", "messages"]


def test_speedups_keep_the_two_sets_of_prompts_apart():
    def row(variant, prompt, category, tpot):
        timed = {"tpot_ms": tpot, "decode_ms": 10 * tpot, "tokens_timed": 11, "tokens_total": 11}
        return {"variant": variant, "prompt_id": prompt, "category": category, "error": None, **timed}

    rows = pd.DataFrame(
        [
            row(variant, f"{category}{i}", category, tpot)
            for variant, factor in (("baseline", 1.0), ("eagle3", 0.5))
            for category, base in (("code", 20.0), (evaluation.HELD_OUT, 10.0))
            for i in range(3)
            for tpot in [base * factor * (0.5 if category == "code" and factor < 1 else 1)]
        ]
    ).assign(tokens_source="usage", output_token_ids=None)
    found = evaluation.speedups(rows, ["eagle3", "ngram"], seed=0).set_index("prompts_set")["speedup"]
    assert found["benchmark"] == pytest.approx(4.0)
    assert found[evaluation.HELD_OUT] == pytest.approx(2.0)
