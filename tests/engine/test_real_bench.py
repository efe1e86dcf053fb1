"""The benchmark client on a real vLLM."""

from __future__ import annotations

import pytest

from labkit import bench


def test_rows_of_a_real_server(server) -> None:
    rows = bench.run(server, bench.prompts(per_category=1), max_tokens=24, repeats=2, variant="baseline")
    assert rows["error"].isna().all()
    assert (rows["tokens_source"] == "usage").all()
    for row in rows.to_dict("records"):
        assert len(row["output_token_ids"]) == row["tokens_total"] == row["chunks"] <= 24
        assert len(row["prompt_token_ids"]) == row["tokens_prompt"]
        assert row["decode_ms"] == pytest.approx(sum(row["gaps_ms"]))
        assert 0 < row["ttft_ms"] < row["e2e_ms"]
        assert row["finish_reason"] == ("length" if row["tokens_total"] == 24 else row["finish_reason"])
    assert rows["drafts"].isna().all()  # this server does not speculate
    assert rows.groupby("prompt_id")["output_token_ids"].apply(lambda ids: len(set(map(tuple, ids)))).eq(1).all()


def test_by_address_and_concurrently(server) -> None:
    rows = bench.run(
        server.base_url.replace("/v1", "/"),
        ["Say hello.", "Count to five."],
        max_tokens=8,
        repeats=2,
        concurrency=4,
    )
    assert rows["error"].isna().all()
    assert (rows["model"] == server.model).all()


def test_a_request_that_is_too_long_is_a_row(server) -> None:
    rows = bench.run(server, ["short", "long " * 3000], max_tokens=4, repeats=1, warmup=0)
    assert rows["error"].isna().tolist() == [True, False]
    assert "HTTP 400" in rows["error"].iloc[1]
