"""What benchmark rows say: figures by group and by concurrency level, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

COLD = {"tpot_ms": 1.5, "ttft_ms": 3.0}  # times the same prompt's later median: that first request was cold
RESAMPLES = 9999  # of a bootstrap
FEWEST = 3  # prompts of an interval: that of two has these two as its ends, whatever they are
DRIFT = 0.1  # of TPOT from the first repeat to the last, from which on the summary says so


def succeeded(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of requests that ended well."""
    return rows[rows["error"].isna()]


def summary(rows: pd.DataFrame, by: str | Sequence[str] = ("variant", "category")) -> pd.DataFrame:
    """A row a group: counts of requests and tokens, median times, pooled decode rate, and advice where needed.

    tok_s is pooled: (tokens - 1 of each request) / decode time, so it is 1000 / the token-weighted TPOT. Times are
    medians over requests. tokens_* are means a request. Groups in which nothing succeeded stay, with NaN.
    """
    by = [by] if isinstance(by, str) else list(by)
    groups = rows.groupby(by, sort=False, dropna=False)
    return pd.DataFrame(
        dict(zip(by, key if isinstance(key, tuple) else (key,), strict=True)) | figures(group)
        for key, group in groups
    )


def figures(group: pd.DataFrame) -> dict[str, object]:
    """The summary columns of one group."""
    good = succeeded(group)
    return {
        "requests": len(group),
        "failed": len(group) - len(good),
        "budget_exhausted": int(good["budget_exhausted"].sum()),
        "tok_s": rate(good),
        "ttft_ms": median(good["ttft_ms"]),
        "ttft_answer_ms": median(good["ttft_answer_ms"]),
        "tpot_ms": median(good["tpot_ms"]),
        "tpot_p90_ms": quantile(good["tpot_ms"], 0.9),
        "chunk_gap_p50_ms": quantile(all_gaps(good), 0.5),
        "chunk_gap_p99_ms": quantile(all_gaps(good), 0.99),
        "itl_p50_ms": quantile(token_itl(good), 0.5),
        "itl_p99_ms": quantile(token_itl(good), 0.99),
        "tokens_prompt": mean(good["tokens_prompt"]),
        "tokens_reasoning": mean(good["tokens_reasoning"]),
        "tokens_answer": mean(good["tokens_answer"]),
        "tokens_total": int(good["tokens_total"].sum()),
        "drift": drift(good),
        "advice": advice(group),
    }


def levels(rows: pd.DataFrame, by: str | Sequence[str] = ("variant", "concurrency")) -> pd.DataFrame:
    """A row a variant and concurrency level: what the server did as a whole beside what one request saw.

    throughput_tok_s: all tokens of the level over the time from its first request to its last token, warm-up not
    in it, an interruption neither. tok_s as in `summary`: of one stream. Percentiles are over requests.
    """
    by, found = [by] if isinstance(by, str) else list(by), []
    for key, group in rows.groupby(by, sort=False, dropna=False):
        good = succeeded(group)
        row = dict(zip(by, key, strict=True)) | {"requests": len(group), "failed": len(group) - len(good)}
        row |= {"wall_s": wall_s(good), "throughput_tok_s": np.nan, "tok_s": rate(good)}
        if row["wall_s"] > 0:
            row["throughput_tok_s"] = float(good["tokens_total"].sum() / row["wall_s"])
        for name in ("ttft_ms", "tpot_ms"):
            row |= {f"{name[:-3]}_p{q}_ms": quantile(good[name], q / 100) for q in (50, 99)}
        found.append(row)
    return pd.DataFrame(found)


def wall_s(rows: pd.DataFrame) -> float:
    """Seconds from the first request to the last token, added up over sessions."""
    ends = rows["started_s"] + rows["e2e_ms"] / 1e3
    sessions = rows["session"].fillna("")
    return float((ends.groupby(sessions).max() - rows["started_s"].groupby(sessions).min()).sum())


def rate(rows: pd.DataFrame) -> float:
    """Pooled tokens a second while decoding; NaN without a request of two tokens."""
    timed = rows[rows["tpot_ms"].notna()]
    seconds = timed["decode_ms"].sum() / 1e3
    return float((timed["tokens_timed"] - 1).sum() / seconds) if seconds > 0 else np.nan


