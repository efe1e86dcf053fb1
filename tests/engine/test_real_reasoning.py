"""The reasoning trap on a real server: SmolLM2 behind a parser that takes everything for reasoning."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import psutil
import pytest

from labkit import bench, engine, ngram
from labkit.settings import NgramBaseline

BUDGET = 24


@pytest.fixture(scope="module")
def thinking(target, log_dir) -> Iterator[engine.Server]:
    options = {"log_dir": str(log_dir / "thinking"), "max_model_len": 1024}  # the folder may be text
    with engine.serve(target, "baseline", flags={"reasoning-parser": "kimi_k2"}, **options) as server:
        yield server


@pytest.fixture(scope="module")
def chosen():
    return bench.prompts(per_category=1).head(4)


def test_the_server_hides_the_answer(thinking) -> None:
    """What the trap looks like: content null, everything in `reasoning`."""
    body = {"model": thinking.model, "messages": [{"role": "user", "content": "Tell a story."}], "max_tokens": 8}
    message = httpx.post(f"{thinking.base_url}/chat/completions", json=body, timeout=60).json()["choices"][0][
        "message"
    ]
    assert not message["content"]
    assert message["reasoning"]


def test_rates_are_right_and_the_budget_is_named(thinking, chosen) -> None:
    rows = bench.run(thinking, chosen, max_tokens=BUDGET, repeats=1, variant="baseline")
    assert rows["error"].isna().all()
    assert (rows["tokens_answer"] == 0).all()
    assert (rows["tokens_reasoning"] == rows["tokens_total"]).all()
    assert (rows["tokens_total"] == rows["output_token_ids"].map(len)).all(), (
        "counted by the server, not by chunks"
    )
    assert rows["ttft_answer_ms"].isna().all()
    assert (rows["ttft_ms"] > 0).all()
    cut = rows[rows["finish_reason"] == "length"]
    assert len(cut)
    assert cut["budget_exhausted"].all()
    found = bench.summary(rows, by=["variant"]).iloc[0]
    assert found["tok_s"] == pytest.approx(
        (rows["tokens_total"] - 1).sum() / rows["decode_ms"].sum() * 1e3, rel=1e-6
    )
    assert f"all {BUDGET} tokens went into reasoning; raise max_tokens" in found["advice"]


def test_notebook_02_goes_on_from_there(thinking, chosen, tmp_path, monkeypatch) -> None:
    """What the notebook calls, on the attached server: rows, step times, a simulation, no division by zero."""
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    settings = NgramBaseline(server=thinking.root_url, scale="smoke", max_tokens=BUDGET, repeats=1, run_id="trap")
    rows, times = bench.measure_baseline(settings, chosen, 2)
    assert (rows["tokens_answer"] == 0).all()
    assert times["n"].tolist() == [1, 2]
    assert (times["step_ms"] > 1).all()
    simulated = ngram.simulate_rows(rows, k=3, lookup_max=3, lookup_min=1)
    assert simulated.tokens == (rows["tokens_total"] - 1).sum()
    again, same = bench.measure_baseline(settings, chosen, 2)
    assert same.equals(times), "from disk"
    assert len(again) == len(rows)


def test_killed_supervisor(thinking) -> None:
    """Last here: who would clean up is gone itself, so its sentinel ends API server and engine core."""
    supervisor = psutil.Process(thinking.process.pid)
    everything = supervisor.children(recursive=True)
    names = [" ".join(process.cmdline()) for process in everything]
    assert any("api_server" in name for name in names)
    assert any("EngineCore" in name for name in names)
    supervisor.kill()
    thinking.process.wait()
    _, left = psutil.wait_procs(everything, timeout=40)
    assert not left
    with pytest.raises(engine.EngineDied, match="SIGKILL") as died:
        thinking.check()
    assert "next run" in died.value.remedy
