"""Extraction beside bare prefill at the same concurrency: python -m benchmarks.extract_vs_prefill [--quick]

Two vLLM servers of SmolLM2 run side by side, one plain and one that gives hidden states; one at a time is busy. In
turn, over the same rows: completions of one token from the plain server (bare prefill), the same ones from the
extracting server with the files left where they are (what the engine's side costs), and `labkit.extract.run`.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd

from benchmarks.measuring import spread
from labkit import conversations, engine, extract, files, settings, targets

CONCURRENCY, PASSES, ROWS = 16, 5, 64
QUICK_PASSES, QUICK_ROWS = 2, 24
GOAL = 0.90
MAX_LENGTH = 512
NAMES = ("bare prefill", "extracting server, files left", "labkit.extract.run", "labkit.extract.run, fp8")


def make_rows(folder: Path, count: int, vocab_size: int) -> pd.DataFrame:
    """A data set of token ids at random, 64 to 320 a row: no two rows share a prefix."""
    random = np.random.default_rng(0)
    ids = [random.integers(1000, vocab_size, length).tolist() for length in random.integers(64, 321, count)]
    frame = pd.DataFrame({"input_ids": ids, "seq_len": [len(row) for row in ids], "prompt_tokens": 1})
    files.write_parquet(folder / "dataset.parquet", frame.assign(split="train"))
    return conversations.load(folder)


def ask(client: httpx.Client, server: Any, ids: np.ndarray) -> None:
    """A completion of one token."""
    body = {"model": server.model, "prompt": ids.tolist(), "max_tokens": 1, "temperature": 0.0}
    client.post(f"{server.base_url}/completions", json=body).raise_for_status()


def prefill(server: Any, rows: pd.DataFrame) -> None:
    """A completion of one token for each row."""
    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    with (
        httpx.Client(timeout=600, limits=limits, trust_env=False) as client,
        ThreadPoolExecutor(CONCURRENCY) as pool,
    ):
        list(pool.map(partial(ask, client, server), rows.input_ids))


def seconds(work: Callable[[], Any]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[tuple[Any, Any]]:
    """The plain server and the one that gives states."""
    target = targets.resolve("smollm2")
    layers = [*extract.layers_of("", target.geometry.num_hidden_layers), target.geometry.num_hidden_layers]
    options = {"log_dir": folder, "max_model_len": MAX_LENGTH, "max_num_seqs": CONCURRENCY}
    with (
        engine.serve(target, "baseline", **options) as plain,
        engine.serve(target, "extract", layers=layers, storage=folder / "staging", **options) as giving,
    ):
        yield plain, giving


def taken(folder: Path, server: Any, rows: pd.DataFrame, form: str) -> None:
    """The lab's extraction of all rows into a fresh folder."""
    out = folder / "states"
    shutil.rmtree(out, ignore_errors=True)
    target = targets.resolve("smollm2")
    extract.run(folder / "data", server, out, target=target, concurrency=CONCURRENCY, form=form)
    if len(list(out.glob("hs_*.safetensors"))) != len(rows):
        raise RuntimeError(f"{out} lacks rows")


def measure(folder: Path, plain: Any, giving: Any, count: int, passes: int) -> tuple[pd.DataFrame, int]:
    """Seconds of each of `NAMES` in each pass, and the tokens of one pass."""
    rows = make_rows(folder / "data", count, targets.resolve("smollm2").geometry.vocab_size)
    by_form = [partial(taken, folder, giving, rows, form) for form in ("bf16", "fp8")]
    work = dict(zip(NAMES, [partial(prefill, plain, rows), partial(prefill, giving, rows), *by_form], strict=True))
    found = []
    for number in range(passes + 1):
        times = {}
        first = number % len(NAMES)  # whoever comes first finds its server idle: each in its turn
        for name in [*NAMES[first:], *NAMES[:first]]:
            times[name] = seconds(work[name])
            for file in (folder / "staging").glob("*"):
                file.unlink(missing_ok=True)
        if number:  # the first pass warms up
            found.append(times)
    return pd.DataFrame(found), int(rows.seq_len.sum())


def main() -> None:
    """Print the table."""
    quick = "--quick" in sys.argv[1:]
    count, passes = (QUICK_ROWS, QUICK_PASSES) if quick else (ROWS, PASSES)
    with tempfile.TemporaryDirectory(dir=settings.cache()) as folder, servers(Path(folder)) as (plain, giving):
        times, tokens = measure(Path(folder), plain, giving, count, passes)
    show(times, tokens, count)


def show(times: pd.DataFrame, tokens: int, count: int) -> None:
    """Print what was measured."""
    passes = len(times)
    print(f"\nSmolLM2, {count} rows, {tokens} tokens, {CONCURRENCY} at a time, {passes} passes in turn")
    print("\n| | tokens/s | beside bare prefill of the same pass |")
    print("|---|---|---|")
    for name in NAMES:
        ratios = (times[NAMES[0]] / times[name]).tolist()
        kept = "" if name != NAMES[2] else " (goal kept)" if np.median(ratios) >= GOAL else " (GOAL MISSED)"
        print(f"| {name} | {spread((tokens / times[name]).tolist())} | {spread(ratios)}{kept} |")


if __name__ == "__main__":
    main()