def rate_interval(rows: pd.DataFrame, seed: int = 0, confidence: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval over prompts of `rate`, tok/s; (NaN, NaN) below three prompts.

    A prompt is drawn with all its repeats, its tokens and its time: they do not vary apart from each other.
    """
    timed = succeeded(rows)
    timed = timed[timed["tpot_ms"].notna()]
    tokens = (timed["tokens_timed"] - 1).groupby(timed["prompt_id"]).sum().to_numpy(float)
    seconds = timed["decode_ms"].groupby(timed["prompt_id"]).sum().to_numpy(float) / 1e3
    if len(tokens) < FEWEST:
        return np.nan, np.nan
    drawn = np.random.default_rng(seed).integers(0, len(tokens), (RESAMPLES, len(tokens)))
    rates = tokens[drawn].sum(axis=1) / seconds[drawn].sum(axis=1)
    low, high = np.quantile(rates, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def all_gaps(rows: pd.DataFrame) -> pd.Series:
    """The gaps between chunks of all requests, ms."""
    return rows["gaps_ms"].explode().astype("float64")


def token_itl(rows: pd.DataFrame) -> pd.Series:
    """The time of each token after a chunk's predecessor, ms: a gap shared out over its chunk's tokens.

    Empty where the server tells neither token ids nor a running usage: a gap alone is no token's time.
    """
    known = rows[rows["chunk_tokens"].notna()]
    found = [np.zeros(0)]
    for gaps, tokens in zip(known["gaps_ms"], known["chunk_tokens"], strict=True):
        count = np.asarray(tokens, np.int64)[1:]
        found.append(np.repeat(np.asarray(gaps, float) / np.maximum(count, 1), count))
    return pd.Series(np.concatenate(found))


def drift(rows: pd.DataFrame) -> float:
    """Change of TPOT from the first repeat to the last: median over prompts of ratio - 1; NaN with one repeat."""
    known = rows[rows["tpot_ms"].notna()].sort_values("repeat")
    keys = ["variant", "prompt_id", "concurrency"]
    ends = known.groupby(keys, dropna=False)[["tpot_ms", "repeat"]].agg(["first", "last"])
    ends = ends[ends["repeat", "first"] < ends["repeat", "last"]]
    return median(ends["tpot_ms", "last"] / ends["tpot_ms", "first"]) - 1


def cold(rows: pd.DataFrame) -> bool:
    """Whether a session's first request was far slower than the same prompt later: too little warm-up."""
    known = rows[rows["tpot_ms"].notna() & rows["started_s"].notna()]
    for _, session in known.groupby(["variant", "session", "concurrency"], dropna=False):
        first = session.loc[session["started_s"].idxmin()]
        later = session[(session["prompt_id"] == first["prompt_id"]) & (session["repeat"] != first["repeat"])]
        if any(first[name] > times * median(later[name]) for name, times in COLD.items()):
            return True
    return False


def median(values: pd.Series) -> float:
    """Median, NaN for none."""
    return quantile(values, 0.5)


def mean(values: pd.Series) -> float:
    """Mean, NaN for none."""
    known = values.dropna()
    return float(known.mean()) if len(known) else np.nan


def quantile(values: pd.Series, q: float) -> float:
    """Quantile of the known values, NaN for none."""
    known = values.dropna().astype("float64")
    return float(known.quantile(q)) if len(known) else np.nan


def advice(group: pd.DataFrame) -> str:
    """What to change before these figures can be trusted; empty where nothing is wrong."""
    good, notes = succeeded(group), []
    if len(good) < len(group):
        notes.append(
            f"{len(group) - len(good)} of {len(group)} requests failed: {group['error'].dropna().iloc[0]}"
        )
    spent = good[good["budget_exhausted"].fillna(False)]
    if len(spent):
        budget = int(spent["max_tokens"].max())
        thinking = bool((spent["tokens_reasoning"].fillna(1) > 0).any())  # unknown: hidden
        on = "went into reasoning" if thinking else "ended without any text of an answer"
        raised = f"raise max_tokens (to {8 * budget}, say)"
        notes.append(f"{len(spent)} of {len(good)} requests: all {budget} tokens {on}; {raised}")
    if (good["tokens_cached"].fillna(0) > 0).any():
        notes.append(
            "prompts were served from the prefix cache: TTFT is too low; turn prefix caching off, or give "
            "unique_prompts=True"
        )
    if (good["tokens_source"] == "chunks").any():
        notes.append("the server reports no usage: chunks were counted, which is too few where one holds several")
    hidden = good[good["reasoning_hidden"].fillna(False)]
    if (hidden["reasoning_source"] != "unknown").any():
        notes.append("reasoning is hidden by the server: TTFT includes it, rates are the answer's")
    if (hidden["reasoning_source"] == "unknown").any():
        notes.append(
            "the usage counts more tokens than bytes of text arrived: some were generated and not streamed, and "
            "nothing tells how many, so there is no rate; have the server stream its reasoning, or count it"
        )
    if (good["tokens_streamed"] < good["tokens_total"]).fillna(False).any():
        notes.append("fewer token ids arrived than were counted: use a stream interval of 1 to replay outputs")
    if good["extra_body"].fillna("").str.contains("ignore_eos").any():
        notes.append("ignore_eos makes the model ramble on: do not read acceptance or a speedup from these rows")
    if cold(good):
        notes.append("the first request was far slower than the same prompt later: measure with more warm-up")
    if abs(drift(good)) > DRIFT and good["prompt_id"].nunique() > 2:
        notes.append(
            f"TPOT changed by {drift(good):+.0%} from the first repeat to the last: other load, heat, or too "
            "little warm-up; measure again with more of it, or on a quiet machine"
        )
    return "; ".join(notes)


def rate_told(overall: pd.Series, interval: tuple[float, float]) -> str:
    """A variant's rate with its interval over prompts (`rate_interval`), tok/s."""
    low, high = interval
    spread = "too few prompts for an interval" if np.isnan(low) else f"95% interval {low:.1f} to {high:.1f}"
    return f"{overall.tok_s:.1f} tok/s ({spread})"


def rates_sentence(overall: pd.Series, by_category: pd.DataFrame, interval: tuple[float, float]) -> str:
    """The rate of one variant in Markdown, from its rows of `summary`: the one over all, those by category."""
    return (
        f"The engine decodes **{rate_told(overall, interval)}** (TPOT {overall.tpot_ms:.1f} ms, TTFT "
        f"{overall.ttft_ms:.0f} ms, medians over {overall.requests} requests, {overall.failed} failed), from "
        f"{by_category.tok_s.min():.1f} to {by_category.tok_s.max():.1f} tok/s by category."
    )
