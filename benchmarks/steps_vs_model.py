"""t(n) on the CPU engine beside the cost model, fitted at two n: `python -m benchmarks.steps_vs_model`.

SmolLM2, and a Qwen3-MoE-shaped model with random weights whose tokens route apart, each in an engine of its own
(benchmarks.steps_inside): six minutes on two idle cores. Prints predicted over measured t(n) / t(1) at the n that
were not fitted; the goal is 0.9 to 1.1. The engine runs in its process, without server and client: on two cores
these take their share of every step, and most of a single stream's (LOG.md). Other programs, and on a shared host
other machines, lengthen steps, so of many rounds in random order the quietest counts at each n.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from labkit import costmodel, experts, files, targets
from labkit.bench import steptimes
from labkit.engine import launch

NS = (1, 2, 3, 4, 6, 8)
FITTED = (1, 8)
ROUNDS = 12
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


def inside(target: targets.Target, folder: Path) -> dict[str, Any]:
    """What benchmarks.steps_inside measured: rounds (n: medians, ms) and the text, its prompt first."""
    out, extra = folder / f"{Path(target.name).name}.json", launch.environment({"tensor_parallel_size": 1})
    tokens = target.tokenizer()(steptimes.PROMPT.format(n=1))["input_ids"]
    given = {"model": str(target.path), "prompt": tokens, "ns": NS, "rounds": ROUNDS, "out": str(out)}
    words = [sys.executable, "-m", "benchmarks.steps_inside", json.dumps(given)]
    subprocess.run(words, env=os.environ | extra | {"VLLM_LOGGING_LEVEL": "ERROR"}, check=True)
    return files.read_json(out)


def quietest(found: dict[str, Any]) -> pd.DataFrame:
    """The quietest round at each n: n streams step_ms.

    A round counts by its median, not by its fast steps: those of a mixture of experts are the ones whose tokens
    happened to share experts.
    """
    rows = [{"n": int(n), "streams": 1, "step_ms": min(medians)} for n, medians in found["rounds"].items()]
    return pd.DataFrame(rows)


def reuse_of(found: dict[str, Any], target: targets.Target) -> dict[int, float]:
    """n: r of the text whose neighbouring tokens were timed, recorded through Transformers."""
    routing = experts.record(experts.load(target), [experts.Document("a text", found["text"])])
    answer = routing.experts[found["prompt_tokens"] :]
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
            found = inside(target, Path(folder))
            times = quietest(found)
            reuse = {1: 1.0} | reuse_of(found, target) if target.geometry.is_moe else 1.0
            table = compared(times, costmodel.StepModel(target.geometry, machine, context_tokens=64, reuse=reuse))
            off = (table.loc[~table["fitted"], "ratio"] - 1).abs().max()
            print(f"\n{Path(target.name).name}\n{table.round(3).to_string(index=False)}")
            print(f"furthest off: {off:.0%} (goal: {CLOSE:.0%})")


if __name__ == "__main__":
    main()
