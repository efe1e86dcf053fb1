"""What notebook 03 says in words, against figures by hand."""

import pandas as pd
import pytest

from labkit import experts
from labkit.plots import experts as figures

BY_WINDOW = pd.DataFrame(
    {
        "n": [1, 4],
        "unique_mean": [4.0, 12.0],
        "low": [4.0, 11.5],
        "high": [4.0, 12.5],
        "uniform": [4.0, 14.0],
        "popularity": [4.0, 13.0],
        "reuse": [float("nan"), 0.8],  # (12 - 4) / (14 - 4)
    }
)


def row(method: str, budget: int, read: float, agreement: float) -> dict:
    names = ("saved", "perplexity_ratio", "perplexity_ratio_low", "perplexity_ratio_high")
    numbers = {"acceptance_length_target": 1 + 3 * agreement, "mass_dropped": 1 - agreement, "n": 4}
    return (
        dict.fromkeys(names, 1 - read / 12)
        | numbers
        | {
            "method": method,
            "budget": budget,
            "unique_budget": read,
            "greedy_agreement": agreement,
        }
    )


LIVE = pd.DataFrame(
    [
        row("none", 48, 12.0, 1.0),
        row("substitution", 6, 6.0, 0.7),
        row("substitution", 10, 9.0, 0.96),
        row("truncation", 6, 6.0, 0.6),
        row("truncation", 10, 9.6, 0.97),
    ]
)


def test_budgets_are_shares_of_what_independent_tokens_touch():
    """48 (1 - (44 / 48)^4) = 14.11: 0.4, 0.55, 0.7, 0.85 and all of it; never fewer than one token needs."""
    assert experts.budgets_to_try(48, 4, 4) == [6, 8, 10, 12, 14]
    assert experts.budgets_to_try(8, 4, 1) == [4]


def test_headline_has_the_figures_of_four_tokens():
    found = experts.headline(BY_WINDOW)
    assert found == {
        "unique_experts_n4": 12.0,
        "unique_experts_n4_low": 11.5,
        "unique_experts_n4_high": 12.5,
        "unique_experts_n4_uniform": 14.0,
        "unique_experts_n4_popularity": 13.0,
        "reuse_n4": 0.8,
    }


def test_sentences_tell_the_figures():
    text = experts.unique_sentence(BY_WINDOW, 4)
    for figure in (
        "4 consecutive",
        "**12.0**",
        "[11.5, 12.5]",
        "instead of 4 for one",
        "14.0",
        "13.0",
        "**0.80**",
    ):
        assert figure in text
    for band, where in (((0.5, 0.6, 0.7), "above"), ((0.7, 0.8, 0.9), "inside"), ((0.9, 0.95, 1.0), "below")):
        assert f"lies {where} that band" in experts.reuse_sentence("m", BY_WINDOW, {4: band}, 4)
    overlap = pd.DataFrame(
        {"distance": [1, 1, 16, 16], "layer": [1, 2, 1, 2], "overlap": [0.3, 0.5, 0.1, 0.3], "uniform": 0.08}
    )
    coverage = pd.DataFrame({"layer": [1, 2], "top": [6, 6], "coverage": [0.2, 0.3], "uniform": [0.125, 0.125]})
    told = experts.sharing_sentence(overlap, coverage)
    for figure in ("share 40%", "16 apart 20%", "8% would be chance", "The 6 most", "hold 25%"):
        assert figure in told


def test_budgets_beside_the_replay_and_the_frontier():
    offline = pd.DataFrame(
        {"method": ["substitution", "truncation"], "budget": [6, 6], "mass_dropped": [0.31, 0.32]}
    )
    found = experts.budgets_beside(LIVE, offline).set_index(["method", "budget"])
    assert found["pareto"].to_dict() == {
        ("none", 48): True,
        ("substitution", 6): True,
        ("substitution", 10): True,
        ("truncation", 6): False,  # reads as much as substitution and agrees less
        ("truncation", 10): True,
    }
    assert found["mass_dropped_offline"].dropna().to_dict() == {
        ("none", 48): 0.0,
        ("substitution", 6): 0.31,
        ("truncation", 6): 0.32,
    }


def test_the_budget_sentence_says_lossy_and_the_least_that_keeps_most():
    text = experts.budget_sentence(LIVE)
    assert "lossy" in text
    assert "under B = 6 a step of 4 tokens reads 50% fewer experts, and 30% of" in text
    assert "B = 10 (substitution), which saves 25%" in text
    assert "No budget tried keeps 99%" in experts.budget_sentence(LIVE, 0.99)


def test_categories_and_overlap_are_drawn_as_they_are():
    frame = BY_WINDOW[BY_WINDOW.n == 4].assign(category="prose")
    axes = figures.plot_categories(frame, model="m")
    assert axes.get_xlabel() == "different experts a layer, 4 consecutive tokens"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["prose"]
    overlap = pd.DataFrame(
        {"distance": [1, 2], "layer": 1, "overlap": [0.3, 0.2], "uniform": 0.08, "popularity": 0.1}
    )
    published = pd.DataFrame({"model": ["big"], "n": [4], "reuse": [0.6]})
    drawn = figures.plot_reuse(BY_WINDOW, published, trend={2: (0.5, 0.6, 0.7), 4: (0.4, 0.5, 0.6)}, model="m")
    labels = [text.get_text() for text in drawn.get_legend().get_texts()]
    assert labels == ["published, trend", "m", "published, big"]
    lines = {line.get_label(): line.get_ydata().tolist() for line in figures.plot_overlap(overlap).get_lines()}
    assert lines["mean over layers"] == pytest.approx([30, 20])
    assert lines["chance, equal use"] == pytest.approx([8, 8])
