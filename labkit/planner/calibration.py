"""A short calibration run on the machine at hand with the pipeline's own pieces, and the forecast it gives."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd

from labkit import files
from labkit.costmodel import Range
from labkit.engine import bounds, urls
from labkit.planner.rates import Rates, added, inverse, scaled, times

ANSWER_TOKENS = 16_384  # generated at most
PREFILLED = 16_384  # tokens prefilled at most
PREFILL_CONCURRENCY = 16  # as the extraction asks
TRAINED_CONVERSATIONS = 24
# A short run is not the long one: other programs come and go, caches warm up, the last requests run alone.
AROUND = Range(0.75, 1.0, 1.2)
EXTRACTION = Range(0.6, 0.85, 1.0)  # of bare prefill, as data/hardware_training.json
START = Range(0.7, 1.0, 1.5)  # a later start of a server beside the first


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What a calibration run measured here. Rates in tokens a second, times in seconds.

    answer_tokens: of an answer, an interval where some were cut; cut: the share of those.
    """

    rates: Rates
    answer_tokens: Range
    prompt_tokens: float
    start_s: float
    setup_s: float
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Plain data, read again by `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Calibration:
        """From `as_json`."""
        ranges = {k: Range(**v) for k, v in value["rates"].items() if isinstance(v, dict)}
        rates = Rates(**ranges, source=value["rates"]["source"])
        return cls(**(value | {"rates": rates, "answer_tokens": Range(**value["answer_tokens"])}))


def measure(
    answer: Callable[[Path, int], pd.DataFrame],
    start: Callable[[], Any],
    train: Callable[[Path], pd.DataFrame],
    *,
    scratch: Path,
    max_tokens: int,
    prompts: int,
) -> Calibration:
    """Measure generation, prefill and training on a few conversations; `scratch` is a folder that goes again.

    start() gives the running server (its start is timed); answer(folder, tokens) answers `prompts` prompts through
    it and gives conversations.collect's frame; train(folder) trains on states of random numbers in the folder and
    gives train's metrics (columns tokens, seconds). The training comes first, while no server takes its cores.
    """
    began = time.monotonic()
    limit = min(max_tokens, max(32, ANSWER_TOKENS // prompts))
    with removed(scratch):
        metrics = train(scratch / "training")
        trained = time.monotonic()
        server = start()
        started = time.monotonic()
        dataset = answer(scratch / "answers", limit)
        answered = time.monotonic()
        prefill = prefill_rate(server, list(dataset.input_ids))
    answered_s = answered - started
    decoding_s = max(answered_s - dataset.prompt_tokens.sum() / prefill, 0.2 * answered_s)
    rates = Rates(
        decode=scaled(AROUND, dataset.answer_tokens.sum() / decoding_s),
        prefill=scaled(AROUND, prefill),
        extraction=times(scaled(AROUND, prefill), EXTRACTION),
        training=training_rate(metrics),
        source="calibration run on this machine",
    )
    return Calibration(
        rates=rates,
        answer_tokens=answer_length(dataset, limit, max_tokens),
        prompt_tokens=float(dataset.prompt_tokens.mean()),
        start_s=started - trained,
        setup_s=max(0.0, trained - began - float(metrics.seconds.max())),
        seconds=time.monotonic() - began,
    )


@contextlib.contextmanager
def removed(folder: Path) -> Iterator[None]:
    """An empty folder that is gone afterwards; what a killed run left there goes first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prefill_rate(server: Any, rows: Sequence[Sequence[int]]) -> float:
    """Tokens a second of prefill alone: conversations as prompts, one token each, as the extraction asks."""
    chosen, total = [], 0
    for ids in rows:
        if total < PREFILLED:
            chosen.append([int(token) for token in ids])
            total += len(ids)
    body = {"model": server.model, "max_tokens": 1, "temperature": 0.0}
    made_with = urls.options(server.base_url) | {"timeout": 600, "event_hooks": bounds.HOOKS}
    with httpx.Client(**made_with) as client, ThreadPoolExecutor(PREFILL_CONCURRENCY) as pool:

        def ask(ids: list[int]) -> None:
            client.post(f"{server.base_url}/completions", json=body | {"prompt": ids}).raise_for_status()

        began = time.monotonic()
        list(pool.map(ask, chosen))
        return total / (time.monotonic() - began)


def training_rate(metrics: pd.DataFrame) -> Range:
    """Tokens a second once it runs, from train's metrics: pooled, and the slowest and fastest third around it."""
    after = metrics.iloc[max(1, len(metrics) // 5) - 1 :]  # the first steps compile and warm up
    tokens, seconds = after.tokens.to_numpy()[1:], np.diff(after.seconds.to_numpy())
    thirds = np.array_split(np.arange(len(tokens)), min(3, len(tokens)))
    each = [tokens[part].sum() / max(seconds[part].sum(), 1e-9) for part in thirds]
    pooled = tokens.sum() / max(seconds.sum(), 1e-9)
    return Range(min(each) * AROUND.low, pooled, max(each) * AROUND.high)


def answer_length(dataset: pd.DataFrame, limit: int, max_tokens: int) -> Range:
    """Tokens of an answer under `max_tokens`; those cut at `limit` may be as long as allowed."""
    mean, count = float(dataset.answer_tokens.mean()), len(dataset)
    error = 2 * float(dataset.answer_tokens.std(ddof=0)) / np.sqrt(count)
    longer = float((dataset.finish_reason == "length").mean()) * (max_tokens - limit)
    low, high = max(1.0, mean - error), min(float(max_tokens), mean + longer + error)
    return Range(low, min(max(low, mean + longer / 2), high), high)


def forecast(found: Calibration, *, train: int, held_out: int, epochs: int, max_length: int) -> pd.DataFrame:
    """A row a step (answers, states, training): its tokens and seconds, each with _low and _high.

    Held-out conversations are simulated after each epoch, a forward pass, a third of what training them costs.
    The states need a server of their own, the training builds the head first.
    """
    prompt, answer = found.prompt_tokens, found.answer_tokens
    length = Range(*(min(float(max_length), prompt + tokens) for tokens in answer))
    rows, total = found.rates, train + held_out
    asked = scaled(inverse(rows.prefill), total * prompt)
    steps = {
        "answers": (scaled(answer, total), added(asked, per_token(scaled(answer, total), rows.decode))),
        "states": (
            scaled(length, total),
            added(scaled(START, found.start_s), per_token(scaled(length, total), rows.extraction)),
        ),
        "training": (
            scaled(length, train * epochs),
            added(
                scaled(START, found.setup_s),
                per_token(scaled(length, epochs * (train + held_out / 3)), rows.training),
            ),
        ),
    }
    named = [
        {"step": step} | ends("tokens", tokens) | ends("predicted_s", seconds)
        for step, (tokens, seconds) in steps.items()
    ]
    return pd.DataFrame(named)


def per_token(tokens: Range, rate: Range) -> Range:
    """Seconds for tokens that are themselves uncertain."""
    return times(tokens, inverse(rate))


def ends(name: str, value: Range) -> dict[str, float]:
    """A range as three columns."""
    return {f"{name}_low": value.low, name: value.mid, f"{name}_high": value.high}


def kept(path: Path, digest: str, measured: Callable[[], Calibration]) -> Calibration:
    """The calibration in `path` where it is of these inputs, else one made now and written there."""
    if path.exists():
        record = files.read_json(path)
        if record.get("digest") == digest:
            return Calibration.from_json(record["calibration"])
    found = measured()
    files.write_json(path, {"digest": digest, "calibration": found.as_json()})
    return found
