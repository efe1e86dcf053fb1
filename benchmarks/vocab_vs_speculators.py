"""labkit.vocab beside speculators' own functions: python -m benchmarks.vocab_vs_speculators

The same rows are counted, and the same counts built into maps, by both; where the rules agree (no required tokens)
the results have to be equal. Counting: rows of ids with loss masks, as a data set gives them. Building: counts
over Kimi's vocabulary to 32,000 draft tokens.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import spread
from labkit import vocab

ROWS, LENGTH, TARGETS, SIZE = 5000, 800, 163_840, 32_000
REPEATS = 5


def rows(seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Ids drawn as words are (Zipf), masks over the last two thirds."""
    rng = np.random.default_rng(seed)
    ids, masks = [], []
    for _ in range(ROWS):
        length = int(rng.integers(LENGTH // 2, LENGTH * 3 // 2))
        ids.append(rng.zipf(1.2, length) * 7919 % TARGETS)
        masks.append(np.arange(length) >= length // 3)
    return ids, masks


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds, and the result."""
    before = time.perf_counter()
    found = work()
    return (time.perf_counter() - before) * 1e3, found


def counted_by_speculators(data: Any) -> Path:
    """The file of counts that speculators makes of a data set; reading it back is not timed."""
    from speculators.train.vocab_mapping import save_token_frequency_distribution

    path = Path(tempfile.mkdtemp()) / "token_freq.pt"
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        save_token_frequency_distribution(data, path)
    return path


def same(ours: Any, theirs: Any, what: str) -> None:
    """Raise RuntimeError where the two differ."""
    if not torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs)):
        raise RuntimeError(f"labkit and speculators differ in {what}")


def main() -> None:
    """Print the table; raises RuntimeError where results differ."""
    from datasets import Dataset
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution as theirs

    ids, masks = rows()
    data = Dataset.from_dict({"input_ids": ids, "loss_mask": masks}).with_format("torch")
    columns = data.with_format("numpy")
    counting, building = [], []
    for _ in range(REPEATS):
        ours, counts = timed(lambda: vocab.count(columns["input_ids"], columns["loss_mask"], TARGETS))
        other, path = timed(lambda: counted_by_speculators(data))
        frequency = torch.load(path, weights_only=True)
        same(counts, [frequency.get(token, 0) for token in range(TARGETS)], "counts")
        counting.append((ours, other))
        ours, built = timed(lambda counts=counts: vocab.build(counts, SIZE))
        other, (d2t, t2d) = timed(lambda frequency=frequency: theirs(frequency, SIZE, TARGETS))
        same(built.d2t, d2t, "d2t")
        same(built.t2d, t2d, "t2d")
        building.append((ours, other))
    tokens = sum(map(len, ids))
    print(f"\n{SIZE:,} of {TARGETS:,} tokens from {ROWS:,} rows of {tokens:,} tokens; results are equal")
    print("\n| ms | labkit | speculators | speculators / labkit |\n|---|---|---|---|")
    for name, pairs in (("count", counting), ("build", building)):
        ours, other = zip(*pairs, strict=True)
        ratios = [b / a for a, b in pairs]
        kept = "" if statistics.median(ratios) > 1 else " (GOAL MISSED)"
        print(f"| {name} | {spread(ours)} | {spread(other)} | **{spread(ratios)}**{kept} |")


if __name__ == "__main__":
    main()
