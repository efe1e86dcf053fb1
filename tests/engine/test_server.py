"""A real vLLM on the CPU: served, attached to, benchmarked, agreeing with itself."""

import httpx
import pytest

from labkit import agreement, bench, engine

PARIS = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]


def test_answers_sensibly(server):
    body = {"model": server.model, "messages": PARIS, "max_tokens": 24, "temperature": 0}
    reply = httpx.post(f"{server.base_url}/chat/completions", json=body, timeout=120).json()
    assert "Paris" in reply["choices"][0]["message"]["content"]


@pytest.mark.parametrize("form", ["{root}", "{root}/", "{root}/v1", "{root}/v1/"])
def test_attach_takes_every_form_of_the_address(server, form):
    attached = engine.attach(form.format(root=server.root_url))
    assert attached.base_url == server.base_url
    assert attached.model == "smollm2"
    assert attached.alive()


def test_attach_names_what_is_there(server):
    with pytest.raises(engine.ServerUnreachable, match="smollm2"):
        engine.attach(server.root_url, "another-model")


def test_benchmark_counts_what_the_server_counts(server):
    rows = bench.run(server, [PARIS, "Count: one two three"], max_tokens=12, repeats=2, warmup=1)
    assert len(rows) == 4
    assert rows["error"].isna().all()
    for row in rows.to_dict("records"):
        assert row["tokens_total"] == len(row["output_token_ids"])
        assert row["ttft_ms"] > 0
        assert row["tpot_ms"] > 0
    by_prompt = rows.groupby("prompt_id")["output_token_ids"].agg(lambda ids: len({tuple(i) for i in ids}))
    assert (by_prompt == 1).all(), "greedy repeats of a prompt differ on the same server"


def test_a_changed_token_is_judged_by_the_servers_logprobs(server):
    """The runner-up token stands in for a variant's: its gap is what the server itself says of the two."""
    rows = bench.run(server, [PARIS], max_tokens=6, repeats=1)
    ids = [int(token) for token in rows["output_token_ids"].iloc[0]]
    prompt = [int(token) for token in rows["prompt_token_ids"].iloc[0]]
    ranked = sorted(agreement.next_logprobs(server, prompt + ids[:2]).items(), key=lambda item: -item[1])
    assert ranked[0][0] == ids[2]
    other = rows.assign(output_token_ids=[[*ids[:2], ranked[1][0], *ids[3:]]], variant="other")
    table = agreement.compare(bench_concat(rows.assign(variant="baseline"), other), "baseline", "other")
    judged = agreement.judge(table, server)
    assert judged["position"].tolist() == [2]
    assert judged["gap_nats"].iloc[0] == pytest.approx(ranked[0][1] - ranked[1][1], abs=0.02)


def bench_concat(*frames):
    import pandas as pd

    return pd.concat(frames, ignore_index=True)


def test_a_server_that_cannot_start_says_why(target, log_dir):
    options = {"log_dir": log_dir, "max_model_len": 10**6}
    with pytest.raises(engine.EngineFailed, match="max_model_len"), engine.serve(target, "ngram", **options):
        pass
    assert (log_dir / "server-ngram.log").read_text()
