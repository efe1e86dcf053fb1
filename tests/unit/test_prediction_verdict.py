"""The answer of notebook 02 in words and figures: measured, predicted, or neither."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from labkit import acceptance, ngram, prediction
from labkit.bench import rows as bench_rows
from labkit.runs import headline

COUNTED = {"drafts": 4, "drafted": 8, "accepted": 6, "accepted_at": [4, 2], "chunks": 7, "tokens_total": 13}
FOUND = {ngram.ENGINE: acceptance.from_rows(bench_rows.frame([COUNTED]))}  # 12 tokens in 6 steps, 2 a step


def line_of(**values: float) -> pd.DataFrame:
    """prediction.beside of its first row alone; what is not given is NaN."""
    return pd.DataFrame([dict.fromkeys(prediction.COLUMNS, np.nan) | {"category": "all prompts"} | values])


def measured(ratio: float, low: float, high: float, total: float = 1.2) -> pd.DataFrame:
    return line_of(measured=ratio, measured_low=low, measured_high=high, measured_total=total, prompts=7)


def predicted(ratio: float, low: float, high: float, cost: float = 1.1) -> pd.DataFrame:
    return line_of(predicted=ratio, predicted_low=low, predicted_high=high, step_cost=cost, prompts=7)


@pytest.mark.parametrize(
    ("ratio", "low", "high", "word"),
    [
        (1.2, 1.1, 1.3, "is faster"),
        (0.8, 0.7, 0.9, "is slower"),
        (1.0, 0.9, 1.1, "neither"),
        (1.2, *2 * [math.nan], "too few prompts for an interval"),
    ],
)
def test_the_conclusion_says_what_the_interval_says(ratio: float, low: float, high: float, word: str) -> None:
    text = prediction.conclusion(measured(ratio, low, high), FOUND)
    bold = text.split("**")[1]
    assert text.startswith("**")
    assert word in bold
    assert f"{ratio:.2f}×" in bold
    assert "1.67 times as long" in text  # 2 tokens a step at 1.2 times the rate
    assert "nan" not in text


def test_a_speedup_that_no_draft_can_give_is_called_load() -> None:
    """2 tokens a step at 2.5 times the rate: each step would take 0.8 plain ones."""
    text = prediction.conclusion(measured(2.5, 2.0, 3.0, total=2.5), FOUND)
    assert text.startswith("**n-gram looks faster, but the machine was not quiet: 2.50×")
    assert "0.80 times as long" in text
    assert "At equal step times 2.00× is the most" in text
    assert "--force" in text
    noise = prediction.conclusion(measured(2.05, 2.0, 3.0, total=2.05), FOUND)
    assert noise.startswith("**n-gram is faster")
    assert "(0.98; below 1 is noise)" in noise


@pytest.mark.parametrize(
    ("low", "high", "cost", "word"),
    [
        (1.05, 2.0, 1.1, "yes"),
        (0.8, 0.97, 1.1, "no"),
        (0.9, 1.5, 1.1, "unclear"),
        (math.nan, math.nan, 1.1, "unclear"),
        (1.05, 2.0, 0.8, "unclear"),
    ],
)
def test_a_prediction_is_a_verdict_in_words(low: float, high: float, cost: float, word: str) -> None:
    table = predicted(1.3, low, high, cost)
    assert prediction.worth(table.iloc[0]) == word
    text = prediction.conclusion(table, {ngram.PREDICTED: FOUND[ngram.ENGINE]})
    assert text.startswith(f"**Is n-gram worth trying? {word.capitalize()}: 1.30× is predicted, nothing measured")
    assert ("would be cheaper than a plain one" in text) == (cost < 1)
    assert ("`prompts_per_category`" in text) == (word == "unclear" and cost > 1)
    assert "nan" not in text


def test_a_measured_speedup_needs_no_acceptance_to_be_told() -> None:
    """A server that is no vLLM: its rates are measured, what a step yields is not known."""
    text = prediction.conclusion(measured(1.5, 1.5, 1.5, 1.5), {})
    assert text.startswith("**n-gram is faster: 1.50")
    assert "not known" in text
    assert "nan" not in text
    unmeasured = prediction.conclusion(line_of(prompts=0), {})
    assert unmeasured.startswith("**Neither")
    assert "nan" not in unmeasured


BASE = pd.Series({"tok_s": 33.7, "ttft_ms": 60.0, "tpot_ms": 29.0})


def figures(table: pd.DataFrame, found: dict) -> dict[str, str]:
    """What a terminal shows of the headline: value and note by name."""
    made = prediction.headline(BASE, (31.9, 35.2), table, found)
    plain = {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in made.items()}
    return {row.what: f"{row.value} {row.note}" for row in headline.rows({"02_ngram_baseline": plain})}


def test_the_headline_has_the_prediction_as_a_figure_of_its_own() -> None:
    told = figures(predicted(1.3, 1.05, 2.0), {ngram.PREDICTED: FOUND[ngram.ENGINE]})
    assert told["baseline"].startswith("33.7 tok/s [31.9, 35.2]")
    assert told["n-gram speedup"].startswith("– not measured")
    assert told["n-gram speedup, predicted"].startswith("1.30× [1.05, 2.00] worth trying: yes")


def test_the_headline_says_that_a_machine_was_not_quiet() -> None:
    told = figures(measured(2.5, 2.0, 3.0, total=2.5), FOUND)
    assert told["n-gram speedup"].startswith("2.50× [2.00, 3.00] machine not quiet")
    assert "0.80 plain ones" in told["n-gram speedup"]
    quiet = figures(measured(1.2, 1.1, 1.3), FOUND)
    assert quiet["n-gram speedup"].startswith("1.20× [1.10, 1.30] median over paired prompts")
    unknown = figures(measured(1.2, 1.1, 1.3), {})  # without counts nobody knows what a step costs
    assert unknown["n-gram speedup"].startswith("1.20× [1.10, 1.30] median over paired prompts")


def test_one_server_has_no_other_to_take_turns_with() -> None:
    settings = SimpleNamespace(concurrency=1, max_tokens=24, server="a", variant_server="")
    assert "one after the other" not in prediction.limits(settings, 7, predicted(1.3, 1.1, 1.5))
    assert "one after the other" in prediction.limits(settings, 7, measured(1.3, 1.1, 1.5))
    settings.variant_server = "b"
    assert "the servers by turns" in prediction.limits(settings, 7, measured(1.3, 1.1, 1.5))
