"""Agreement of two servers' outputs: where they differ first, and what counts as a near-tie."""

import pandas as pd
import pytest

from labkit import agreement


def rows(**outputs: list[int] | None) -> pd.DataFrame:
    """Benchmark rows, one request a variant."""
    return pd.DataFrame(
        {
            "variant": name,
            "prompt_id": "p",
            "category": "c",
            "repeat": 0,
            "error": None,
            "prompt_token_ids": [9, 8],
            "output_token_ids": ids,
        }
        for name, ids in outputs.items()
    )


@pytest.mark.parametrize(
    ("one", "other", "position"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 5, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([], [], None),
        ([], [1], 0),
    ],
)
def test_first_difference(one, other, position):
    assert agreement.first_difference(one, other) == position
    (row,) = agreement.compare(rows(a=one, b=other), "a", "b").to_dict("records")
    assert row["identical"] == (position is None)
    if position is not None:
        assert row["prefix_ids"] == one[:position] == other[:position]


def test_first_repeats_are_compared():
    table = pd.concat([rows(a=[1, 2], b=[1, 2]), rows(a=[7, 7], b=[6, 6]).assign(repeat=1)])
    assert agreement.compare(table, "a", "b")["identical"].tolist() == [True]


def test_failed_requests_and_missing_ids_are_no_outputs():
    with pytest.raises(agreement.NoTokenIds):
        agreement.compare(rows(a=[1], b=None), "a", "b")
    with pytest.raises(agreement.NoTokenIds):
        agreement.compare(rows(a=[1], b=[1]).assign(error="HTTP 500"), "a", "b")


@pytest.mark.parametrize(
    ("logprobs", "gap", "near"),
    [
        ({5: -1.0, 6: -1.1}, 0.1, True),
        ({5: -1.0, 6: -1.25}, 0.25, True),
        ({5: -1.0, 6: -1.2500000596}, 0.25, True),  # two bf16 steps of logits, as log-probabilities come back
        ({5: -1.0, 6: -1.2520000}, 0.252, False),
        ({5: -1.0, 6: -1.6}, 0.6, False),
        ({5: -1.0, 7: -1.1}, float("inf"), False),  # the variant's token is not among the likeliest
        ({7: -0.5, 5: -1.0, 6: -1.05}, 0.55, False),  # both are far below the best
    ],
)
def test_gap_comes_from_the_baseline_server(monkeypatch, logprobs, gap, near):
    asked = []
    monkeypatch.setattr(agreement, "next_logprobs", lambda server, context: asked.append(context) or logprobs)
    judged = agreement.judge(agreement.compare(rows(a=[1, 5], b=[1, 6]), "a", "b"), server=None)
    assert asked == [[9, 8, 1]]
    assert judged["gap_nats"].iloc[0] == pytest.approx(gap)
    assert judged["near_tie"].iloc[0] == near
    assert len(agreement.unexplained(judged)) == (not near)


def test_identical_outputs_need_no_server():
    judged = agreement.judge(agreement.compare(rows(a=[1, 5], b=[1, 5]), "a", "b"), server=None)
    assert agreement.share_identical(judged) == 1.0
    assert agreement.unexplained(judged).empty
