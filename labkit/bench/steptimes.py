"""How long a decode step takes that works on n tokens: the cost side of every prediction about speculation."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize

from labkit import acceptance, engine, files, targets
from labkit.bench import attached
from labkit.bench.conditions import attached_digest, fingerprint
from labkit.bench.measure import measure_by_turns, measure_variant, served_as
from labkit.bench.run import BadRun, run
from labkit.bench.statistics import succeeded

COLUMNS = ["n", "streams", "step_ms", "low_ms", "high_ms", "samples", "tokens_are"]
EDGE = 4  # tokens at both ends of a stream that are left out
TOKENS = {"smoke": 24, "demo": 48, "full": 96}
PROMPT = "Write the numbers from {n} on, in words, one after the other:"
RESAMPLES = 200
# Tokens that come together with the one before: a quarter or more of the gaps hardly anything beside the median,
# or the median itself hardly anything beside the mean. Steps vary less, and a stall now and then moves neither.
UNEVEN, BUNCHED = 0.4, 0.1


def step_times(
    server: Any,
    ns: Iterable[int],
    *,
    streams: Iterable[int] = (1,),
    tokens: int = 48,
    model: str | None = None,
    repeats: int = 2,
) -> pd.DataFrame:
    """t(n): median time of a step that works on n neighbouring tokens of each of `streams` texts.

    Columns n streams step_ms low_ms high_ms (quartiles) samples tokens_are. n greedy requests decode side by side,
    so that every step has n tokens; a step's time is the gap between a request's tokens while all n decode.
    Request i begins i tokens further on in one recorded greedy answer, so the n tokens of a step are neighbours
    in one text, and touch the experts that a step verifying them would touch (tokens_are "neighbours"). Servers
    that return no token ids get n texts of their own ("independent": a mixture of experts then looks too dear).

    Where n x streams answers come faster than server or client can deliver them, chunks arrive in bunches and the
    gaps are no steps: such an n has no row, and without n = 1 there is none, since every ratio is over it.

    What differs from verifying a draft: attention reads the cached context n times, and n answers are sent
    instead of one; both make t(n) a little too long. A proposer, and what a server gives up for it, is not in
    it: `speculating_step_times`. Raises BadRun for a server that speculates, and what `bench.run` raises.
    """
    refuse_speculation(server)
    ns, several = sorted(set(ns)), sorted(set(streams))
    options = {"model": model, "extra_body": {"ignore_eos": True}, "shuffle": False}
    texts = [PROMPT.format(n=text) for text in range(1, max(several) + 1)]
    told = run(server, texts, max_tokens=max(ns[-1] - 1, 1), repeats=1, variant="text", **options)
    rows = []
    for n, count in [(n, count) for count in several for n in ns]:
        prompts, kind = side_by_side(told, n, count)
        options |= {"variant": f"{n} x {count} tokens a step", "concurrency": n * count}
        answers = run(server, prompts, max_tokens=tokens, repeats=repeats, **options)
        gaps = [inner_gaps(group) for _, group in succeeded(answers).groupby("repeat")]
        rows.append({"n": n, "streams": count} | quartiles(np.concatenate(gaps)) | {"tokens_are": kind})
    found = pd.DataFrame(rows, columns=COLUMNS).dropna(subset=["step_ms"]).reset_index(drop=True)
    lost = [count for count in several if 1 in ns and not ((found["n"] == 1) & (found["streams"] == count)).any()]
    return found[~found["streams"].isin(lost)].reset_index(drop=True)


def refuse_speculation(server: Any) -> None:
    """Raise BadRun where the server counts drafts: its steps would have other numbers of tokens than requests."""
    with contextlib.suppress(acceptance.Unreadable):
        if acceptance.snapshot(server).speculates:
            raise BadRun(
                "the server speculates, so a step of n requests has more than n tokens",
                "measure step times on the baseline; speculating_step_times reads a speculating server's rows",
            )


def side_by_side(told: pd.DataFrame, n: int, streams: int) -> tuple[list[Any], str]:
    """The prompts of n x streams requests, and what their tokens are: neighbours, or independent of each other."""
    chosen = told.head(streams)
    if chosen["prompt_token_ids"].isna().any() or chosen["output_token_ids"].isna().any():
        return [PROMPT.format(n=text) for text in range(1, n * streams + 1)], "independent"
    pairs = [map(list, pair) for pair in zip(chosen["prompt_token_ids"], chosen["output_token_ids"], strict=True)]
    return [prompt + output[:i] for prompt, output in pairs for i in range(n)], "neighbours"


def inner_gaps(rows: pd.DataFrame) -> np.ndarray:
    """Gaps, ms a token, that lie wholly in the time in which all requests of one repeat were decoding."""
    first = rows["started_s"] * 1e3 + rows["ttft_ms"]
    last = rows["started_s"] * 1e3 + rows["e2e_ms"]
    found = [np.zeros(0)]
    for begin, gaps, tokens in zip(first, rows["gaps_ms"], rows["chunk_tokens"], strict=True):
        gaps = np.asarray(gaps, float)
        count = np.ones(len(gaps), np.int64) if tokens is None else np.asarray(tokens, np.int64)[1:]
        ends = begin + np.cumsum(gaps)
        inside = (ends - gaps >= first.max()) & (ends <= last.min() + 1e-6)
        inside[:EDGE], inside[len(inside) - EDGE :] = False, False
        found.append(np.repeat(gaps[inside] / np.maximum(count[inside], 1), count[inside]))
    return np.concatenate(found)


def quartiles(values: np.ndarray) -> dict[str, float]:
    """Median, quartiles and number of step times; NaN for none, and where they came in bunches."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]) if len(values) else [np.nan] * 3
    if len(values) and (low < UNEVEN * middle or middle < BUNCHED * values.mean()):
        low = middle = high = np.nan
    return {"step_ms": middle, "low_ms": low, "high_ms": high, "samples": len(values)}


