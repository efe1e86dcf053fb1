"""The predicted n-gram speedup of each prompt, each category and of all, beside the one that was measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from labkit import bench, ngram
from labkit.prediction.steps import at, speedup, step_costs

CLOSE = 0.10  # a prediction is right within this share of the measurement, or inside its interval
ALL = "all prompts"  # the category of the row over all of them
COLUMNS = ["category", "prompts", "tokens_per_step", "step_cost", "predicted", "predicted_low", "predicted_high"]
COLUMNS += ["predicted_total", "measured", "measured_low", "measured_high", "measured_total", "step_overhead"]
COLUMNS += ["right", "explained", "explained_right"]
MEASURED = {"speedup": "measured", "speedup_low": "measured_low", "speedup_high": "measured_high"}
MEASURED |= {"total_ratio": "measured_total"}


def by_prompt(
    baseline: pd.DataFrame, times: pd.DataFrame, sync: pd.DataFrame | None = None, **lookup: int
) -> pd.DataFrame:
    """A row a prompt of the baseline: prompt_id, category, tokens_per_step and `predicted` speedup.

    Repeats of a prompt are pooled, as bench.paired does. `lookup`: k, lookup_max, lookup_min. NaN without token
    ids or step times.
    """
    rows = []
    for (prompt, category), mine in baseline.groupby(["prompt_id", "category"], sort=False, dropna=False):
        found = ngram.simulate_rows(mine, **lookup)
        row = {"prompt_id": prompt, "category": category, "tokens_per_step": found.tokens_per_step}
        rows.append(row | {"predicted": speedup(found, times, sync)[1]})
    return pd.DataFrame(rows, columns=["prompt_id", "category", "tokens_per_step", "predicted"])


def beside(
    baseline: pd.DataFrame, times: pd.DataFrame, measured: pd.DataFrame, by: pd.DataFrame, **options: Any
) -> pd.DataFrame:
    """`overall` in the first row, `by_category` below it; `measured` and `by` are the two of bench.speedup."""
    rows = [overall(baseline, times, measured, **options), by_category(baseline, times, by, **options)]
    return pd.DataFrame([row for table in rows for row in table.to_dict("records")], columns=COLUMNS)


def by_category(
    baseline: pd.DataFrame, times: pd.DataFrame, measured: pd.DataFrame, **options: Any
) -> pd.DataFrame:
    """A row a category: what the baseline's tokens predict for n-gram, and what was measured (`bench.speedup`).

    `times`: step times of the baseline. `options`, all by name: k, lookup_max, lookup_min; `sync`, step times of
    the baseline under the n-gram server's scheduling; `own`, those of the n-gram server itself
    (bench.speculating_step_times); seed.

    `predicted` and `measured` are medians over prompts with a 95% bootstrap interval over prompts, NaN where
    those are too few (bench.interval). `predicted_total` and `measured_total` pool all tokens, as tokens_per_step
    and `step_cost` do, the predicted mean step of the n-gram server in plain steps of the baseline: the four go
    together. `right`: the prediction is within 10% of the measurement or inside its interval; None without one.
    `step_overhead`: predicted over measured total, how many times as long as predicted an average step took.
    `explained`: `predicted` with `own`: where that is right and the prediction is not, what a step costs was
    misjudged, not what is accepted.
    """
    known = measured.set_index("category")
    none = pd.Series(np.nan, list(MEASURED))
    rows = [
        line(category, mine, times, known.loc[category] if category in known.index else none, **options)
        for category, mine in baseline.groupby("category", sort=False, dropna=False)
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def overall(baseline: pd.DataFrame, times: pd.DataFrame, measured: pd.DataFrame, **options: Any) -> pd.DataFrame:
    """The same in one row over all prompts; `measured` is the one row of bench.speedup, NaN without a variant."""
    return pd.DataFrame([line(ALL, baseline, times, measured.iloc[0], **options)], columns=COLUMNS)


def line(
    name: object,
    baseline: pd.DataFrame,
    times: pd.DataFrame,
    measured: pd.Series,
    *,
    sync: pd.DataFrame | None = None,
    own: pd.DataFrame | None = None,
    seed: int = 0,
    **lookup: int,
) -> dict[str, Any]:
    """One row of `by_category`."""
    sync = times.iloc[:0] if sync is None else sync
    found = ngram.simulate_rows(baseline, **lookup)
    total = speedup(found, times, sync)[1]
    each = by_prompt(baseline, times, sync, **lookup)["predicted"].dropna()
    low, high = bench.interval(each.to_numpy(float), seed=seed)
    row = {"category": name, "prompts": len(each), "tokens_per_step": found.tokens_per_step}
    row |= {"step_cost": step_costs(found, times, sync)[1], "predicted": each.median()}
    row |= {"predicted_low": low, "predicted_high": high, "predicted_total": total}
    row |= {column: measured[theirs] for theirs, column in MEASURED.items()}
    explained = np.nan
    if own is not None and len(own):
        explained = by_prompt(baseline, times, own, **lookup)["predicted"].median()
    row |= {"step_overhead": total / measured["total_ratio"], "right": right(row["predicted"], measured)}
    return row | {"explained": explained, "explained_right": right(explained, measured)}


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """A table to look at: two decimals, no column without any value, and blanks where there is none."""
    return table.dropna(axis="columns", how="all").infer_objects().round(2).astype(object).fillna("")


def right(predicted: float, measured: pd.Series) -> bool | None:
    """Whether a prediction is within 10% or inside the interval; None where no interval was measured."""
    if np.isnan(predicted) or np.isnan(measured["speedup_low"]):
        return None
    near = abs(predicted / measured["speedup"] - 1) <= CLOSE
    return bool(near or measured["speedup_low"] <= predicted <= measured["speedup_high"])


def grid(
    baseline: pd.DataFrame, times: pd.DataFrame, sync: pd.DataFrame, *, k: int, lookup_max: int
) -> pd.DataFrame:
    """ngram.simulate_grid for k of 1, 2, 3, 5 and `k`, lookups up to 5 or `lookup_max`; and column `predicted`.

    `predicted`: the speedup from the step times, over all recorded outputs; drafts longer than what was timed
    count as the longest that was. NaN without step times.
    """
    lengths = range(1, max(lookup_max, 5) + 1)
    table = ngram.simulate_grid(baseline, ks=[1, 2, 3, 5, k], lookup_maxs=lengths, lookup_mins=lengths)
    used = sync if len(sync) else times
    if used.empty:
        return table.assign(predicted=np.nan)
    length = 1 + (table["drafted"] / table["drafts"].where(table["drafts"] > 0)).fillna(0.0)
    drafting = np.interp(length, used["n"], used["step_ms"].astype(float))
    cost = (1 - table["drafting_share"]) * at(used, 1) + table["drafting_share"] * drafting
    return table.assign(predicted=table["tokens_per_step"] * at(times, 1) / cost)
