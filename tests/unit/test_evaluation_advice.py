"""What notebook 05 says to do: the crossover and its figure, the rules with their answers, what comes next."""

from __future__ import annotations

import json
import math

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from labkit import evaluation, settings
from labkit.evaluation import advice
from labkit.evaluation.measuring import Measured
from labkit.evaluation.tables import word
from labkit.plots import evaluation as plots
from labkit.runs import headline as lines
from labkit.settings import Evaluation

GO, UNCLEAR, NO_GO = (1.2, 1.5, 1.8), (0.9, 1.1, 1.4), (0.5, 0.7, 0.9)
ATTACHED = {"server": "http://a:1", "variant_server": "http://b:1"}


def point(streams=1, interval=GO, over=None, predicted=math.nan, k=3, variant="eagle3"):
    """A row of evaluation.points."""
    found = {"variant": variant, "k": k, "streams": streams, "temperature": 0.0, "prompts": 8, "tok_s": 50.0}
    for name, ends in (("speedup", interval), ("over_ngram", over or [math.nan] * 3)):
        found |= {f"{name}_low": ends[0], name: ends[1], f"{name}_high": ends[2]}
    found |= {"predicted": predicted, "predicted_low": predicted - 0.2, "predicted_high": predicted + 0.2}
    return found | {"acceptance_length": 2.0, "throughput_tok_s": 45.0, "verdict": word(found)}


def table(**by_streams):
    return pd.DataFrame([point(int(name[1:]), interval) for name, interval in by_streams.items()])


def measured(prompts=2, wrong=0):
    rows = [{"category": name, "prompt_id": f"{name}{i}"} for name in ("code", "story") for i in range(prompts)]
    compared = {"identical": [True] * 4 + [False] * wrong, "near_tie": pd.array([None] * (4 + wrong), "boolean")}
    return Measured(pd.DataFrame(rows), {}, pd.DataFrame(), pd.DataFrame(compared), 3, "by hand")


@pytest.mark.parametrize(
    ("streams", "low", "mid", "said"),
    [
        ({"s1": GO}, None, None, "1 request in flight at k=3: **go**"),
        ({"s1": UNCLEAR}, None, None, "1 request in flight at k=3: **unclear**"),
        ({"s4": NO_GO}, None, None, "4 requests in flight at k=3: **no-go**"),
        (
            {"s1": UNCLEAR, "s4": NO_GO},
            None,
            4,
            "no number of streams measured is a go** (unclear at 1, no-go at 4)",
        ),
        ({"s1": NO_GO, "s4": NO_GO}, None, None, "so there is no crossover"),
        ({"s1": UNCLEAR, "s4": UNCLEAR}, None, math.inf, "falls below 1 not up to 4 streams"),
        ({"s1": UNCLEAR, "s2": GO, "s4": UNCLEAR}, 4, math.inf, "reaches 1 **from 4 streams on**"),
        ({"s1": GO, "s4": NO_GO}, 4, 4, "its whole interval (no-go) from 4 streams on"),
        ({"s1": GO, "s4": GO}, math.inf, math.inf, "up to 4: **go**"),
    ],
)
def test_a_crossover_takes_a_point_that_pays_before_one_that_does_not(streams, low, mid, said):
    found = evaluation.crossover(table(**streams), 3)
    told = [None if math.isnan(found[name]) else found[name] for name in ("low", "mid")]
    assert told == [low, mid]
    assert said in evaluation.crossover_sentence(table(**streams), 3)
    ax = plots.plot_by_streams(evaluation.greedy(table(**streams), 3), found["low"])
    marked = [name for name in ax.get_legend_handles_labels()[1] if "no longer a go" in name]
    assert marked == ([f"no longer a go from {low} streams on"] if low in (2, 4) else [])
    plt.close("all")


