"""A step model's few unknown figures from measured step times, and which kernel regime those times show."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
from scipy import optimize

from labkit.costmodel.kernels import PAIRWISE, UNIQUE
from labkit.costmodel.ranges import Range
from labkit.costmodel.step import BadEstimate, StepModel

NOISE = 0.02  # of a step time: the least that a measurement is trusted to be wrong by
# Standard deviations of the priors. Kernels reach half to twice the bandwidth that a benchmark does. A further
# token costs little beside a step (2% for SmolLM2 on 2 cores): growth is bytes unless the points say otherwise.
LOOSE = 0.5
TOKEN_SHARE = 0.05


def fitted(step_times: pd.DataFrame, model: StepModel) -> StepModel:
    """The model with other_ms, efficiency and token_ms fitted to measured t(n); two points or more.

    `step_times`: columns n streams step_ms, perhaps low_ms high_ms (bench.step_times). t(n) = other + bytes(n) /
    (efficiency x bandwidth) + token x (tokens - 1) + AllReduces: linear in other, 1 / efficiency and token, none
    of them negative. The model's own figures are the prior (least squares with one more row each), which decides
    only what the points leave open: with two points, how much of the growth is bytes. What the points leave
    uncertain in the slope is the range of token_ms. Raises BadEstimate for fewer than two different points.
    """
    known = step_times.dropna(subset=["step_ms"])
    if len(known[["n", "streams"]].drop_duplicates()) < 2:
        raise BadEstimate(
            f"{len(known)} measured step times", "measure t(n) at two points or more, n = 1 among them"
        )
    rows, times = design(known, model)
    sigma = errors(known)
    prior, width = prior_of(model, times.min())
    matrix = np.vstack([rows / sigma[:, None], np.diag(1 / width)])
    other, slowness, token = optimize.lsq_linear(
        matrix, np.concatenate([times / sigma, prior / width]), bounds=(0, np.inf), method="bvls"
    ).x
    # One point's error and another's: how far the slope between the outermost may be off.
    span = rows[:, 2].max() - rows[:, 2].min()
    wide = float(np.hypot(sigma[rows[:, 2].argmin()], sigma[rows[:, 2].argmax()]) / span) if span else 0.0
    told = f"fitted to {len(known)} measured step times"
    machine = dataclasses.replace(
        model.hardware,
        efficiency=Range.of(1 / max(slowness, 1e-9)),
        token_ms=Range(max(0.0, token - wide), token, token + wide),
        measured={},
        sources={**model.hardware.sources, "efficiency": told, "token_ms": told},
    )
    return dataclasses.replace(
        model, hardware=machine, other_ms=float(other), sources={**model.sources, "other_ms": told}
    )


def design(known: pd.DataFrame, model: StepModel) -> tuple[np.ndarray, np.ndarray]:
    """([points, 3] factors of other, 1 / efficiency and token, [points] times without AllReduces)."""
    rows, times = [], []
    for point in known.itertuples():
        n, streams = int(point.n), int(point.streams)
        reading = sum(model.gigabytes(n, streams).values()) / model.hardware.bandwidth_gb_s.mid * 1e3
        rows.append([1.0, reading, n * streams - 1.0])
        times.append(point.step_ms - model.terms(n, streams)["AllReduce"])
    return np.array(rows), np.array(times)


def errors(known: pd.DataFrame) -> np.ndarray:
    """[points] standard deviations: of the quartiles where they are known, at least NOISE."""
    least = NOISE * known["step_ms"].to_numpy(float)
    if not {"low_ms", "high_ms", "samples"} <= set(known.columns):
        return least
    spread = (known["high_ms"] - known["low_ms"]).to_numpy(float) / 1.35  # of a normal distribution
    return np.maximum(least, np.nan_to_num(spread / np.sqrt(known["samples"].to_numpy(float))))


def prior_of(model: StepModel, shortest_ms: float) -> tuple[np.ndarray, np.ndarray]:
    """Means and widths of other, 1 / efficiency and token before anything was measured."""
    low, mid, high = model.hardware.efficiency
    other, token = model.figures["other_ms"].mid, model.hardware.token_ms.mid
    width = max((1 / low - 1 / high) / 2, LOOSE / mid)
    return np.array([other, 1 / mid, token]), np.array([shortest_ms, width, TOKEN_SHARE * shortest_ms])


def which_regime(step_times: pd.DataFrame, model: StepModel) -> pd.DataFrame:
    """How well each way of reading experts explains measured t(n): loading error (root mean square, relative).

    "auto" is vLLM's rule, which may change between the points. The first row explains them best; the others'
    errors say how sure that is.
    """
    rows = []
    for loading in ("auto", UNIQUE, PAIRWISE):
        fit = fitted(step_times, dataclasses.replace(model, loading=loading))
        off = [fit.step_ms(int(p.n), int(p.streams)) / p.step_ms - 1 for p in step_times.itertuples()]
        rows.append({"loading": loading, "error": float(np.sqrt(np.mean(np.square(off))))})
    return pd.DataFrame(rows).sort_values("error", ignore_index=True, kind="stable")
