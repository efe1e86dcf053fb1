"""What benchmark rows say: figures by group, and the paired comparison of two variants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from labkit.errors import LabError

RESAMPLES = 9999


class MixedCounts(LabError):
    """Two variants counted their tokens in different ways, so a ratio of rates would mean nothing."""


def succeeded(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of requests that ended well."""
    return rows[rows["error"].isna()]


def summary(rows: pd.DataFrame, by: Sequence[str] = ("variant", "category")) -> pd.DataFrame:
    """A row a group: counts of requests and tokens, median times, pooled decode rate, and advice where needed.

    tok_s is pooled: (tokens - 1 of each request) / decode time, so it is 1000 / the token-weighted TPOT. Times are
    medians over requests. tokens_* are means a request. Groups in which nothing succeeded stay, with NaN.
    """
    groups = rows.groupby(list(by), sort=False, dropna=False)
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
        "tokens_prompt": mean(good["tokens_prompt"]),
        "tokens_reasoning": mean(good["tokens_reasoning"]),
        "tokens_answer": mean(good["tokens_answer"]),
        "tokens_total": int(good["tokens_total"].sum()),
        "advice": advice(group),
    }


def rate(rows: pd.DataFrame) -> float:
    """Pooled tokens a second while decoding; NaN without a request of two tokens."""
    timed = rows[rows["tpot_ms"].notna()]
    seconds = timed["decode_ms"].sum() / 1e3
    return float((timed["tokens_timed"] - 1).sum() / seconds) if seconds > 0 else np.nan


def all_gaps(rows: pd.DataFrame) -> pd.Series:
    """The gaps between chunks of all requests, ms."""
    return rows["gaps_ms"].explode().astype("float64")


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
        thinking = bool((spent["tokens_reasoning"] > 0).any())
        on = "went into reasoning" if thinking else "ended without any text of an answer"
        raised = f"raise max_tokens (to {8 * budget}, say)"
        notes.append(f"{len(spent)} of {len(good)} requests: all {budget} tokens {on}; {raised}")
    if (good["tokens_cached"].fillna(0) > 0).any():
        notes.append("prompts were served from the prefix cache: TTFT is too low; turn prefix caching off")
    if (good["tokens_source"] == "chunks").any():
        notes.append("the server reports no usage: chunks were counted, which is too few where one holds several")
    hidden = good["tokens_timed"] < good["tokens_total"]
    if hidden.fillna(False).any():
        notes.append("reasoning is hidden by the server: TTFT includes it, rates are the answer's")
    return "; ".join(notes)


def paired(rows: pd.DataFrame, baseline: str, variant: str) -> pd.DataFrame:
    """A row a prompt that both variants answered: decode rates, their ratio, token totals, same output or not.

    Repeats of a prompt are pooled, tokens and times apart. ratio = variant tok/s / baseline tok/s, both output
    tokens over decode time. Raises MixedCounts where the two did not count tokens in the same way.
    """
    good = succeeded(rows)
    good = good[good["tpot_ms"].notna() & good["variant"].isin([baseline, variant])]
    sources = {name: set(good.loc[good["variant"] == name, "tokens_source"]) for name in (baseline, variant)}
    if all(sources.values()) and sources[baseline] != sources[variant]:
        raise MixedCounts(
            f"tokens of {baseline} come from {sources[baseline]}, those of {variant} from {sources[variant]}",
            "measure both on servers that report usage",
        )
    found = []
    for (prompt, category), group in good.groupby(["prompt_id", "category"], sort=False, dropna=False):
        one, other = group[group["variant"] == baseline], group[group["variant"] == variant]
        if len(one) and len(other):
            found.append({"prompt_id": prompt, "category": category} | compared(one, other))
    columns = ["prompt_id", "category", "baseline_tok_s", "variant_tok_s", "ratio", "baseline_tokens"]
    return pd.DataFrame(found, columns=[*columns, "variant_tokens", "baseline_ms", "variant_ms", "same_output"])


def compared(one: pd.DataFrame, other: pd.DataFrame) -> dict[str, object]:
    """Both variants' figures of one prompt; tokens are a request's mean, times those of all requests."""
    return {
        "baseline_tok_s": rate(one),
        "variant_tok_s": rate(other),
        "ratio": rate(other) / rate(one),
        "baseline_tokens": float(one["tokens_total"].mean()),
        "variant_tokens": float(other["tokens_total"].mean()),
        "baseline_ms": float(one["decode_ms"].sum() / (one["tokens_timed"] - 1).sum()),
        "variant_ms": float(other["decode_ms"].sum() / (other["tokens_timed"] - 1).sum()),
        "same_output": same_output(one, other),
    }


def same_output(one: pd.DataFrame, other: pd.DataFrame) -> float:
    """Share of the variant's outputs that equal the baseline's first one, token for token; NaN without ids."""
    ids = [[tuple(ids) for ids in rows["output_token_ids"].dropna()] for rows in (one, other)]
    if not ids[0] or not ids[1]:
        return np.nan
    return float(np.mean([output == ids[0][0] for output in ids[1]]))


def speedup(
    rows: pd.DataFrame,
    baseline: str,
    variant: str,
    *,
    by: str | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> pd.DataFrame:
    """How much faster `variant` decodes, paired by prompt: a row, or one for each value of `by` ("category").

    speedup is the median over prompts of the ratio of decode rates; low and high its percentile bootstrap
    interval over prompts (scipy), NaN below two prompts. total_ratio pools all tokens and times. length_drift:
    variant tokens / baseline tokens - 1. left_out: prompts that only one of the two answered.
    """
    pairs = paired(rows, baseline, variant)
    groups = [("all", pairs)] if by is None else list(pairs.groupby(by, sort=False, dropna=False))
    prompts = rows[rows["variant"].isin([baseline, variant])]
    table = []
    for name, group in groups:
        asked = prompts if by is None else prompts[prompts[by] == name]
        left_out = asked["prompt_id"].nunique() - len(group)
        table.append({by or "scope": name} | statistics(group, confidence, seed) | {"left_out": left_out})
    return pd.DataFrame(table)


def statistics(pairs: pd.DataFrame, confidence: float, seed: int) -> dict[str, float]:
    """The speedup columns of a group of pairs; NaN without any."""
    low, high = interval(pairs["ratio"].to_numpy(float), confidence, seed)
    tokens = pairs[["baseline_tokens", "variant_tokens"]].sum()
    return {
        "prompts": len(pairs),
        "speedup": median(pairs["ratio"]),
        "speedup_low": low,
        "speedup_high": high,
        "total_ratio": total_ratio(pairs),
        "length_drift": float(tokens["variant_tokens"] / tokens["baseline_tokens"] - 1) if len(pairs) else np.nan,
        "same_output": mean(pairs["same_output"]),
    }


def total_ratio(pairs: pd.DataFrame) -> float:
    """Ratio of all tokens over all decode time, each prompt weighing as many tokens as it has."""
    if pairs.empty:
        return np.nan
    totals = [
        pairs[f"{side}_tokens"].sum() / (pairs[f"{side}_tokens"] * pairs[f"{side}_ms"]).sum()
        for side in ("baseline", "variant")
    ]
    return float(totals[1] / totals[0])


def interval(values: np.ndarray, confidence: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap interval of the median; (NaN, NaN) below two values."""
    if len(values) < 2:
        return np.nan, np.nan
    found = stats.bootstrap(
        (values,),
        np.median,
        confidence_level=confidence,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)