def test_a_crossover_that_cannot_be_told_is_null_in_the_runs_record():
    categories = pd.DataFrame([point() | {"category": "code"}])
    for streams, wanted in (({"s1": UNCLEAR}, None), ({"s1": GO, "s4": GO}, None), ({"s1": GO, "s4": NO_GO}, 4)):
        told = evaluation.sweep_headline(measured(), table(**streams), categories, Evaluation())
        assert json.loads(json.dumps(told))["crossover_streams_low"] == wanted


@pytest.mark.parametrize("streams", [[1], [4], [1, 4, 16]])
def test_every_marker_stands_at_its_own_number_of_streams_on_an_axis_of_just_those(streams):
    points = pd.DataFrame([point(n, GO, predicted=1.3) for n in streams])
    ngram = pd.DataFrame([point(streams[0], UNCLEAR, k=5, variant="ngram")])
    ax = plots.plot_by_streams(points, math.nan, ngram=ngram)
    at = {each.get_label(): list(each.lines[0].get_xdata()) for each in ax.containers}
    assert at["measured, 95% interval"] == at["predicted by the cost model"] == streams
    assert at["n-gram, measured"] == streams[:1]
    low, high = ax.get_xlim()
    assert streams[0] / 2 < low < streams[0]
    assert streams[-1] < high < streams[-1] * 2
    assert [int(tick) for tick in ax.get_xticks()] == streams
    plt.close("all")


def test_a_measured_speedup_without_an_interval_is_not_called_unmeasured():
    nothing = math.nan
    assert word(point(interval=(nothing, 4.4, nothing))) == "too few prompts"
    assert word(point(interval=(nothing,) * 3)) == "not measured"


def test_more_prompts_are_as_many_as_bring_the_interval_off_one():
    """Twice the distance in logarithms takes four times the prompts: 1.2 to 1/1.2 is twice 1.2 to 1."""
    row = point(interval=(1 / 1.19, 1.2, 3.0))
    assert advice.factor_needed(row) == pytest.approx((math.log(1.2 * 1.19) / math.log(1.2)) ** 2)
    assert advice.factor_needed(point(interval=(1 / 1.2, 1.2, 3.0))) == pytest.approx(4)
    said = advice.advice(row, measured(prompts=2), Evaluation())
    assert said.startswith("**Next** (unclear at k=3, 1 in flight): more prompts")
    assert "`-p prompts_per_category=8` (about 8 a category" in said
    assert advice.factor_needed(point(interval=(0.4, 1 / 1.2, 1.2))) == pytest.approx(4)
    few = advice.advice(row, measured(prompts=5), Evaluation(repeats=2))  # the benchmark has 10 of each category
    assert "`-p prompts_per_category=10` (about 20" in few
    assert "and `-p repeats=4`." in few
    assert "all prompts were sent (10 a category), so `-p repeats=4`" in advice.advice(
        row, measured(prompts=10), Evaluation(repeats=2)
    )
    for middle in (1.0, 1.01):
        assert "neither faster nor slower" in advice.advice(
            point(interval=(0.7, middle, 1.4)), measured(), Evaluation()
        )


@pytest.mark.parametrize(
    ("row", "given", "said", "unsaid"),
    [
        (point(over=GO), {}, "serve the head with `num_speculative_tokens` 3", "acceptance length"),
        (point(over=GO), {"sweep_streams": "1,4"}, "the crossover above decides", "sweep_streams"),
        (point(over=GO), ATTACHED, "`-p sweep_streams=1,4,16`", "n-gram"),
        (point(over=UNCLEAR), {}, "serve n-gram, which does as well here", "serve the head"),
        (point(over=NO_GO), {}, "serve n-gram, which does as well here", "serve the head"),
        (point(), ATTACHED, "beats n-gram is **not measured**", "does as well"),
        (point(interval=NO_GO), {}, "serve without speculation", "prompts_per_category"),
        (point(interval=UNCLEAR), {}, "`-p prompts_per_category=", "acceptance length"),
        (
            point(interval=(math.nan, 2.0, math.nan)),
            {},
            "`-p prompts_per_category=3`, or more in your file: below 3",
            "serve the",
        ),
        ({}, ATTACHED, "`-p variant_server=...`", "n-gram"),
    ],
)
def test_what_comes_next_follows_the_rule_that_holds(row, given, said, unsaid):
    found = advice.advice(row, measured(), Evaluation(**({"scale": "smoke"} | given)))
    assert said in found
    assert unsaid not in found


