"""Predicted n-gram speedups against arithmetic by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from labkit import acceptance, files, ngram, prediction

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


SYNC = TIMES.assign(step_ms=[12.0, 15.0, 21.0], low_ms=[11.0, 14.0, 19.0], high_ms=[13.0, 16.0, 23.0])


def test_scheduling_of_the_speculating_server_is_in_its_steps() -> None:
    """10 steps, 4 of them with 3 drafts of which 2 are accepted, on a server whose steps take 12 and 21 ms."""
    found = acceptance.from_steps([3] * 4 + [0] * 6, [2] * 4 + [0] * 6, k=3)
    low, middle, high = prediction.speedup(found, TIMES, SYNC)
    assert middle == pytest.approx(18 * 10 / (6 * 12 + 4 * 21))
    assert low == pytest.approx(18 * 10 / (6 * 12 + 4 * 23))
    assert high == pytest.approx(18 * 10 / (6 * 12 + 4 * 19))
    assert prediction.scheduling(TIMES, SYNC) == pytest.approx(1.2)
    assert prediction.scheduling(TIMES, SYNC.iloc[:0]) == 1.0


def test_grid_predicts_what_each_configuration_does_alone() -> None:
    """Every row of the grid against simulating that configuration by itself."""
    rng = np.random.default_rng(0)
    rows = pd.concat(rows_of("any", list(rng.integers(0, 6, 40)), list(rng.integers(0, 6, 60))) for _ in range(5))
    table = prediction.grid(rows, TIMES, SYNC, k=3, lookup_max=2)
    assert set(table["k"]) == {1, 2, 3, 5}
    for row in table[table["k"] <= 3].itertuples():
        lookup = {"k": row.k, "lookup_max": row.lookup_max, "lookup_min": row.lookup_min}
        alone = prediction.speedup(ngram.simulate_rows(rows, **lookup), TIMES, SYNC)[1]
        assert row.predicted == pytest.approx(alone)
    assert prediction.grid(rows, TIMES.iloc[:0], SYNC.iloc[:0], k=3, lookup_max=2)["predicted"].isna().all()


def test_scheduling_is_named_or_said_to_be_unknown() -> None:
    assert "**1.20 times** as long (10.0 ms to 12.0 ms" in prediction.scheduling_sentence(TIMES, SYNC)
    assert "21.0" not in prediction.scheduling_sentence(TIMES, SYNC.iloc[:0])
    assert "not known for an attached server" in prediction.scheduling_sentence(TIMES, SYNC.iloc[:0])


def test_the_reason_is_tokens_against_cost() -> None:
    """On maths a step yields 1.1 tokens at 0.88x, so it costs 1.25 plain ones; on extraction 3 at 2x, so 1.5."""
    table = pd.DataFrame(
        {
            "category": ["maths", "extraction"],
            "tokens_per_step": [1.1, 3.0],
            "predicted": [0.9, 2.1],
            "measured": [0.88, 2.0],
        }
    )
    text = prediction.reasons(table, 1.2)
    assert (
        "n-gram is 12% slower on maths because a step there yields 1.10 tokens and costs 1.25 plain ones" in text
    )
    assert "100% faster on extraction because a step there yields 3.00 tokens and costs 1.50 plain ones" in text
    assert "1.20 of that is scheduling" in text
    told = prediction.reasons(table.assign(measured=np.nan), 1.0)
    assert "n-gram should be 10% slower on maths" in told
    assert "scheduling" not in told


def test_what_each_change_costs() -> None:
    """Requests made of plain steps of 13 ms and drafting ones (3 drafted) of 24 ms, beside 10/16 and 12/21 ms."""
    rows = pd.DataFrame(
        {
            "error": None,
            "drafts": [2, 5, 8],
            "drafted": [6, 15, 24],
            "accepted": [2, 5, 8],
            "accepted_per_position": [[2, 0, 0], [5, 0, 0], [8, 0, 0]],
            "tokens_total": [13, 16, 19],
            "chunks": [11, 11, 11],
        }
    )
    rows["decode_ms"] = [8 * 13 + 2 * 24, 5 * 13 + 5 * 24, 2 * 13 + 8 * 24]
    table = prediction.apart(TIMES, SYNC, prediction.own_steps(rows)).set_index("step")
    assert table.loc["plain"].tolist() == pytest.approx([1, 10, 12, 13])
    assert table.loc["drafted"].tolist() == pytest.approx([4, 16, 21, 24])
    assert prediction.apart(TIMES, SYNC, prediction.own_steps(rows.assign(drafts=None))).empty


def test_dear_steps_and_wrong_acceptance_are_told_apart() -> None:
    """A copied prompt: 19 tokens in 5 drafting steps of 4 tokens. Steps of 16 ms predict 2.375x; the server's
    own take 38 ms, and 19 x 10 / (5 x 38) = 1.0 was measured: the steps were dear, the acceptance right."""
    copied = list(range(1, 21))
    measured = pd.DataFrame(
        {"category": ["copy"], "speedup": [1.0], "speedup_low": [0.95], "speedup_high": [1.05]}
    )
    own = pd.DataFrame(
        {"n": [4.0], "step_ms": [38.0], "low_ms": [38.0], "high_ms": [38.0], "tokens_are": ["drafted"]}
    )
    rows = rows_of("copy", copied, copied)
    table = prediction.by_category(rows, TIMES, measured, k=3, lookup_max=2, lookup_min=1, own=own)
    assert table.loc[0, "predicted"] == pytest.approx(19 * 10 / (5 * 16), rel=0.02)
    assert not table.loc[0, "right"]
    assert table.loc[0, "explained"] == pytest.approx(1.0)
    assert table.loc[0, "explained_right"]
    assert "is right in 1 of 1: what lies between is the cost of a step" in prediction.sentence(table)


def test_a_server_without_token_ids_has_no_prediction_and_no_nan_in_it() -> None:
    table = pd.DataFrame([dict.fromkeys(prediction.COLUMNS) | {"category": "a", "predicted": np.nan}])
    assert prediction.sentence(table).startswith("Nothing can be predicted")


ROWS = pd.DataFrame(
    {
        "variant": ["baseline"] * 4 + ["ngram", "baseline"],
        "concurrency": [1, 1, 1, 4, 1, 1],
        "temperature": [0.0, 0.0, 0.0, 0.0, 0.0, 0.7],
        "tpot_ms": [8.0, 7.5, 9.0, 99.0, 1.0, 70.0],
    }
)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Settings of a run whose engine was started here, on two CPU cores."""
    monkeypatch.setattr("labkit.prediction.launch.on_cpu", lambda: True)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1})
    return SimpleNamespace(server="")


