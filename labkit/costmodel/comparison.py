"""Measured steps of a mixture of experts beside the model's, after a calibration at few of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from labkit import files, settings
from labkit.costmodel.calibration import calibrate
from labkit.costmodel.hardware import Hardware
from labkit.costmodel.step import BadEstimate, StepModel
from labkit.targets import Geometry, geometry

COLUMNS = ["kind", "n", "regime", "experts", "measured_ms", "low_ms", "high_ms", "predicted_ms", "error", "fitted"]
MEASURED = ("outputs", "published", "h200-moe", "verify_cost.parquet")  # in the repository
MEASURED_ON = "nvidia-h200"
CALIBRATED_AT = {"kimi-k2.5": (1, 12), "qwen3-30b-a3b": (1, 16)}  # n
REUSE = {"shared": 0.0, "varied": 1.0}  # n tokens on the experts of one; every token on experts of its own choice


def beside(
    rows: pd.DataFrame,
    shape: Geometry,
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
        times = by.agg(["min", "median", "max"]).set_axis(["low_ms", "step_ms", "high_ms"], axis=1)
        times = times.reset_index().assign(streams=1)
        if missing := sorted(set(at) - set(times["n"])):
            raise BadEstimate(f"no step of {missing[0]} tokens was measured", f"use of {sorted(times['n'])}")
        model = StepModel(shape, hardware, reuse=REUSE[str(kind)], context_tokens=context_tokens)
        fitted = calibrate(times[times["n"].isin(at)].assign(samples=by.size().min()), model=model)
        table = times.rename(columns={"step_ms": "measured_ms"}).assign(kind=kind, fitted=times["n"].isin(at))
        table["predicted_ms"] = [fitted.step_ms(int(n)) for n in table["n"]]
        table["regime"] = [model.regime(int(n)).loading for n in table["n"]]
        table["experts"] = group.groupby("n")["unique_experts"].mean().to_numpy()
        found.append(table.assign(error=table["predicted_ms"] / table["measured_ms"] - 1))
    return pd.concat(found, ignore_index=True)[COLUMNS]


def cut_config(model: str, layers: int, weights: str) -> dict[str, Any]:
    """config.json of a shipped text model alone, cut to its first layers; INT4 stays only with weights "int4"."""
    shipped = files.read_json(settings.root() / "data" / "models" / f"{model}.json")
    text = dict(shipped.get("text_config", shipped))
    text = {key: value for key, value in text.items() if not key.startswith("_")}
    if text["model_type"] == "kimi_k2":
        text |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    if weights != "int4":
        text.pop("quantization_config", None)
    return text | {"num_hidden_layers": layers}


def measured_steps() -> pd.DataFrame:
    """What verifying cost on one H200, vLLM 0.24 (benchmarks/verify_cost), beside the model: `each_beside`."""
    return each_beside(files.read_parquet(settings.root().joinpath(*MEASURED)), shape_of, CALIBRATED_AT)


def shape_of(model: str, weights: str, layers: int) -> Geometry:
    """The geometry of `cut_config`."""
    return geometry(cut_config(model, layers, weights))


def each_beside(
    rows: pd.DataFrame, shape: Callable[[str, str, int], Geometry], at: Mapping[str, Sequence[int]]
) -> pd.DataFrame:
    """`beside` for each model and kind of weights, calibrated at the model's n in `at`.

    Columns model weights layers moe_layers and those of `beside`. `shape`: the geometry of model, weights, layers.
    """
    found = []
    same = ["model", "weights", "layers", "moe_layers"]
    for (model, weights, layers, moe), group in rows.groupby(same, sort=False):
        geometry_of = shape(str(model), str(weights), int(layers))
        table = beside(group, geometry_of, MEASURED_ON, at[str(model)])
        told = {"model": model, "weights": weights, "layers": layers, "moe_layers": moe}
        found.append(table.assign(**told)[[*same, *COLUMNS]])
    return pd.concat(found, ignore_index=True)


def verify_table(steps: pd.DataFrame, n: int = 4) -> pd.DataFrame:
    """A row a model and kind of weights of `measured_steps`: what n tokens cost over one, as shared and as varied.

    pairwise_up_to: the most tokens that the rule reads pair by pair, 0 where it never does; shared, varied:
    t(n) / t(1) measured, t(1) the mean of both, which are one experiment there; saved: 1 - t(n) shared / t(n)
    varied, what sharing all experts saves; the error columns are of the steps that the calibration did not see.
    """
    rows = []
    for (model, weights), group in steps.groupby(["model", "weights"], sort=False):
        times = group.pivot_table(index="n", columns="kind", values="measured_ms")
        ratio, unseen = times.loc[n] / times.loc[1].mean(), group.loc[~group["fitted"], "error"].abs()
        pairs = group.loc[group["regime"] == "pairwise", "n"]
        row = {"model": model, "weights": weights, "layers": group["layers"].iloc[0], "n": n}
        row |= {"pairwise_up_to": int(pairs.max()) if len(pairs) else 0}
        row |= {"shared": ratio["shared"], "varied": ratio["varied"]}
        row |= {"saved": 1 - times.loc[n, "shared"] / times.loc[n, "varied"]}
        rows.append(row | {"median_error": unseen.median(), "largest_error": unseen.max()})
    return pd.DataFrame(rows)
