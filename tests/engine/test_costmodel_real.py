"""The cost model on the CPU engine: fitted to step times at two points, it predicts those at the others."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from labkit import bench, costmodel, engine, experts, targets
from labkit.bench import steptimes

NS = (1, 2, 3, 4, 6, 8)
FITTED = (1, 8)
ROUNDS = 4
CLOSE = 0.10
SHAPE = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1024,
    "moe_intermediate_size": 384,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def qwen3_moe(target, tmp_path_factory) -> targets.Target:
    """Qwen3-MoE's architecture with random weights; embeddings so large that tokens differ and route apart."""
    folder = tmp_path_factory.mktemp("models") / "qwen3-moe"
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, initializer_range=0.02)).to(torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=1.0)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target.path).save_pretrained(folder)
    return targets.resolve(folder)


@pytest.fixture(scope="module")
def moe_server(qwen3_moe, log_dir) -> Iterator[engine.Server]:
    with engine.serve(qwen3_moe, "baseline", log_dir=log_dir, max_model_len=1024) as running:
        yield running


def step_times(server) -> pd.DataFrame:
    """The quietest of several rounds at each n: other programs lengthen steps, and a busy spell hits one round."""
    rounds = [bench.step_times(server, NS, tokens=24, repeats=1) for _ in range(ROUNDS)]
    times = pd.concat(rounds)
    assert (times["tokens_are"] == "neighbours").all()
    return times.groupby(["n", "streams"], as_index=False)["low_ms"].min().rename(columns={"low_ms": "step_ms"})


def off(times: pd.DataFrame, model: costmodel.StepModel) -> pd.Series:
    """n: predicted over measured t(n) / t(1), less one, at the points that were not fitted."""
    fit = costmodel.calibrate(times[times["n"].isin(FITTED)], model=model)
    others = times[~times["n"].isin(FITTED)].set_index("n")["step_ms"] / times.set_index("n")["step_ms"].loc[1]
    predicted = pd.Series({n: fit.verify_ratio(n).mid for n in others.index})
    print(pd.DataFrame({"measured": others, "predicted": predicted}))  # shown where the test fails
    return predicted / others - 1


def test_smollm2_is_predicted_from_two_points(server, target) -> None:
    machine = costmodel.machine_at_hand()
    found = off(step_times(server), costmodel.StepModel(target.geometry, machine, context_tokens=64))
    assert found.abs().max() < CLOSE


def test_a_mixture_of_experts_is_predicted_from_two_points_and_its_routing(moe_server, qwen3_moe) -> None:
    times = step_times(moe_server)
    # The text whose neighbouring tokens were timed, and which experts those tokens touch.
    told = bench.run(
        moe_server,
        [steptimes.PROMPT.format(n=1)],
        max_tokens=48,
        repeats=1,
        extra_body={"ignore_eos": True},
        shuffle=False,
    ).iloc[0]
    text = [*map(int, told["prompt_token_ids"]), *map(int, told["output_token_ids"])]
    routing = experts.record(experts.load(qwen3_moe), [experts.Document("a text", text)])
    answer = routing.experts[len(told["prompt_token_ids"]) :]
    unique = {n: experts.unique(answer, n).mean() for n in NS}
    reuse = {n: experts.reuse(u, 64, 8, n) for n, u in unique.items() if n > 1}
    assert 8 < unique[2] < unique[8] <= 64
    machine = costmodel.machine_at_hand()
    model = costmodel.StepModel(qwen3_moe.geometry, machine, context_tokens=64, reuse={1: 1.0} | reuse)
    assert [model.regime(n).loading for n in NS] == ["unique"] * len(NS)
    assert model.experts_loaded(4) == pytest.approx(unique[4])
    found = off(times, model)
    assert found.abs().max() < CLOSE
    # The experts are what it costs: a step of 8 tokens is much longer than that of a dense model would be.
    assert times.set_index("n")["step_ms"].loc[8] > 1.5 * times.set_index("n")["step_ms"].loc[1]