def test_outputs_that_differ_come_before_all_else():
    found = advice.advice(point(over=GO), measured(wrong=1), Evaluation())
    assert "do not serve this head" in found
    assert "1 of 5 outputs | **yes: no-go**" in evaluation.rules(point(), measured(wrong=1), Evaluation())


@pytest.mark.parametrize(
    ("row", "given", "answers"),
    [
        (point(over=GO), {}, ["no", "**yes: go**", "no", "no", "no"]),
        (
            point(interval=UNCLEAR, over=NO_GO),
            {},
            ["no", "no", "**yes: unclear**", "no", "**yes: n-gram does as well**"],
        ),
        (
            point(interval=NO_GO),
            ATTACHED,
            ["no", "no", "no", "**yes: no-go**", f"not measured: {advice.ATTACHED}"],
        ),
        (point(interval=(math.nan, 2.0, math.nan), over=GO), {}, ["no", *["too few prompts"] * 3, "no"]),
        ({}, ATTACHED, ["no", *["not measured"] * 3, f"not measured: {advice.ATTACHED}"]),
    ],
)
def test_every_rule_of_the_first_cell_is_answered(row, given, answers):
    told = evaluation.rules(row, measured(), Evaluation(**given)).splitlines()
    assert [line.split(" | ")[-1].removesuffix(" |") for line in told[2:]] == answers
    notebook = json.loads((settings.root() / "notebooks" / "05_evaluation.ipynb").read_text())
    first = "".join(notebook["cells"][0]["source"]).splitlines()
    rules = [line.split(" | ")[0] for line in first if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in told if line.startswith("| ")] == rules


def test_tables_show_what_matters_in_few_columns():
    points = pd.DataFrame([point(over=GO, predicted=1.3), point(variant="baseline", k=0, over=NO_GO)])
    found = evaluation.shown(points.assign(side_by_side=1.0, ttft_ms=5.0))
    assert found.loc[0, ["speedup", "over n-gram", "predicted"]].str.replace("\u00a0", " ").tolist() == [
        "1.50× [1.20, 1.80]",
        "1.50× [1.20, 1.80]",
        "1.30× [1.10, 1.50]",
    ]
    assert found.loc[1, "over n-gram"] == "–", "of the baseline it is n-gram's own speedup, upside down"
    assert {"side_by_side", "ttft_ms", "speedup_low", "tok/s of all", "temperature"}.isdisjoint(found)
    assert list(found)[: list(found).index("verdict")] == ["variant", "k", "streams", "prompts", "speedup"]
    several = evaluation.shown(pd.DataFrame([point(4), point(1) | {"temperature": 0.7}]))
    assert {"tok/s of all", "temperature"} <= set(several)
    alone = evaluation.shown(pd.DataFrame([point(interval=(math.nan, 4.4, math.nan))]))
    assert alone.loc[0, ["speedup", "verdict"]].tolist() == ["4.40×", "too few prompts"]
    assert "predicted" not in alone


def test_notes_of_the_headline_leave_out_what_is_not_there():
    assert lines.acceptance_note({}) == "benchmark prompts"
    assert lines.acceptance_note({"eagle3_acceptance_length_held_out": 2.0}) == (
        "benchmark prompts; of the training kind: 2.00"
    )
    notes = {row.what: row.note for row in lines.rows({"05_evaluation": {"eagle3_speedup_held_out": 1.5}})}
    assert notes["EAGLE-3 speedup"] == "benchmark prompts; held-out prompts: 1.50×"
