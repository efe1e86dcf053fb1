"""What a step that verifies n tokens costs a mixture of experts, on one GPU: `python -m benchmarks.verify_cost`.

vLLM with random weights in a published layer geometry: as many of its layers as fit. n streams decode one token
each, so a step works on n tokens, in two ways: all streams the same text, so that n tokens share one set of
experts, and each stream a random text of its own. Where the kernel loads each expert once, the two differ; where
it loads one for every (token, expert) pair, they cost the same. The engine returns each token's experts.

Random weights as vLLM draws them route every token alike, so the router, the embedding and the norms are drawn
anew with ordinary sizes. Writes a row a repeat to OUT/verify_cost-<model>-<weights>.parquet; three minutes on one
H200. `--compare` sets what lies in OUT beside the cost model, calibrated at two n, and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit import costmodel, files, settings, targets
from labkit.experts import unique
from labkit.plots import costmodel as costmodel_plots

SHAPES = {  # model: (file in data/models, layers that fit one H200 in bf16)
    "kimi-k2.5": ("kimi-k2.5", 4),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", 48),
    "tiny": ("qwen3-30b-a3b", 2),
}
TINY = {"hidden_size": 256, "moe_intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 1024}
AT = costmodel.CALIBRATED_AT | {"tiny": (1, 16)}  # the n that --compare calibrates at
SHORT, LONG = 16, 112  # output tokens of the two requests whose difference is timed
NS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 13, 14, 16, 20, 24, 32)


def config(model: str, weights: str) -> dict[str, Any]:
    """config.json of the text model alone, cut to the layers that fit; INT4 stays only where it is asked for."""
    name, layers = SHAPES[model]
    text = costmodel.cut_config(name, layers, weights)
    text |= {"max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2}
    return text | (TINY if model == "tiny" else {})


def redraw(model: Any) -> int:
    """Give norms, embeddings and routers ordinary sizes, so that routing follows the token; how many routers."""
    import torch

    generator = {"generator": torch.Generator(device=next(model.parameters()).device).manual_seed(0)}
    routers = 0
    for name, weight in model.named_parameters():
        if "norm" in name or "layernorm" in name:
            weight.data.fill_(1.0)
        elif "embed_tokens" in name:
            weight.data.normal_(0.0, 1.0, **generator)
        elif name.endswith("mlp.gate.weight") and weight.ndim == 2:  # the CPU build packs it away
            weight.data.normal_(0.0, 2.0 / weight.shape[1] ** 0.5, **generator)
            routers += 1
        elif "e_score_correction_bias" in name:
            weight.data.zero_()
    return routers


def engine_for(model: str, weights: str, folder: Path, on_gpu: bool) -> Any:
    """vLLM in this process over random weights, with a CUDA graph for each number of tokens."""
    from vllm import LLM

    files.write_json(folder / "config.json", config(model, weights))
    graphs = {"compilation_config": {"cudagraph_capture_sizes": list(NS)}, "enable_return_routed_experts": True}
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=max(NS),
        gpu_memory_utilization=0.92,
        seed=0,
        **(graphs if on_gpu else {"enforce_eager": True}),
    )


def requests(kind: str, n: int, vocabulary: int, seed: int) -> tuple[list[dict[str, list[int]]], float]:
    """n prompts of 16 random tokens, and the temperature: one prompt and greedy, or n and sampled."""
    drawn = np.random.default_rng(seed).integers(16, vocabulary, (n, 16))
    chosen = np.repeat(drawn[:1], n, axis=0) if kind == "shared" else drawn
    return [{"prompt_token_ids": row.tolist()} for row in chosen], 0.0 if kind == "shared" else 1.0


def timed(llm: Any, prompts: list[Any], temperature: float, tokens: int, seed: int) -> tuple[float, list[Any]]:
    """Seconds and outputs of requests of exactly `tokens` tokens."""
    from vllm import SamplingParams

    options = {"temperature": temperature, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    each = [SamplingParams(**options, seed=seed + i if temperature else None) for i in range(len(prompts))]
    before = time.perf_counter()
    outputs = llm.generate(prompts, each, use_tqdm=False)
    return time.perf_counter() - before, outputs


def experts_a_step(outputs: list[Any], dense: int) -> float:
    """Unique experts a layer over the n tokens of a step, mean over steps and layers; NaN where unknown."""
    routed = [getattr(output.outputs[0], "routed_experts", None) for output in outputs]
    if any(each is None for each in routed):
        return float("nan")
    streams = np.stack([np.asarray(each)[-(LONG - 1) :, dense:] for each in routed], axis=1)  # [steps, n, L, k]
    n = streams.shape[1]
    return float(np.mean([unique(step, n) for step in streams[:: max(len(streams) // 32, 1)]]))


def measure(model: str, weights: str, repeats: int, on_gpu: bool) -> pd.DataFrame:
    """A row a repeat: model weights kind n repeat step_ms unique_experts layers moe_layers routers."""
    with tempfile.TemporaryDirectory() as folder:
        text = config(model, weights)
        llm = engine_for(model, weights, Path(folder), on_gpu)
        routers = llm.apply_model(redraw)[0]
        rows = []
        for repeat in range(-1, repeats):  # the first pass warms up
            for n in NS:
                for kind in ("shared", "varied"):
                    prompts, temperature = requests(kind, n, text["vocab_size"], seed=repeat + 1)
                    short, _ = timed(llm, prompts, temperature, SHORT, seed=repeat + 1)
                    long, outputs = timed(llm, prompts, temperature, LONG, seed=repeat + 1)
                    step_ms = (long - short) / (LONG - SHORT) * 1e3
                    found = experts_a_step(outputs, text["num_hidden_layers"] - routers)
                    rows.append(
                        {"kind": kind, "n": n, "repeat": repeat, "step_ms": step_ms, "unique_experts": found}
                    )
    same = {"model": model, "weights": weights, "layers": text["num_hidden_layers"], "moe_layers": routers}
    return pd.DataFrame([same | row for row in rows if row["repeat"] >= 0])


def compare(folder: Path) -> None:
    """Print measured beside predicted steps of all files in `folder` and draw verify_cost.png there."""
    rows = pd.concat([files.read_parquet(path) for path in sorted(folder.glob("verify_cost*.parquet"))])
    steps = costmodel.each_beside(rows, lambda model, weights, _: targets.geometry(config(model, weights)), AT)
    for (model, weights), table in steps.groupby(["model", "weights"], sort=False):
        limit = costmodel.pairwise_limit(targets.geometry(config(str(model), str(weights))))
        print(f"\n{model} {weights}: read pair by pair up to n = {limit} by vLLM's rule")
        print(table[costmodel.comparison.COLUMNS].round(3).to_string(index=False))
    costmodel_plots.plot_measured_steps(steps).savefig(folder / "verify_cost.png", dpi=110)


def main() -> None:
    """Measure one model with one kind of weights, or compare what was measured."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="kimi-k2.5")
    parser.add_argument("--weights", choices=("bf16", "int4"), default="bf16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=settings.outputs() / "verify_cost")
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    if options.compare:
        return compare(options.out)
    on_gpu = torch.cuda.is_available()
    rows = measure(options.model, options.weights, options.repeats, on_gpu)
    options.out.mkdir(parents=True, exist_ok=True)
    files.write_parquet(options.out / f"verify_cost-{options.model}-{options.weights}.parquet", rows)
    middle = rows.pivot_table(index="n", columns="kind", values=["step_ms", "unique_experts"], aggfunc="median")
    print(middle.round(3).to_string())
    print(json.dumps({"model": options.model, "weights": options.weights, "rows": len(rows)}))


if __name__ == "__main__":
    main()
