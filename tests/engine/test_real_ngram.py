"""The n-gram simulation against vLLM itself: its proposer token for token, and the counters of a real server."""

from __future__ import annotations

import numpy as np
import pytest

from labkit import acceptance, bench, engine, ngram

LOOKUP = {"k": 4, "lookup_max": 3, "lookup_min": 1}


def test_equal_to_vllm_s_own_proposer() -> None:
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as theirs

    rng = np.random.default_rng(0)
    for _ in range(200):
        tokens = rng.integers(0, rng.integers(2, 6), rng.integers(1, 60)).astype(np.int32)
        k, longest = int(rng.integers(1, 7)), int(rng.integers(1, 6))
        shortest = int(rng.integers(1, longest + 1))
        recording = ngram.Recording.of(tokens, [], longest)
        starts = recording.proposals(longest, shortest)
        for end in range(1, len(tokens) + 1):
            start = starts[end]
            ours = [] if start < 0 else tokens[start : start + min(k, end - start)].tolist()
            assert ours == theirs(tokens[:end], shortest, longest, 100_000, k).tolist()


@pytest.fixture(scope="module")
def measured(target, log_dir):
    options = {"num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with engine.serve(target, "ngram", log_dir=log_dir, max_model_len=1024, **options) as server:
        before = acceptance.snapshot(server)
        rows = bench.run(server, bench.prompts(per_category=1), max_tokens=48, repeats=1, warmup=0)
        yield rows, acceptance.between(before, acceptance.snapshot(server))


def test_every_request_replays_as_the_engine_counted(measured) -> None:
    """Drafts, drafted tokens and steps exactly; accepted ones but for those beyond the end of the output."""
    rows, _ = measured
    assert rows["error"].isna().all()
    for row in rows.to_dict("records"):
        replayed = ngram.simulate(row["prompt_token_ids"], row["output_token_ids"], **LOOKUP)
        assert (replayed.drafts, replayed.drafted) == (row["drafts"], row["drafted"])
        assert replayed.steps == row["chunks"] - 1
        beyond = row["accepted"] - replayed.accepted
        assert 0 <= beyond <= LOOKUP["k"]


def test_requests_add_up_to_the_server_s_counters(measured) -> None:
    rows, whole = measured
    pooled = acceptance.from_rows(rows)
    assert (pooled.drafts, pooled.drafted, pooled.accepted_at) == (whole.drafts, whole.drafted, whole.accepted_at)
    assert pooled.tokens == whole.tokens