def test_step_times_stand_beside_the_benchmarks_own_time_per_token(two_cores: SimpleNamespace) -> None:
    """t(1) is 10 ms; one greedy stream's requests took 7.5, 8 and 9 ms a token: 10 / 8 is 25% more."""
    told = prediction.care(two_cores, TIMES.assign(streams=1), ROWS)
    assert "On 2 CPU cores" in told
    assert "t(1) is 10.0 ms" in told
    assert "took 8.0 ms a token" in told
    assert told.endswith("surer than these 25%.")
    more = pd.concat([TIMES.assign(streams=16, step_ms=1.0), TIMES.assign(streams=1)])
    assert prediction.care(two_cores, more, ROWS) == told, "steps of other numbers of streams are not meant"
    assert prediction.care(two_cores, TIMES.assign(streams=1), ROWS.drop(columns="temperature").head(4)) == told


@pytest.mark.parametrize("rows", [ROWS[3:5], ROWS[:0], ROWS[:1].assign(tpot_ms=np.nan)])
def test_without_a_single_stream_it_says_no_number(two_cores: SimpleNamespace, rows: pd.DataFrame) -> None:
    told = prediction.care(two_cores, TIMES.assign(streams=1), rows)
    assert "On 2 CPU cores" in told
    assert "nan" not in told
    assert "surer" not in told


def test_it_is_silent_where_cores_are_many_or_not_the_engines(
    two_cores: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = TIMES.assign(streams=1)
    assert not prediction.care(two_cores, times[:0], ROWS)
    assert not prediction.care(SimpleNamespace(server="http://gpu:8000"), times, ROWS)
    monkeypatch.setattr("labkit.prediction.launch.on_cpu", lambda: False)
    assert not prediction.care(two_cores, times, ROWS)
    monkeypatch.setattr("labkit.prediction.launch.on_cpu", lambda: True)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(64)))
    assert not prediction.care(two_cores, times, ROWS)
