"""The n-gram simulation against vLLM itself: its proposer token for token, and the counters of a real server."""

from __future__ import annotations

import os

import numpy as np
import pytest

from labkit import acceptance, bench, engine, ngram

SOAK = os.environ.get("LABKIT_SOAK") == "1"
LOOKUPS = [{"k": 4, "lookup_max": 3, "lookup_min": 1}]
if SOAK:  # three configurations over 40 prompts: about five minutes
    LOOKUPS = [
        {"k": 5, "lookup_max": 4, "lookup_min": 1},
        {"k": 5, "lookup_max": 4, "lookup_min": 4},
        {"k": 3, "lookup_max": 2, "lookup_min": 2},
    ]


def test_equal_to_vllm_s_own_proposer() -> None:
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as theirs

    rng = np.random.default_rng(0)
    for _ in range(200):
        tokens = rng.integers(0, rng.integers(2, 6), rng.integers(1, 60)).astype(np.int32)
        k, longest = int(rng.integers(1, 7)), int(rng.integers(1, 6))
        shortest = int(rng.integers(1, longest + 1))
        recording = ngram.Recordings.of([(tokens, [])], longest)
        starts = recording.proposals(longest, shortest)
        for end in range(1, len(tokens) + 1):
            start = starts[end]
            ours = [] if start < 0 else tokens[start : start + min(k, end - start)].tolist()
            assert ours == theirs(tokens[:end], shortest, longest, 100_000, k).tolist()


@pytest.fixture(scope="module", params=LOOKUPS, ids=lambda lookup: "-".join(map(str, lookup.values())))
def measured(request, target, log_dir):
    names = {"k": "num_speculative_tokens", "lookup_max": "prompt_lookup_max", "lookup_min": "prompt_lookup_min"}
    options = {names[name]: value for name, value in request.param.items()}
    with engine.serve(target, "ngram", log_dir=log_dir, max_model_len=1024, **options) as server:
        before = acceptance.snapshot(server)
        rows = bench.run(server, bench.prompts(per_category=5 if SOAK else 1), max_tokens=48, repeats=1, warmup=0)
        yield rows, acceptance.between(before, acceptance.snapshot(server)), request.param


def test_every_request_replays_as_the_engine_counted(measured) -> None:
    """Drafts and drafted tokens exactly; accepted ones but for those beyond the end of the output.

    The last step of a request may accept tokens that the budget cuts off: at each position at most one more.
    """
    rows, _, lookup = measured
    assert rows["error"].isna().all()
    for row in rows.to_dict("records"):
        replayed = ngram.simulate(row["prompt_token_ids"], row["output_token_ids"], **lookup)
        assert (replayed.drafts, replayed.drafted) == (row["drafts"], row["drafted"])
        assert replayed.steps >= row["chunks"] - 1  # a busy server sends two steps in one chunk
        beyond = np.subtract(row["accepted_at"], replayed.accepted_at)
        assert set(beyond) <= {0, 1}
        assert beyond.sum() == row["accepted"] - replayed.accepted


def test_requests_add_up_to_the_server_s_counters(measured) -> None:
    rows, whole, _ = measured
    pooled = acceptance.from_rows(rows)
    assert (pooled.drafts, pooled.drafted, pooled.accepted_at) == (whole.drafts, whole.drafted, whole.accepted_at)
    assert pooled.tokens == whole.tokens
