"""What a sweep says: a row a point, the same by category, acceptance by position; prediction beside each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from labkit import acceptance, bench
from labkit.acceptance import Acceptance
from labkit.costmodel.verdict import GO, NO_GO, UNCLEAR
from labkit.evaluation.candidates import BASELINE, EAGLE3, NGRAM
from labkit.evaluation.measuring import Measured
from labkit.evaluation.predicting import Predictor
from labkit.evaluation.rig import MARKS

ENDS = ("", "_low", "_high")
NOT_MEASURED, TOO_FEW = "not measured", "too few prompts"
MISSING = "–"
FORMS = {"acceptance_length": ".2f", "tok_s": ".1f", "throughput_tok_s": ".1f"}
FORMS |= {"step_ms_predicted": ".1f", "step_ms_measured": ".1f"}
# The columns that are read, the verdict in sight, and what they are called: words wrap where names do not.
READ = dict.fromkeys(["category", *MARKS, "prompts", "speedup", "verdict"]) | {
    "over_ngram": "over n-gram",
    "predicted": None,
    "acceptance_length": "acceptance length",
    "tok_s": "tok/s",
    "throughput_tok_s": "tok/s of all",
    "step_ms_measured": "step ms, measured",
    "step_ms_predicted": "step ms, predicted",
}


def points(measured: Measured, predictor: Predictor, seed: int) -> pd.DataFrame:
    """A row a variant, k, streams and temperature, over all benchmark prompts.

    prompts, acceptance_length (bonus included; the server's own counts), tok_s (of one stream, pooled),
    throughput_tok_s (of all), ttft_ms and tpot_ms (medians), speedup over the baseline at the same streams and
    temperature (median over prompts of paired decode rates, with its 95% bootstrap interval) and its verdict,
    over_ngram likewise, predicted speedup with its interval, step_ms as predicted and as measured, side_by_side
    (share of the requests that were pairs in time).
    """
    rows = measured.sweep
    return pd.DataFrame(
        [figures(mine, others, point, measured, predictor, seed) for point, mine, others in each_point(rows)]
    )


def by_category(measured: Measured, predictor: Predictor, seed: int) -> pd.DataFrame:
    """`points` of each category of prompts, with a column `category`; no interval below three prompts."""
    rows, found = measured.sweep, []
    for point, mine, others in each_point(rows):
        for category, part in mine.groupby("category", sort=False):
            same = others[others["category"] == category]
            row = {"category": category} | figures(part, same, point, measured, predictor, seed, whole=False)
            found.append(row)
    return pd.DataFrame(found)


def positions(measured: Measured) -> pd.DataFrame:
    """Acceptance by draft position of each point: MARKS, position, unconditional_rate, conditional_rate."""
    found = []
    for point, mine, _others in each_point(measured.sweep):
        accepted = accepted_at(mine, point, measured.counts)
        if accepted is not None:
            found.append(accepted.by_position().assign(**dict(zip(MARKS, point, strict=True))))
    columns = [*MARKS, "position", "accepted", "unconditional_rate", "conditional_rate"]
    return pd.concat(found, ignore_index=True)[columns] if found else pd.DataFrame(columns=columns)


def each_point(rows: pd.DataFrame) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame, pd.DataFrame]]:
    """(point, its rows, all rows at the same streams and temperature)."""
    for point, mine in rows.groupby(MARKS, sort=True):
        same = (rows["streams"] == point[2]) & (rows["temperature"] == point[3])
        yield point, mine, rows[same]


def accepted_at(
    rows: pd.DataFrame, point: tuple[Any, ...], counts: Mapping[tuple[Any, ...], Acceptance]
) -> Acceptance | None:
    """The acceptance of a point's rows by their own counts, else by the server's counters over the whole point."""
    if rows["drafts"].notna().any():
        return acceptance.from_rows(rows)
    return counts.get(tuple(point))


def figures(
    mine: pd.DataFrame,
    others: pd.DataFrame,
    point: tuple[Any, ...],
    measured: Measured,
    predictor: Predictor,
    seed: int,
    *,
    whole: bool = True,
) -> dict[str, Any]:
    """One row of `points`; `whole`: over all prompts, so that the server's counters fit."""
    variant, k, streams, _temperature = point
    accepted = accepted_at(mine, point, measured.counts if whole else {})
    line = bench.summary(mine.assign(variant=variant), by=["variant"]).iloc[0]
    row = dict(zip(MARKS, point, strict=True)) | {"prompts": mine["prompt_id"].nunique(), "requests": len(mine)}
    row["acceptance_length"] = accepted.mean_length if accepted else math.nan
    row["acceptance_rate"] = accepted.rate if accepted else math.nan
    row["tok_s"] = line["tok_s"]
    if whole:
        row["throughput_tok_s"] = bench.levels(mine, by=["variant"])["throughput_tok_s"].iloc[0]
    row |= {name: line[name] for name in ("ttft_ms", "tpot_ms")}
    row |= ratio(mine, others, BASELINE, "speedup", seed) | ratio(mine, others, NGRAM, "over_ngram", seed)
    row["verdict"] = "" if variant == BASELINE else word(row)
    if variant == EAGLE3:
        row |= predictor.of(mine, accepted, int(k), int(streams))
    row["side_by_side"] = pairs_in_time(mine, others[others["variant"] == BASELINE])
    return row


def ratio(mine: pd.DataFrame, others: pd.DataFrame, base: str, name: str, seed: int) -> dict[str, float]:
    """The speedup of a point over another variant at the same streams and temperature; NaN over itself."""
    theirs = others[others["variant"] == base]
    if theirs.empty or mine["variant"].iloc[0] == base:
        return {f"{name}{end}": math.nan for end in ENDS}
    both = pd.concat([theirs.assign(variant="base"), mine.assign(variant="mine")], ignore_index=True)
    line = bench.speedup(both, "base", "mine", seed=seed).iloc[0]
    return {f"{name}{end}": float(line[f"speedup{end}"]) for end in ENDS}


def word(row: Mapping[str, Any]) -> str:
    """Go, no-go or unclear of a row's speedup interval; too few prompts where it has a speedup and no interval."""
    low, high = row["speedup_low"], row["speedup_high"]
    if pd.isna(low) or pd.isna(high):
        return NOT_MEASURED if pd.isna(row["speedup"]) else TOO_FEW
    return GO if low > 1 else NO_GO if high < 1 else UNCLEAR


def pairs_in_time(mine: pd.DataFrame, theirs: pd.DataFrame) -> float:
    """Share of a point's requests measured in the same turn as the baseline's; NaN without a baseline."""
    keys = ["prompt_id", "repeat", "session"]
    known = set(theirs[keys].itertuples(index=False, name=None))
    return (
        float(np.mean([key in known for key in mine[keys].itertuples(index=False, name=None)]))
        if known
        else np.nan
    )


def told(row: Mapping[str, Any], name: str = "speedup") -> str:
    """A speedup with its interval, as far as there is one: 1.52× [1.33, 1.67]."""
    middle, low, high = (row.get(f"{name}{end}", math.nan) for end in ENDS)
    if pd.isna(middle):
        return MISSING
    return f"{middle:.2f}×" + ("" if pd.isna(low) or pd.isna(high) else f" [{low:.2f}, {high:.2f}]")


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """What one reads of `points` or `by_category`, as text: an interval in one column; no column that is empty."""
    chosen = table.reindex(columns=[name for name in READ if name in table])
    for name in {"speedup", "over_ngram", "predicted"} & set(chosen):
        chosen[name] = [told(row, name).replace(" ", "\u00a0") for row in table.to_dict("records")]
    if "over_ngram" in chosen:
        chosen.loc[chosen["variant"] == BASELINE, "over_ngram"] = MISSING  # n-gram's own speedup, upside down
    for name in FORMS.keys() & set(chosen):
        chosen[name] = [MISSING if pd.isna(value) else f"{value:{FORMS[name]}}" for value in table[name]]
    if "throughput_tok_s" in chosen and (table["streams"] == 1).all():
        chosen = chosen.drop(columns="throughput_tok_s")  # of one stream: tok_s less the time to the first token
    if (table["temperature"] == 0).all():
        chosen = chosen.drop(columns="temperature")
    kept = [name for name in chosen if chosen.empty or not (chosen[name] == MISSING).all()]
    return chosen[kept].rename(columns={name: READ[name] or name for name in kept}).reset_index(drop=True)
