"""Measured steps of a mixture of experts beside the model's, after a calibration at few of them."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from labkit.costmodel.calibration import calibrate
from labkit.costmodel.hardware import Hardware
from labkit.costmodel.step import BadEstimate, StepModel
from labkit.targets import Geometry

COLUMNS = ["kind", "n", "regime", "experts", "measured_ms", "low_ms", "high_ms", "predicted_ms", "error", "fitted"]
REUSE = {"shared": 0.0, "varied": 1.0}  # n tokens on the experts of one; every token on experts of its own choice


def beside(
    rows: pd.DataFrame,
    geometry: Geometry,
    hardware: Hardware | str,
    at: Sequence[int],
    *,
    context_tokens: int = 64,
) -> pd.DataFrame:
    """A row a kind of routing and n: t(n) as measured (median, extremes) and as predicted from t(n) for n in `at`.

    `rows`: kind ("shared" or "varied") n step_ms unique_experts, a row a repeat (benchmarks/verify_cost).
    `regime`: how the kernel reads experts by vLLM's rule; `error`: predicted / measured - 1; `fitted`: the n that
    the calibration saw. Raises BadEstimate for an n in `at` that was not measured.
    """
    found = []
    for kind, group in rows.groupby("kind", sort=False):
        by = group.groupby("n")["step_ms"]
        times = (
            by.quantile([0.0, 0.5, 1.0]).reset_index().pivot_table(index="n", columns="level_1", values="step_ms")
        )
        times = times.set_axis(["low_ms", "step_ms", "high_ms"], axis=1).reset_index().assign(streams=1)
        if missing := sorted(set(at) - set(times["n"])):
            raise BadEstimate(f"no step of {missing[0]} tokens was measured", f"use of {sorted(times['n'])}")
        model = StepModel(geometry, hardware, reuse=REUSE[str(kind)], context_tokens=context_tokens)
        fitted = calibrate(times[times["n"].isin(at)].assign(samples=by.size().min()), model=model)
        table = times.rename(columns={"step_ms": "measured_ms"}).assign(kind=kind, fitted=times["n"].isin(at))
        table["predicted_ms"] = [fitted.step_ms(int(n)) for n in table["n"]]
        table["regime"] = [model.regime(int(n)).loading for n in table["n"]]
        table["experts"] = group.groupby("n")["unique_experts"].mean().to_numpy()
        found.append(table.assign(error=table["predicted_ms"] / table["measured_ms"] - 1))
    return pd.concat(found, ignore_index=True)[COLUMNS]
