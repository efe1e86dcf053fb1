"""A step model under other assumptions, fast enough for a slider."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from labkit.costmodel.questions import length_at
from labkit.costmodel.ranges import Range
from labkit.costmodel.step import StepModel


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