def speculating_step_times(rows: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """t(1) and t(1 + drafted) of a speculating server, proposer included, from its benchmark rows.

    Decode time of a request = plain steps x t(1) + drafting steps x t(1 + drafted), fitted over requests (least
    squares, not negative); low and high: 95% bootstrap interval over requests. n of the second row is 1 + the mean
    draft length. Where every step drafts there is no first row. One row of the frame for each that is known;
    measure with one request in flight. Raises acceptance.NoCounters for rows without counts of drafts.
    """
    known = succeeded(rows)
    known = known[known["drafts"].notna() & known["decode_ms"].notna()]
    pooled = acceptance.from_rows(known)
    drafting = known["drafts"].to_numpy(float)
    steps = np.column_stack([np.maximum(known["chunks"].to_numpy(float) - 1 - drafting, 0), drafting])
    kinds = np.flatnonzero(steps.sum(axis=0) > 0)
    low, middle, high = fitted(steps[:, kinds], known["decode_ms"].to_numpy(float), seed)
    ns = (1.0, 1 + (pooled.drafted / pooled.drafts if pooled.drafts else 0.0))
    return pd.DataFrame(
        {"n": ns[kind], "streams": 1, "step_ms": middle[i], "low_ms": low[i], "high_ms": high[i]}
        | {"samples": int(steps[:, kind].sum()), "tokens_are": ("plain", "drafted")[kind]}
        for i, kind in enumerate(kinds)
    )


def fitted(steps: np.ndarray, times: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Times of each kind of step from [requests, kinds] counts: low, middle, high, bootstrapped over requests."""
    rng = np.random.default_rng(seed)
    picks = [rng.integers(0, len(times), len(times)) for _ in range(RESAMPLES)]
    drawn = [optimize.nnls(steps[pick], times[pick])[0] for pick in picks]
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    return low, optimize.nnls(steps, times)[0], high


def measure_baseline(settings: Any, prompts: pd.DataFrame, longest: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The baseline's rows and its step times for n = 1 to `longest`; both from disk where they fit.

    One server serves both, the settings' own or attached one; it starts only where something has to be measured.
    Where the n-gram server is attached, too, its rows are measured now, by turns with these (`measure_by_turns`).
    Raises what labkit.bench.attached says of given servers that are not there, or not what they should be.
    """
    attached.require_answers(settings)
    if getattr(settings, "variant_server", "") and hasattr(settings, "lookup"):
        measure_by_turns(settings, "ngram", prompts, **settings.lookup)
    target = (settings.server and settings.target) or targets.resolve(settings.target)
    with engine.on_demand(target, "baseline", url=settings.server, **served_as(settings)) as server:
        rows = measure_variant(settings, "baseline", prompts, server=server)
        times = kept(settings, server, longest)
    return rows, times


def measure_step_times(settings: Any, variant: str, longest: int) -> pd.DataFrame:
    """Step times of another variant that does not speculate, on a server of its own; from disk where they fit.

    None (no rows) where the settings attach a server: the lab cannot restart that one with other options.
    """
    if settings.server:
        return pd.DataFrame(columns=COLUMNS)
    with engine.on_demand(targets.resolve(settings.target), variant, **served_as(settings)) as server:
        return kept(settings, server, longest, variant)


def kept(
    settings: Any,
    server: engine.OnDemand,
    longest: int,
    variant: str = "baseline",
    *,
    points: Mapping[int, Iterable[int]] | None = None,
    also: Iterable[Path] = (),
) -> pd.DataFrame:
    """Step times from the stage's folder (or `also`), else measured now.

    For n = 1 to `longest` at one stream, and where `points` are given the n of each of its numbers of streams.
    With a warning, none where the server speculates. What could not be timed (`step_times`) has no row.
    """
    name = "step-times" if variant == "baseline" else f"step-times-{variant}"
    parts = [kept_at(settings, server, name, range(1, longest + 1), 1, {"longest": longest}, also)]
    for streams, ns in sorted((points or {}).items()):
        marks = {"streams": streams, "ns": sorted(ns)}
        parts.append(kept_at(settings, server, f"{name}-{streams}", ns, streams, marks, also))
    return pd.concat(parts, ignore_index=True) if len(parts) > 1 else parts[0]


def kept_at(
    settings: Any,
    server: engine.OnDemand,
    name: str,
    ns: Iterable[int],
    streams: int,
    marks: dict[str, Any],
    also: Iterable[Path],
) -> pd.DataFrame:
    """`kept` at one number of streams; `marks` are what its file depends on besides the settings."""
    folder = Path(settings.folder)
    none = pd.DataFrame({"prompt_id": []})
    digest = fingerprint(settings, name, none, url=settings.server, **marks, scale=settings.scale)
    if settings.server:
        digest = attached_digest([folder], name, digest, settings.server, settings.model)
    file = f"{name}-{digest}.parquet"
    for place in () if os.environ.get("LABKIT_FORCE") else (folder, *also):
        if (place / "measured" / file).exists():
            return files.read_parquet(place / "measured" / file)
    options = {"tokens": TOKENS[settings.scale], "model": settings.model or None, "streams": (streams,)}
    try:
        times = step_times(server.get(), ns, **options)
    except BadRun as error:
        warnings.warn(f"no step times: {error.what}", stacklevel=2)
        return pd.DataFrame(columns=COLUMNS)
    if len(times) == len(set(ns)):  # else it is tried again the next time
        files.write_parquet(folder / "measured" / file, times)
    return times
