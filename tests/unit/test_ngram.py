"""Prompt-lookup simulation against a second, naive implementation of the same rules."""

from __future__ import annotations

import math

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import ngram
from labkit.bench import rows as bench_rows


def naive_proposal(context: list[int], k: int, longest: int, shortest: int) -> list[int]:
    """Search the context from its start for its own last n tokens, the longest n first."""
    for n in range(longest, shortest - 1, -1):
        if n >= len(context):
            continue
        for start in range(len(context) - n):
            if context[start : start + n] == context[-n:]:
                return context[start + n : start + n + k]
    return []


def naive_steps(
    prompt: list[int], output: list[int], k: int, longest: int, shortest: int
) -> list[tuple[int, int]]:
    """(drafted, accepted) of every step, generating token by token as the target would."""
    context, rest, steps = prompt + output[:1], output[1:], []
    while rest:
        draft = naive_proposal(context, k, longest, shortest)
        taken = 0
        for token in draft:
            if taken == len(rest) or token != rest[taken]:
                break
            taken += 1
        steps.append((len(draft), taken))
        context, rest = context + rest[: taken + 1], rest[taken + 1 :]
    return steps


tokens = st.lists(st.integers(0, 3), max_size=40)  # a tiny vocabulary repeats itself all the time


@settings(max_examples=300, deadline=None)
@given(tokens, tokens, st.integers(1, 6), st.integers(1, 5), st.integers(1, 5))
def test_equal_to_the_naive_walk(prompt: list[int], output: list[int], k: int, a: int, b: int) -> None:
    longest, shortest = max(a, b), min(a, b)
    steps = naive_steps(prompt, output, k, longest, shortest)
    found = ngram.simulate(prompt, output, k=k, lookup_max=longest, lookup_min=shortest)
    assert found.steps == len(steps)
    assert found.tokens == max(len(output) - 1, 0)
    assert found.drafts == sum(d > 0 for d, _ in steps)
    assert found.drafted == sum(d for d, _ in steps)
    assert found.accepted_at == tuple(sum(taken > i for _, taken in steps) for i in range(k))
    assert found.eligible_at == tuple(sum(d > i and taken >= i for d, taken in steps) for i in range(k))


def test_by_hand() -> None:
    # After 1 2 3 | 1 the last token also stands first: propose 2 3; both come, 9 is the bonus.
    found = ngram.simulate([1, 2, 3], [1, 2, 3, 9], k=2, lookup_max=2, lookup_min=1)
    assert (found.drafts, found.drafted, found.accepted_at, found.steps) == (1, 2, (1, 1), 1)
    assert found.mean_length == 3.0


def test_the_earliest_occurrence_wins() -> None:
    # 7 is followed by 1 first and by 2 later: vLLM proposes the earlier continuation.
    found = ngram.simulate([7, 1, 7, 2], [7, 1, 5], k=1, lookup_max=1, lookup_min=1)
    assert found.accepted == 1


def test_the_longest_match_wins() -> None:
    # The last token alone occurs first before 1; the last two tokens occur before 2.
    prompt = [7, 1, 8, 7, 2]
    assert ngram.simulate(prompt, [8, 7, 2, 0], k=1, lookup_max=2, lookup_min=1).accepted_at == (1,)
    assert ngram.simulate([*prompt, 8], [7, 1, 0], k=1, lookup_max=1, lookup_min=1).accepted_at == (1,)


def test_a_high_minimum_proposes_nothing_on_short_repeats() -> None:
    """BACKGROUND.md's configuration: 4-grams only."""
    prompt, output = [1, 2, 3, 9, 8], [1, 2, 3, 5, 1, 2, 3]
    assert ngram.simulate(prompt, output, k=5, lookup_max=4, lookup_min=4).drafts == 0
    assert ngram.simulate(prompt, output, k=5, lookup_max=4, lookup_min=1).drafts > 0


def test_no_output_and_one_token() -> None:
    for output in ([], [4]):
        found = ngram.simulate([1, 2], output, k=3, lookup_max=3, lookup_min=1)
        assert (found.drafts, found.steps, found.tokens) == (0, 0, 0)


@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 1, 2), (1, 1, 0)])
def test_refuses_what_the_engine_refuses(wrong: tuple[int, int, int]) -> None:
    k, longest, shortest = wrong
    with pytest.raises(ngram.BadLookup, match="lookup_min"):
        ngram.simulate([1], [1], k=k, lookup_max=longest, lookup_min=shortest)


def test_the_grid_equals_single_simulations() -> None:
    pairs = [([1, 2, 3, 1, 2], [3, 1, 2, 3, 1]), ([5, 5, 5], [5, 5, 6, 5, 5])]
    grid = ngram.simulate_grid(pairs, ks=[1, 3], lookup_maxs=[1, 3], lookup_mins=[1, 2, 3])
    assert len(grid) == 2 * 4  # lookup_min <= lookup_max only
    for row in grid.to_dict("records"):
        where = {"k": row["k"], "lookup_max": row["lookup_max"], "lookup_min": row["lookup_min"]}
        parts = [ngram.simulate(*pair, **where) for pair in pairs]
        assert row["drafts"] == sum(part.drafts for part in parts)
        assert row["steps"] == sum(part.steps for part in parts)
        accepted = sum(part.accepted for part in parts)
        assert row["tokens_per_step"] == pytest.approx(8 / row["steps"])
        if row["drafts"]:
            assert row["acceptance_length"] == pytest.approx(1 + accepted / row["drafts"])


def test_rows_without_token_ids_tell_nothing_and_do_not_crash() -> None:
    rows = bench_rows.frame([{"prompt_id": "a"}])
    where = {"k": 1, "lookup_max": 1, "lookup_min": 1}
    assert math.isnan(ngram.simulate_rows(rows, **where).mean_length)
    assert ngram.simulate_grid(rows, ks=[1], lookup_maxs=[1], lookup_mins=[1])["tokens_per_step"].isna().all()
    assert ngram.compare(rows, rows, **where) == {}
    name, nothing = ngram.best({})
    assert name == ngram.UNKNOWN
    assert all(map(math.isnan, (nothing.mean_length, nothing.rate, nothing.tokens_per_step)))
    assert "no token ids" in ngram.prediction_sentence(ngram.simulate_rows(rows, **where), **where)
    known = pd.concat([rows, bench_rows.frame([{"prompt_token_ids": [1, 2], "output_token_ids": [1, 2, 1]}])])
    assert ngram.simulate_rows(known, **where).steps == 1


COUNTED = {"drafts": 4, "drafted": 8, "accepted": 6, "accepted_at": [4, 2], "chunks": 7, "tokens_total": 13}


def test_the_engine_s_counts_come_first() -> None:
    ids = {"prompt_token_ids": [1, 2], "output_token_ids": [1, 2, 1, 5]}
    baseline, measured = bench_rows.frame([ids]), bench_rows.frame([ids | COUNTED])
    found = ngram.compare(baseline, measured, k=2, lookup_max=1, lookup_min=1)
    assert list(found) == [ngram.PREDICTED, ngram.ENGINE, ngram.REPLAYED]
    assert ngram.best(found) == (ngram.ENGINE, found[ngram.ENGINE])
    assert found[ngram.ENGINE].mean_length == 2.5
    assert ngram.best({ngram.PREDICTED: found[ngram.PREDICTED]})[0] == ngram.PREDICTED
