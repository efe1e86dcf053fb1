"""Predicted n-gram speedups against arithmetic by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from labkit import acceptance, files, prediction

TIMES = pd.DataFrame(
    {"n": [1, 2, 4], "step_ms": [10.0, 12.0, 16.0], "low_ms": [9.0, 11.0, 14.0], "high_ms": [11.0, 13.0, 18.0]}
)


def test_by_hand() -> None:
    """10 steps, 4 of them with 3 drafted tokens of which 2 are accepted: 18 tokens for 6 x 10 + 4 x 16 ms."""
    found = acceptance.from_steps([3] * 4 + [0] * 6, [2] * 4 + [0] * 6, k=3)
    low, middle, high = prediction.speedup(found, TIMES)
    assert middle == pytest.approx(18 * 10 / (6 * 10 + 4 * 16))
    assert low == pytest.approx(18 * 10 / (6 * 10 + 4 * 18))
    assert high == pytest.approx(18 * 10 / (6 * 10 + 4 * 14))


def test_nothing_drafted_changes_nothing() -> None:
    assert prediction.speedup(acceptance.from_steps([0] * 5, [0] * 5, k=3), TIMES) == pytest.approx((1, 1, 1))


def test_useless_drafts_cost_what_they_cost() -> None:
    """Every step drafts 1 token and none is accepted: 10 ms become 12."""
    found = acceptance.from_steps([1] * 5, [0] * 5, k=1)
    assert prediction.speedup(found, TIMES)[1] == pytest.approx(10 / 12)


def test_nothing_known_predicts_nothing() -> None:
    empty = acceptance.from_steps([], [], k=3)
    assert all(np.isnan(value) for value in prediction.speedup(empty, TIMES))
    assert all(np.isnan(value) for value in prediction.speedup(empty, TIMES.iloc[:0]))


def rows_of(category: str, prompt: list[int], output: list[int]) -> pd.DataFrame:
    return pd.DataFrame({"category": [category], "prompt_token_ids": [prompt], "output_token_ids": [output]})


def test_beside_the_measurement_by_category(tmp_path: Path) -> None:
    """A copy of the prompt is drafted and accepted; new tokens draft nothing and predict 1."""
    copied, fresh = list(range(1, 21)), list(range(100, 110))
    rows = pd.concat([rows_of("copy", copied, copied), rows_of("fresh", list(range(50, 60)), fresh)])
    measured = pd.DataFrame(
        {
            "category": ["copy", "fresh"],
            "speedup": [1.0, 0.95],
            "speedup_low": [0.9, np.nan],
            "speedup_high": [1.1, np.nan],
        }
    )
    table = prediction.by_category(rows, TIMES, measured, k=3, lookup_max=2, lookup_min=1).set_index("category")
    # the prompt gives the first token; then 3 drafted and accepted and the bonus: 19 tokens in 5 drafting steps
    assert table.loc["copy", "tokens_per_step"] == pytest.approx(19 / 5)
    assert table.loc["copy", "predicted"] > 2
    assert not table.loc["copy", "right"]
    assert table.loc["copy", "step_overhead"] == pytest.approx(table.loc["copy", "predicted"])
    assert table.loc["fresh", "predicted"] == pytest.approx(1.0)
    assert table.loc["fresh", "right"], "within 10%, although there is no interval"
    files.write_parquet(tmp_path / "prediction.parquet", table.reset_index())  # as the notebook saves it
    text = prediction.sentence(table.reset_index())
    assert "1 of 2 categories" in text
    assert "It missed copy" in text


def test_without_a_measurement_nothing_is_judged() -> None:
    rows = rows_of("copy", [1, 2, 3], [1, 2, 3])
    none = pd.DataFrame(columns=["category", "speedup", "speedup_low", "speedup_high"])
    table = prediction.by_category(rows, TIMES, none, k=3, lookup_max=2, lookup_min=1)
    assert table["right"].isna().all()
    assert "nothing measured" in prediction.sentence(table)
