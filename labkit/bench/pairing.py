"""The paired comparison of two variants: prompt by prompt, on the same count of tokens."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

from labkit.bench.statistics import FEWEST, RESAMPLES, mean, median, rate, succeeded
from labkit.errors import LabError


class MixedCounts(LabError):
    """Two variants counted their tokens in different ways, so a ratio of rates would mean nothing."""


class MixedLevels(LabError):
    """Rows of several concurrency levels where one ratio was asked for."""


def paired(rows: pd.DataFrame, baseline: str, variant: str) -> pd.DataFrame:
    """A row a prompt (and level) that both variants answered: decode rates, ratio, token totals, same output.

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
    keys = ["prompt_id", "category", *(["concurrency"] if "concurrency" in good else [])]
    for values, group in good.groupby(keys, sort=False, dropna=False):
        one, other = group[group["variant"] == baseline], group[group["variant"] == variant]
        if len(one) and len(other):
            found.append(dict(zip(keys, values, strict=True)) | compared(one, other))
    columns = [*keys, "baseline_tok_s", "variant_tok_s", "ratio", "baseline_tokens"]
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
    """How much faster `variant` decodes, paired by prompt: a row, or one for each value of `by`.

    `by`: "category", or "concurrency" where the rows have several levels (MixedLevels without it).
    speedup is the median over prompts of the ratio of decode rates; low and high its percentile bootstrap
    interval over prompts (scipy), NaN below three prompts. total_ratio pools all tokens and times. length_drift:
    variant tokens / baseline tokens - 1. left_out: prompts that not both answered; where that is all of a
    category, its row says so.
    """
    pairs = paired(rows, baseline, variant)
    prompts = rows[rows["variant"].isin([baseline, variant])]
    groups = [("all", prompts)] if by is None else prompts.groupby(by, sort=False, dropna=False)
    table = []
    for name, asked in groups:
        group = pairs if by is None else pairs[pairs[by].isna() if pd.isna(name) else pairs[by] == name]
        refuse_levels(group, by)
        left_out = asked["prompt_id"].nunique() - len(group)
        table.append({by or "scope": name} | statistics(group, confidence, seed) | {"left_out": left_out})
    return pd.DataFrame(table)


def refuse_levels(pairs: pd.DataFrame, by: str | None) -> None:
    """Raise MixedLevels where one figure would pool what was measured at several levels of concurrency."""
    found = pairs["concurrency"].unique() if "concurrency" in pairs else []
    if by != "concurrency" and len(found) > 1:
        raise MixedLevels(
            f"the rows are of {', '.join(map(str, found))} requests in flight",
            'give by="concurrency", or the rows of one level: speculation pays differently at each',
        )


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
    """Percentile bootstrap interval of the median; (NaN, NaN) below three values."""
    if len(values) < FEWEST:
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
