"""A step model under other assumptions, fast enough for a slider."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from labkit.costmodel.questions import length_at, rate_for
from labkit.costmodel.ranges import Range
from labkit.costmodel.step import StepModel
from labkit.experts.budgets import budgets_to_try


def assuming(model: StepModel, *, allreduce_us: Any = None, **changes: Any) -> StepModel:
    """The model with another AllReduce latency, or with other fields of StepModel.

    What a measured step leaves over stays as the unchanged model has it (in the middle): so a lower latency
    shortens the step instead of enlarging the rest.
    """
    machine = model.hardware
    if model.leaves_over:
        rest = Range.of(float(model.other(model.values)[0]))
        changes = {"other_ms": rest} | changes
        # Other settings keep the measured count of AllReduces, not the step's time.
        kept = {"allreduces": model.allreduces}
        machine = dataclasses.replace(machine, measured={model.geometry.name: kept})
    if allreduce_us is not None:
        machine = dataclasses.replace(machine, allreduce_us=Range.of(allreduce_us))
    return dataclasses.replace(model, hardware=machine, **changes)


def what_if(
    model: StepModel,
    *,
    acceptance: float,
    k: int = 3,
    streams: int = 1,
    reuse: Any = None,
    allreduce_us: Any = None,
    budget: float = 0,
    ks: Iterable[int] = range(1, 9),
    case: str = "",
) -> pd.DataFrame:
    """A row a k: cost and gain of speculation under the given assumptions; `chosen` marks k.

    acceptance: conditional rate of every position; budget: MoE-Spec's experts a layer (0: none; lossy). Columns
    case num_speculative_tokens n chosen experts_loaded kernel step_ms verify_ratio acceptance_length break_even
    speedup, those of ratios with _low and _high. Pure: nothing is read or kept.
    """
    given = {} if reuse is None else {"reuse": reuse}
    changed = assuming(model, allreduce_us=allreduce_us, expert_budget=budget, **given)
    plain = changed.step_at(1, streams, changed.values)
    rows = []
    for each in sorted({*ks, k}):
        row = {
            "case": case,
            "num_speculative_tokens": each,
            "n": each + 1,
            "chosen": each == k,
            "streams": streams,
        }
        row |= {"experts_loaded": changed.experts_loaded(each + 1, streams)}
        row |= {"kernel": changed.regime(each + 1, streams).loading}
        step, length = changed.step_at(each + 1, streams, changed.values), length_at(acceptance, each)
        drafting = each * changed.values["draft_ms"] + changed.values["host_ms"]
        row |= {"step_ms": float(step[0]), "acceptance_length": length}
        cost = (step + drafting) / plain
        for name, values in (("verify_ratio", step / plain), ("break_even", cost), ("speedup", length / cost)):
            found = Range.over(np.atleast_1d(values))
            row |= {name: found.mid, f"{name}_low": found.low, f"{name}_high": found.high}
        rows.append(row)
    return pd.DataFrame(rows)


def at_length(model: StepModel, *, acceptance_length: float, k: int, r: Any = None, **more: Any) -> pd.DataFrame:
    """`what_if` from an acceptance length (bonus included) at k; r is its `reuse`.

    Other k get the conditional rate that gives k this length, the same for every position. A length that k drafted
    tokens cannot have is taken as the nearest that they can: a slider may say anything.
    """
    rate = rate_for(min(max(acceptance_length, 1.0), k + 1.0), k)
    return what_if(model, acceptance=rate, k=k, reuse=r, **more)


def what_ifs(model: StepModel, *, acceptance_length: float, k: int, reuse: Mapping[str, Any]) -> pd.DataFrame:
    """`at_length` of several cases: the model as it is, each given reuse, and what one might change.

    Those are an AllReduce in half its time, where there is any, and for a mixture of experts a budget of MoE-Spec
    (lossy: what it loses in acceptance is not in it).
    """
    cases: dict[str, dict[str, Any]] = {"as predicted": {}}
    cases |= {f"r {case}": {"r": curve} for case, curve in reuse.items()}
    latency, g = model.hardware.allreduce_us.mid, model.geometry
    if model.allreduces and latency:
        cases[f"AllReduce in {latency / 2:.0f} us"] = {"allreduce_us": latency / 2}
    if g.is_moe:
        budget = budgets_to_try(g.n_routed_experts, g.num_experts_per_tok, k + 1, (0.6,))[0]
        cases[f"budget of {budget} experts (lossy)"] = {"budget": budget}
    given = {"acceptance_length": acceptance_length, "k": k}
    return pd.concat([at_length(model, **given, **c, case=name) for name, c in cases.items()], ignore_index=True)


def choices(model: StepModel, acceptance_length: float, k: int) -> dict[str, list[float]]:
    """Values for a slider over each argument of `at_length`; each list begins with the model's own.

    `budget` runs from what one token needs to what k + 1 independent ones touch, 0 is none (E is lossy).
    """
    chosen, total = model.geometry.num_experts_per_tok, model.geometry.n_routed_experts
    own = float(np.interp(k + 1, list(model.curve), [r.mid for r in model.curve.values()]))
    latency = round(model.hardware.allreduce_us.mid, 1)
    found: dict[str, list[float]] = {
        "k": [k, *(other for other in range(1, 9) if other != k)],
        "acceptance_length": [round(acceptance_length, 2), *np.arange(1, 6.01, 0.25).tolist()],
        "allreduce_us": [latency, *(round(latency * share / 10, 1) for share in range(1, 16) if share != 10)],
    }
    if model.geometry.is_moe:
        found["r"] = [round(own, 2), *(np.arange(11) / 10).tolist()]
        found["budget"] = [0, *budgets_to_try(total, chosen, k + 1, np.arange(3, 11) / 10)]
    return found if latency else {name: values for name, values in found.items() if name != "allreduce_us"}
