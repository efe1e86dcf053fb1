"""The first sentence of a page: what was measured, or else predicted, and never more than that."""

import pytest

from labkit.runs.verdict import sentences


def figures(prefix, low, middle, high):
    """A speedup with its interval, as headlines hold it."""
    return {f"{prefix}{end}": value for end, value in (("_low", low), ("", middle), ("_high", high))}


@pytest.mark.parametrize(
    ("low", "middle", "high", "word"),
    [
        (1.09, 1.39, 1.79, "is faster: 1.39× [1.09, 1.79] as fast"),
        (0.2, 0.5, 0.9, "is slower: 0.50× [0.20, 0.90] as fast"),
        (0.9, 1.2, 1.5, "is neither clearly faster nor slower: 1.20× [0.90, 1.50]"),
        (1.0, 1.2, 1.5, "is neither clearly faster nor slower"),
        (None, 1.2, None, "is measured without an interval: 1.20× as fast"),
    ],
)
def test_a_measured_ngram_is_judged_by_its_whole_interval(low, middle, high, word):
    (said,) = sentences({"02_ngram_baseline": figures("ngram_speedup", low, middle, high)})
    assert f"N-gram speculation {word}" in said


def test_a_disturbed_measurement_says_so():
    headline = figures("ngram_speedup", 1.5, 1.9, 4) | {"ngram_quiet": False}
    assert sentences({"02_ngram_baseline": headline})[0].endswith("The machine was not quiet: measure again.")


def test_what_was_only_predicted_is_called_that():
    headline = figures("ngram_speedup_predicted", 1.1, 1.3, 1.5) | {"ngram_speedup": None}
    (said,) = sentences({"02_ngram_baseline": headline | {"ngram_worth_trying": "yes"}})
    assert "was not measured; predicted is 1.30× [1.10, 1.50]" in said
    assert said.endswith("; worth trying: yes.")


def test_a_head_comes_first_and_predictions_only_where_nothing_was_measured():
    head = figures("eagle3_speedup", 0.96, 1.74, 4.16) | {"verdict": "unclear", "eagle3_acceptance_length": 2.35}
    outlook = figures("predicted_speedup", 0.8, 1.2, 1.6) | {
        "predicted_verdict": "unclear", "predicted_with": "a head", "served": "kimi on h200"
    }  # fmt: skip
    found = {"02_ngram_baseline": figures("ngram_speedup", 1.1, 1.4, 1.8), "03_expert_activation": outlook}
    assert [text.split()[0] for text in sentences(found | {"05_evaluation": head})] == ["Unclear:", "N-gram"]
    said = sentences({"05_evaluation": head})
    assert said == ["Unclear: the EAGLE-3 head decodes 1.74× [0.96, 4.16] as fast as the target alone, "
                    "with 2.35 tokens a step."]  # fmt: skip
    assert sentences({"03_expert_activation": outlook}) == [
        "Predicted for kimi on h200: unclear; a head, 1.20× [0.80, 1.60] as fast."
    ]


@pytest.mark.parametrize("name", ["02_ngram_baseline", "03_expert_activation", "05_evaluation", "01_profiling"])
@pytest.mark.parametrize("value", [None, "x", [], True])
def test_without_figures_nothing_is_said(name, value):
    names = ("verdict", "eagle3_speedup", "ngram_speedup", "ngram_speedup_predicted", "predicted_verdict")
    headline = dict.fromkeys(names, value) | {"predicted_speedup": None} if value is not True else {}
    assert sentences({name: headline}) == []
