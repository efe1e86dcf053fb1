"""labkit.ngram beside vLLM's own n-gram proposer driven in a loop: python -m benchmarks.ngram_vs_vllm

Both walk recorded outputs as the engine does and must count the same drafts and accepted tokens; what is timed is
a configuration (k, longest and shortest lookup) over all outputs. labkit looks a whole grid up at once.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from benchmarks.measuring import spread
from labkit import ngram

OUTPUTS, PROMPT, ANSWER = 400, 400, 600
KS, LONGEST = (1, 2, 3, 4, 5), 5
CHECKED = ((5, 4, 1), (5, 4, 4), (3, 2, 1))  # configurations that vLLM's proposer walks, too: k, longest, shortest
REPEATS = 3
GOAL = 20.0
MODEL_LENGTH = 100_000

Pair = tuple[np.ndarray, np.ndarray]


def recordings(seed: int = 0) -> list[Pair]:
    """Prompt and output ids that repeat themselves as text does: new words, and stretches copied from before."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(OUTPUTS):
        tokens: list[int] = []
        while len(tokens) < PROMPT + ANSWER:
            if tokens and rng.random() < 0.3:
                start = int(rng.integers(0, len(tokens)))
                tokens += tokens[start : start + int(rng.integers(2, 20))]
            else:
                tokens += (rng.zipf(1.3, size=int(rng.integers(1, 12))) % 8000).tolist()
        ids = np.array(tokens[: PROMPT + ANSWER], np.int32)
        made.append((ids[:PROMPT], ids[PROMPT:]))
    return made


def walked_by_vllm(pairs: list[Pair], k: int, longest: int, shortest: int) -> tuple[int, int, int]:
    """(drafts, drafted, accepted) with vLLM's proposer at every step."""
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as propose

    drafts = drafted = accepted = 0
    for prompt, output in pairs:
        tokens = np.concatenate((prompt, output))
        end = len(prompt) + 1
        while end < len(tokens):
            proposed = propose(tokens[:end], shortest, longest, MODEL_LENGTH, k)
            right = 0
            while right < len(proposed) and end + right < len(tokens) and proposed[right] == tokens[end + right]:
                right += 1
            drafts, drafted, accepted = drafts + (len(proposed) > 0), drafted + len(proposed), accepted + right
            end += right + 1
    return drafts, drafted, accepted


def seconds_of_vllm(pairs: list[Pair]) -> tuple[float, list[tuple[int, int, int]]]:
    """Seconds a configuration, compilation left out, and what each of the checked ones counted."""
    walked_by_vllm(pairs[:1], 2, 2, 1)
    before = time.perf_counter()
    counted = [walked_by_vllm(pairs, *lookup) for lookup in CHECKED]
    return (time.perf_counter() - before) / len(CHECKED), counted


def seconds_of_labkit(pairs: list[Pair]) -> tuple[float, int]:
    """Seconds a configuration of the whole grid, and how many there are."""
    before = time.perf_counter()
    lengths = range(1, LONGEST + 1)
    grid = ngram.simulate_grid(pairs, ks=KS, lookup_maxs=lengths, lookup_mins=lengths)
    return (time.perf_counter() - before) / len(grid), len(grid)


def main() -> None:
    """Print the table; raises RuntimeError where the two do not count the same."""
    pairs = recordings()
    rows = [(seconds_of_labkit(pairs), seconds_of_vllm(pairs)) for _ in range(REPEATS)]
    for lookup, theirs in zip(CHECKED, rows[0][1][1], strict=True):
        k, longest, shortest = lookup
        ours = [ngram.simulate(*pair, k=k, lookup_max=longest, lookup_min=shortest) for pair in pairs]
        counted = tuple(sum(getattr(one, name) for one in ours) for name in ("drafts", "drafted", "accepted"))
        if counted != theirs:
            raise RuntimeError(f"k={k}, lookup {longest}..{shortest}: labkit counts {counted}, vLLM {theirs}")
    single = [statistics.mean(seconds_alone(pairs, *lookup) for lookup in CHECKED) for _ in range(REPEATS)]
    ratios = [theirs[0] / ours[0] for ours, theirs in rows]
    alone = [theirs[0] / one for one, (_, theirs) in zip(single, rows, strict=True)]
    print(f"\nn-gram lookup over {OUTPUTS} outputs of {ANSWER} tokens, seconds a configuration; counts are equal")
    print("\n| | labkit | vLLM's proposer in a loop | vLLM / labkit |")
    print("|---|---|---|---|")
    grid, vllm = spread([ours[0] for ours, _ in rows]), spread([theirs[0] for _, theirs in rows])
    kept = "goal kept" if statistics.median(ratios) >= GOAL else "GOAL MISSED"
    print(f"| in a grid of {rows[0][0][1]} | {grid} | {vllm} | **{spread(ratios)}** ({kept}) |")
    print(f"| one alone | {spread(single)} | {vllm} | {spread(alone)} |")


def seconds_alone(pairs: list[Pair], k: int, longest: int, shortest: int) -> float:
    """Seconds of one configuration over all outputs, looked up for it alone."""
    before = time.perf_counter()
    ngram.simulate_grid(pairs, ks=[k], lookup_maxs=[longest], lookup_mins=[shortest])
    return time.perf_counter() - before


if __name__ == "__main__":
    main()
