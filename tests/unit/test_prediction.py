"""Predicted n-gram speedups against arithmetic by hand."""

from __future__ import annotations

import re
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


def rows_of(category: str, prompt: list[int], output: list[int], name: str = "p") -> pd.DataFrame:
    ids = {"prompt_token_ids": [prompt], "output_token_ids": [output]}
    return pd.DataFrame({"prompt_id": [f"{category}-{name}"], "category": [category]} | ids)


def measured_of(scope: str = "all", **values: float) -> pd.DataFrame:
    """A row of bench.speedup; what is not given is NaN."""
    names = ["speedup", "speedup_low", "speedup_high", "total_ratio"]
    return pd.DataFrame([{"category": scope, "prompts": 3} | dict.fromkeys(names, np.nan) | values])


def beside_of(*lines: dict) -> pd.DataFrame:
    """prediction.beside with these values, the first over all prompts; what is not given is NaN or None."""
    empty = dict.fromkeys(prediction.COLUMNS, np.nan) | {"right": None, "explained_right": None}
    return pd.DataFrame([empty | line for line in lines])


LOOKUP = {"k": 3, "lookup_max": 2, "lookup_min": 1}


def test_beside_the_measurement_by_category(tmp_path: Path) -> None:
    """A copy of the prompt is drafted and accepted; new tokens draft nothing and predict 1."""
    copied, fresh = list(range(1, 21)), list(range(100, 110))
    rows = pd.concat([rows_of("copy", copied, copied), rows_of("fresh", list(range(50, 60)), fresh)])
    found = {"copy": (1.0, 0.9, 1.1), "fresh": (0.95, 0.9, 1.02), "lone": (1.0, np.nan, np.nan)}
    names = ("speedup", "speedup_low", "speedup_high")
    by = pd.concat(
        measured_of(name, total_ratio=values[0], **dict(zip(names, values, strict=True)))
        for name, values in found.items()
    )
    rows = pd.concat([rows, rows_of("lone", list(range(50, 60)), fresh)])
    table = prediction.beside(rows, TIMES, measured_of(speedup=1.0, total_ratio=1.0), by, **LOOKUP)
    assert table["category"].tolist() == ["all prompts", "copy", "fresh", "lone"]
    line = table.set_index("category")
    # the prompt gives the first token; then 3 drafted and accepted and the bonus: 19 tokens in 5 drafting steps
    assert line.loc["copy", "tokens_per_step"] == pytest.approx(19 / 5)
    assert line.loc["copy", "predicted"] > 2
    assert not line.loc["copy", "right"]
    assert line.loc["copy", "step_overhead"] == pytest.approx(line.loc["copy", "predicted"])
    assert line.loc["fresh", "predicted"] == pytest.approx(1.0)
    assert line.loc["fresh", "right"]
    assert line.loc["lone", "right"] is None, "hit exactly, but nobody knows how sure the measurement is"
    assert np.isnan(line.loc["copy", "predicted_low"]), "one prompt has no interval"
    files.write_parquet(tmp_path / "prediction.parquet", table)  # as the notebook saves it
    text = prediction.sentence(table)
    assert "1 of the 2 categories that have an interval" in text
    assert "It missed copy" in text


def test_without_a_measurement_nothing_is_judged() -> None:
    rows = rows_of("copy", [1, 2, 3], [1, 2, 3])
    none = pd.DataFrame(columns=["category", "speedup", "speedup_low", "speedup_high", "total_ratio"])
    table = prediction.beside(rows, TIMES, measured_of(), none, **LOOKUP)
    assert table["right"].isna().all()
    assert "nothing measured" in prediction.sentence(table)


def test_the_prediction_over_all_is_the_median_of_prompts_with_their_interval() -> None:
    """Four prompts that copy, three that do not: each alone predicts 2.5x (19 tokens, 5 steps) or 1x."""
    copied, fresh = list(range(1, 21)), list(range(100, 110))
    rows = pd.concat(
        [rows_of("copy", copied, copied, str(i)) for i in range(4)]
        + [rows_of("fresh", list(range(50, 60)), fresh, str(i)) for i in range(3)]
    )
    each = prediction.by_prompt(rows, TIMES, **LOOKUP).set_index("prompt_id")["predicted"]
    alone = [
        prediction.speedup(ngram.simulate_rows(rows[rows["prompt_id"] == name], **LOOKUP), TIMES)[1]
        for name in each.index
    ]
    assert each.tolist() == pytest.approx(alone)
    line = prediction.overall(rows, TIMES, measured_of(), **LOOKUP).iloc[0]
    copies = each.loc["copy-0"]
    assert line["prompts"] == 7
    assert line["predicted"] == pytest.approx(copies)
    # of 7 draws from 4 copies and 3 others the median is another with p = 0.345 > 0.025: the interval has both
    assert (line["predicted_low"], line["predicted_high"]) == pytest.approx((1.0, copies))
    again = pd.concat([rows, rows[rows["prompt_id"] == "copy-0"]])  # a repeat is no further prompt
    assert prediction.overall(again, TIMES, measured_of(), **LOOKUP).iloc[0]["prompts"] == 7


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
    """On maths a step yields 1.1 tokens at 0.88x, so it costs 1.25 plain ones; on extraction 3 at 2x, so 1.5.

    The medians over prompts are others: tokens a step pools all tokens, and so does the ratio it is set against.
    """
    maths = {"category": "maths", "prompts": 9, "tokens_per_step": 1.1, "measured": 1.4, "measured_total": 0.88}
    copies = {"category": "extraction", "prompts": 9, "tokens_per_step": 3.0, "measured": 9.0, "measured_total": 2}
    table = beside_of({}, maths | {"predicted_total": 0.9}, copies | {"predicted_total": 2.1})
    text = prediction.reasons(table, 1.2)
    assert (
        "n-gram is 12% slower on maths because a step there yields 1.10 tokens and costs 1.25 plain ones" in text
    )
    assert "100% faster on extraction because a step there yields 3.00 tokens and costs 1.50 plain ones" in text
    assert "1.20 of that is scheduling" in text
    told = prediction.reasons(table.assign(measured=np.nan), 1.0)
    assert "n-gram should be 10% slower on maths" in told
    assert "scheduling" not in told


