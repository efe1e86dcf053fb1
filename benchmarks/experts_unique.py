"""Unique experts of all windows up to 16 tokens: python -m benchmarks.experts_unique

A recording of a million tokens through 60 layers of 384 experts, 8 a token, is written to a file and counted in a
process of its own, whose memory is sampled. The peer, on a sample, sorts each window's experts with NumPy and
counts the changes, one length after the other; both must give the same means.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.measuring import run
from labkit import experts
from labkit.experts.routing import Routing, Writer

TOKENS, LAYERS, EXPERTS, CHOSEN, LONGEST = 1_000_000, 60, 384, 8, 16
DOCUMENT = 1000
SAMPLE = 4000
SECONDS, GIGABYTES = 60.0, 4.0


def write(path: Path, tokens: int, seed: int = 0) -> None:
    """A recording in which half of all tokens choose as their neighbour does, document by document."""
    rng = np.random.default_rng(seed)
    with Writer(path, EXPERTS, range(1, LAYERS + 1), "drawn at random") as writer:
        for number in range(tokens // DOCUMENT):
            first = rng.integers(0, EXPERTS, (DOCUMENT, LAYERS, 1))
            drawn = (first + rng.choice([1, 5, 7, 11], (DOCUMENT, LAYERS, 1)) * np.arange(CHOSEN)) % EXPERTS
            again = rng.random(DOCUMENT) < 0.5
            again[0] = False
            source = np.maximum.accumulate(np.where(again, 0, np.arange(DOCUMENT)))
            writer.append(drawn[source], np.full(DOCUMENT, number))
            writer.categories.append("")


def count(path: Path) -> None:
    """What the measured process does: read, count, report the seconds and the means."""
    tiny = Routing.of(np.zeros((2, 1, 1), int), 2)
    experts.unique_by_window(tiny, ns=[1])  # compilation, or reading what was compiled before
    before = time.perf_counter()
    table = experts.unique_table(Routing.load(path), ns=range(1, LONGEST + 1))
    seconds = time.perf_counter() - before
    means = table.groupby("n")["unique_mean"].mean().tolist()
    print(json.dumps({"seconds": seconds, "means": means}))


def by_sorting(routing: Routing) -> list[float]:
    """The same means by the plain way: every window's experts sorted, the changes counted."""
    means = []
    for n in range(1, LONGEST + 1):
        counts = []
        for begin, end in zip(routing.bounds[:-1], routing.bounds[1:], strict=True):
            for place in range(len(routing.layers)):
                view = np.lib.stride_tricks.sliding_window_view(routing.experts[begin:end, place], n, axis=0)
                ordered = np.sort(view.reshape(len(view), -1), axis=1)
                counts.append(1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1))
        means.append(float(np.concatenate(counts).mean()))
    return means


def main() -> None:
    """Write, count, compare, print."""
    with tempfile.TemporaryDirectory() as folder:
        whole, part = Path(folder) / "whole.safetensors", Path(folder) / "part.safetensors"
        write(whole, TOKENS)
        write(part, SAMPLE)
        command = [sys.executable, "-m", "benchmarks.experts_unique"]
        outcome = run([*command, str(whole)], dict(os.environ))
        sample = run([*command, str(part)], dict(os.environ))
        before = time.perf_counter()
        plain = by_sorting(Routing.load(part))
        peer = time.perf_counter() - before
    if not np.allclose(plain, sample.report["means"], rtol=1e-9):
        raise SystemExit(f"the means differ: {plain} by sorting, {sample.report['means']} by labkit")
    ratio = peer / SAMPLE / (outcome.seconds / TOKENS)
    print(f"unique experts, {TOKENS:,} tokens x {LAYERS} layers x top-{CHOSEN}, all n up to {LONGEST}")
    print(f"  labkit       {outcome.seconds:6.1f} s    goal {SECONDS:.0f} s on 2 cores ({os.cpu_count()} here)")
    print(f"  peak memory  {outcome.peak_mb / 1000:6.2f} GB   goal {GIGABYTES:.0f} GB (mapped file included)")
    print(f"  sorting each window (NumPy) takes {ratio:.0f} times as long a token ({SAMPLE} tokens: {peer:.1f} s)")


if __name__ == "__main__":
    count(Path(sys.argv[1])) if sys.argv[1:] else main()
