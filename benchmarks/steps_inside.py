"""Step times of vLLM's CPU engine in this process: the child of benchmarks.steps_vs_model, for one model.

It imports nothing of the lab: vLLM is to find the process as its own server would.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

TOKENS, EDGE = 40, 4  # tokens of each request, and steps at both ends that are left out


def texts(llm: Any, prompt: list[int], most: int) -> list[int]:
    """One greedy answer that is long enough for `most` neighbouring requests."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS + most, ignore_eos=True)
    return list(llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids)


def median_step(engine: Any, prompt: list[int], answer: list[int], n: int, name: str) -> float:
    """Median time, ms, of a step on n neighbouring tokens: request i begins i tokens further on in the answer."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    for i in range(n):
        engine.add_request(f"{name}-{i}", {"prompt_token_ids": prompt + answer[:i]}, params)
    times = []
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return float(np.median(times[EDGE:-EDGE]) * 1e3)


def main() -> None:
    """Measure what the one argument (JSON: model, prompt, ns, rounds, out) asks for."""
    given = json.loads(sys.argv[1])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    llm = LLM(model=given["model"], dtype="bfloat16", max_model_len=1024, max_num_seqs=16, disable_log_stats=True)
    prompt, ns = given["prompt"], given["ns"]
    answer = texts(llm, prompt, max(ns))
    rounds: dict[int, list[float]] = {n: [] for n in ns}
    for n in ns:
        median_step(llm.llm_engine, prompt, answer, n, f"warm-{n}")
    order = np.random.default_rng(0)
    for number in range(given["rounds"]):
        for n in order.permutation(ns).tolist():
            rounds[n].append(median_step(llm.llm_engine, prompt, answer, n, f"{number}-{n}"))
    found = {"rounds": rounds, "text": prompt + answer, "prompt_tokens": len(prompt)}
    Path(given["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