@pytest.mark.parametrize(
    ("total", "says"),
    [
        (2.73, "steps of 0.58 plain ones, and none is cheaper than a plain one. The machine was busier"),
        (1.62, "costs about one plain one (0.98; what is below 1 is noise)"),
        (1.58, "costs 1.00 plain ones"),
    ],
)
def test_a_step_cheaper_than_a_plain_one_is_not_explained(total: float, says: str) -> None:
    """1.58 tokens a step at 2.73x would be steps of 0.58: no draft makes a step cheaper."""
    line = {"category": "dialogue", "prompts": 2, "tokens_per_step": 1.58, "measured": 2.73}
    text = prediction.reasons(beside_of({}, line | {"measured_total": total}), 1.0)
    assert says in text
    assert "on dialogue (from two prompts)" in text
    assert ("because" in text) == (total < 2)


@pytest.mark.parametrize("total", [1.0, 1.3])
def test_tokens_a_step_over_the_told_ratio_is_the_told_cost(total: float) -> None:
    """Of whole benchmark rows: every reason's three numbers fit each other, whatever single prompts did."""
    copied, fresh = list(range(1, 21)), list(range(100, 110))
    rows = pd.concat(
        [rows_of("a", copied, copied, "1"), rows_of("a", [50], fresh, "2"), rows_of("b", copied, copied, "1")]
    )
    by = pd.concat([measured_of(name, speedup=7.7, total_ratio=total) for name in "ab"])
    table = prediction.beside(rows, TIMES, measured_of(speedup=7.7, total_ratio=total), by, **LOOKUP)
    text = prediction.reasons(table, 1.0)
    told = re.findall(r"yields ([\d.]+) tokens and costs ([\d.]+) plain", text)
    assert len(told) == 2
    for tokens, cost in told:
        assert float(tokens) / float(cost) == pytest.approx(total, rel=0.01)


def test_a_table_that_is_shown_has_no_nan_and_no_empty_column() -> None:
    """Also where an empty frame was put below it, which makes its numbers objects."""
    table = pd.concat([pd.DataFrame({"a": [1.23456, 2.0], "b": [np.nan, 3.456], "c": np.nan}), TIMES[:0]])
    found = prediction.shown(table)
    assert list(found) == ["a", "b"]
    assert found.to_numpy().tolist() == [[1.23, ""], [2.0, 3.46]]
    objects = prediction.shown(pd.DataFrame({"a": [1.23456]}, dtype=object))
    assert objects.to_numpy().tolist() == [[1.23]]


def test_missing_and_disordered_step_times_are_said() -> None:
    told = "t(3) could not be timed** (tokens came in bunches): the nearest ones stand in"
    assert told in prediction.doubts(TIMES, 4)
    whole = pd.DataFrame({"n": [1, 2, 3, 4], "step_ms": [10.0, 11.0, 12.0, 13.0]})
    told = "t(5), t(6) could not be timed** (tokens came in bunches): t(4) stands in"
    assert told in prediction.doubts(whole, 6)
    whole = pd.DataFrame({"n": [1, 2, 3], "step_ms": [10.0, 14.0, 13.5]})
    assert not prediction.doubts(whole, 3)
    busy = prediction.doubts(whole.assign(step_ms=[10.0, 14.0, 10.5]), 3)
    assert "t(2) is 14.0 ms, t(3) 10.5 ms. The machine was not quiet" in busy
    assert not prediction.doubts(TIMES[:0], 3)


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
    values = {"speedup": 1.0, "speedup_low": 0.95, "speedup_high": 1.05, "total_ratio": 1.0}
    own = pd.DataFrame(
        {"n": [4.0], "step_ms": [38.0], "low_ms": [38.0], "high_ms": [38.0], "tokens_are": ["drafted"]}
    )
    rows, measured = rows_of("copy", copied, copied), measured_of("copy", **values)
    table = prediction.beside(rows, TIMES, measured, measured, **LOOKUP, own=own)
    line = table.iloc[1]
    assert line["predicted"] == pytest.approx(19 * 10 / (5 * 16), rel=0.02)
    assert not line["right"]
    assert line["explained"] == pytest.approx(1.0)
    assert line["explained_right"]
    text = prediction.sentence(table)
    assert "not within 10% or inside the interval" in text
    assert "is right in 2 of the 2 that were missed: there the cost of a step was misjudged" in text


def test_a_server_without_token_ids_has_no_prediction_and_no_nan_in_it() -> None:
    assert prediction.sentence(beside_of({"category": "a"}, {})).startswith("Nothing can be predicted")


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
    monkeypatch.setattr("labkit.engine.launch.on_cpu", lambda: True)
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
    monkeypatch.setattr("labkit.engine.launch.on_cpu", lambda: False)
    assert not prediction.care(two_cores, times, ROWS)
    monkeypatch.setattr("labkit.engine.launch.on_cpu", lambda: True)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(64)))
    assert not prediction.care(two_cores, times, ROWS)
