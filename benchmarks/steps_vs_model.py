"""t(n) on the CPU engine beside the cost model, fitted at two n: `python -m benchmarks.steps_vs_model`.

SmolLM2, and a Qwen3-MoE-shaped model with random weights whose tokens route apart, each on its own server: five
minutes on two idle cores. Prints predicted over measured t(n) / t(1) at the n that were not fitted; the goal is
0.9 to 1.1. Other programs lengthen steps, so of several rounds the quietest counts at each n.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pandas as pd

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


def qwen3_moe(folder: Path, tokenizer_of: targets.Target) -> targets.Target:
    """Qwen3-MoE's architecture with random weights; embeddings so large that tokens differ and route apart."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, initializer_range=0.02)).to(torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=1.0)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_of.path).save_pretrained(folder)
    return targets.resolve(folder)


def step_times(server: engine.Server) -> pd.DataFrame:
    """The quietest of several rounds at each n: n streams step_ms.

    A round counts by its median, not by its fast steps: those of a mixture of experts are the ones whose tokens
    happened to share experts.
    """
    times = pd.concat(bench.step_times(server, NS, tokens=24, repeats=1) for _ in range(ROUNDS))
    return times.groupby(["n", "streams"], as_index=False)["step_ms"].min()


def reuse_of(server: engine.Server, target: targets.Target) -> dict[int, float]:
    """n: r of the text whose neighbouring tokens were timed, recorded through Transformers."""
    told = bench.run(
        server,
        [steptimes.PROMPT.format(n=1)],
        max_tokens=48,
        repeats=1,
        extra_body={"ignore_eos": True},
        shuffle=False,
    ).iloc[0]
    text = [*map(int, told["prompt_token_ids"]), *map(int, told["output_token_ids"])]
    routing = experts.record(experts.load(target), [experts.Document("a text", text)])
    answer = routing.experts[len(told["prompt_token_ids"]) :]
    all_experts, chosen = target.geometry.n_routed_experts, target.geometry.num_experts_per_tok
    return {n: experts.reuse(experts.unique(answer, n).mean(), all_experts, chosen, n) for n in NS if n > 1}


def compared(times: pd.DataFrame, model: costmodel.StepModel) -> pd.DataFrame:
    """A row an n: step_ms, t(n) / t(1) as measured and as predicted after the fit, their ratio, fitted."""
    fit = costmodel.calibrate(times[times["n"].isin(FITTED)], model=model)
    table = times[["n", "step_ms"]].assign(measured=times["step_ms"] / times["step_ms"].iloc[0])
    table["predicted"] = [fit.verify_ratio(int(n)).mid for n in table["n"]]
    return table.assign(ratio=table["predicted"] / table["measured"], fitted=table["n"].isin(FITTED))


def main() -> None:
    """Time both models and print them beside the cost model."""
    machine = costmodel.machine_at_hand()
    smollm2 = targets.resolve("smollm2")
    with tempfile.TemporaryDirectory() as folder:
        moe = qwen3_moe(Path(folder) / "qwen3-moe", smollm2)
        for target in (smollm2, moe):
            with engine.serve(target, "baseline", log_dir=Path(folder), max_model_len=1024) as server:
                times = step_times(server)
                reuse = {1: 1.0} | reuse_of(server, target) if target.geometry.is_moe else 1.0
            table = compared(times, costmodel.StepModel(target.geometry, machine, context_tokens=64, reuse=reuse))
            off = (table.loc[~table["fitted"], "ratio"] - 1).abs().max()
            print(f"\n{Path(target.name).name}\n{table.round(3).to_string(index=False)}")
            print(f"furthest off: {off:.0%} (goal: {CLOSE:.0%})")


if __name__ == "__main__":
    main()
