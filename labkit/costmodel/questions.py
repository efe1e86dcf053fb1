"""What people ask a cost model: the best k, the concurrency at which speculation stops paying, what matters most.

Functions take a model with step_range_ms, verify_ratio, break_even and speedup: a StepModel, or measured steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from labkit.costmodel.calibration import MeasuredSteps
from labkit.costmodel.ranges import Range, one_by_one
from labkit.costmodel.step import BadEstimate, StepModel, checked_length

Model = StepModel | MeasuredSteps
Acceptance = float | Sequence[float]
STREAMS = (1, 2, 4, 8, 16, 32, 64, 128)


def length_at(acceptance: Acceptance, k: int) -> float:
    """Acceptance length (bonus included) of k drafted tokens from conditional rates: 1 + sum of their products.

    One rate stands for all positions (Leviathan 2023: (1 - a^(k+1)) / (1 - a)); of several the last one goes on.
    Source: SPEED-Bench, equation 1. Raises BadEstimate for rates outside 0 to 1.
    """
    rates = np.atleast_1d(np.asarray(acceptance, float))
    if not len(rates) or rates.min() < 0 or rates.max() > 1:
        raise BadEstimate(f"conditional acceptance rates of {rates.tolist()}", "give rates between 0 and 1")
    every = np.concatenate([rates, np.full(max(0, k - len(rates)), rates[-1])])[:k]
    return 1 + float(np.cumprod(every).sum())


def rate_for(length: float, k: int) -> float:
    """The constant conditional rate that gives k drafted tokens an acceptance length; inverse of `length_at`."""
    from scipy import optimize

    length = checked_length(length, k).mid
    return float(optimize.brentq(lambda rate: length_at(rate, k) - length, 0, 1))


def speedups(
    model: Model, acceptance: Acceptance, ks: Iterable[int] = range(1, 9), streams: Iterable[int] = (1,)
) -> pd.DataFrame:
    """A row a k and number of streams: what drafting k tokens costs and brings at the given conditional rates.

    Columns num_speculative_tokens streams acceptance_length tpot_ms step_ms verify_ratio break_even speedup, the
    last three with _low and _high; tpot_ms is with speculation.
    """
    rows = [answer(model, length_at(acceptance, k), k, count) for count in streams for k in ks]
    return pd.DataFrame(rows)


def answer(model: Model, acceptance_length: Any, k: int, streams: int = 1) -> dict[str, Any]:
    """One row of `speedups`, for an acceptance length (a figure or a range)."""
    low, mid, high = model.speedup(acceptance_length, k, streams)
    plain, step = model.step_range_ms(1, streams).mid, model.step_range_ms(k + 1, streams).mid
    row = {"num_speculative_tokens": k, "streams": streams, "acceptance_length": Range.of(acceptance_length).mid}
    row |= {"tpot_ms": plain / mid, "step_ms": step}
    ranges = {"verify_ratio": model.verify_ratio(k + 1, streams), "break_even": model.break_even(k, streams)}
    for name, found in (ranges | {"speedup": Range(low, mid, high)}).items():
        row |= {name: found.mid, f"{name}_low": found.low, f"{name}_high": found.high}
    return row


def best_k(table: pd.DataFrame) -> pd.DataFrame:
    """Of `speedups`, the row with the greatest speedup for each number of streams."""
    best = table.groupby("streams")["speedup"].idxmax()
    return table.loc[best].reset_index(drop=True)


def concurrency(model: Model, acceptance_length: Any, k: int, streams: Iterable[int] = STREAMS) -> pd.DataFrame:
    """A row a number of streams: `answer`, with tokens a second of all streams, without and with speculation."""
    frame = pd.DataFrame([answer(model, acceptance_length, k, count) for count in sorted(set(streams))])
    plain = np.array([model.step_range_ms(1, count).mid for count in frame["streams"]])
    return frame.assign(
        tok_s=frame["streams"] / plain * 1e3, speculative_tok_s=frame["streams"] / frame["tpot_ms"] * 1e3
    )


def stops_paying(table: pd.DataFrame) -> dict[str, float]:
    """The fewest streams from which on `concurrency` shows no gain: low, mid, high; infinite where it always pays.

    `low` takes the speedup's lower end, so speculation may stop paying from there on; at `high` it surely has.
    """
    found = {}
    for name, column in (("low", "speedup_low"), ("mid", "speedup"), ("high", "speedup_high")):
        pays = table["streams"][table[column] >= 1]
        beyond = table["streams"][table["streams"] > (pays.max() if len(pays) else 0)]
        found[name] = float(beyond.min()) if len(beyond) else float("inf")
    return found


def sensitivity(model: StepModel, acceptance_length: Any, k: int, streams: int = 1) -> pd.DataFrame:
    """How far each uncertain input alone moves the speedup: input low high width, the widest first."""
    length = checked_length(acceptance_length, k)
    figures = {name: value for name, value in model.figures.items() if not value.exact}
    values = one_by_one(figures) | {n: np.array([v.mid]) for n, v in model.figures.items() if v.exact}
    found = length.mid / np.broadcast_to(model.break_even_at(k, streams, values), 1 + 2 * len(figures))
    rows = [{"input": name, "ends": found[1 + 2 * i : 3 + 2 * i]} for i, name in enumerate(figures)]
    if not length.exact:
        rows.append(
            {"input": "acceptance_length", "ends": np.array([length.low, length.high]) / length.mid * found[0]}
        )
    ordered = [{"input": r["input"], "low": r["ends"].min(), "high": r["ends"].max()} for r in rows]
    frame = pd.DataFrame(ordered, columns=["input", "low", "high"])
    frame = frame.assign(width=frame["high"] - frame["low"])
    return frame.sort_values("width", ascending=False, ignore_index=True)
