"""A served model that is known: what a fit explains, what the model predicts, and what was published."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pandas as pd

from labkit import files, settings
from labkit.costmodel.drafting import draft_ms, head
from labkit.costmodel.questions import concurrency
from labkit.costmodel.ranges import Range
from labkit.costmodel.step import StepModel
from labkit.experts import expected

Scenario = Mapping[str, Any]


def scenario_for(target: str, hardware: str) -> Scenario | None:
    """The scenario of that target on that hardware in data/scenarios, if there is one."""
    for path in sorted((settings.root() / "data" / "scenarios").glob("*.json")):
        found = files.read_json(path)
        if (found["target"], found["hardware"]) == (target, hardware):
            return found
    return None


def published_trend() -> dict[int, tuple[float, float, float]]:
    """Reuse by window length as published for trained models; the upper end is independent routing.

    What a model at hand does is not known before it is recorded, so independence is not excluded.
    """
    trend = expected.reuse_trend(expected.published_reuse())
    return {n: (low, mid, 1.0) for n, (low, mid, _high) in trend.items()}


TREND = "data/reuse.json: published for trained models (low, mid) up to independent routing (high)"


def model_of(target: str, hardware: str, *, context_tokens: int = 2048, **changes: Any) -> StepModel:
    """A step model with the published reuse, and its source."""
    sources = {"reuse": TREND} | changes.pop("sources", {})
    given = {"reuse": published_trend(), "context_tokens": context_tokens} | changes
    return StepModel(target, hardware, sources=sources, **given)


def step_table(model: StepModel) -> pd.DataFrame:
    """What a plain step is made of: part, gb, ms, share, kind (predicted, fit, RESIDUAL)."""
    gb, terms = model.gigabytes(1), model.terms(1)
    total = sum(terms.values())
    rows = []
    for name, ms in terms.items():
        kind = "predicted"
        if model.leaves_over and name in ("AllReduce", "other"):
            kind = "fit" if name == "AllReduce" else "RESIDUAL"
        elif name == "other":
            kind = "assumed"
        if ms or name in gb:
            rows.append({"part": name, "gb": gb.get(name), "ms": ms, "share": ms / total, "kind": kind})
    return pd.DataFrame(rows)


def fit_table(scenario: Scenario, model: StepModel) -> pd.DataFrame:
    """The observed step taken apart: what a, the count and the share say of each other, and what is left over."""
    seen, terms = scenario["observed"], model.terms(1)
    reading = sum(ms for name, ms in terms.items() if name not in ("AllReduce", "other", "per token"))
    communicating = seen["step_ms"] * seen["allreduce_share"]
    rows = [
        ("step, ms", seen["step_ms"], "measured"),
        ("AllReduces a step", seen["allreduces"], "measured; vLLM's code makes " + str(code_count(model))),
        ("AllReduce, ms", communicating, "measured share x step"),
        ("one AllReduce, us", communicating / seen["allreduces"] * 1e3, "fit: waiting for other ranks included"),
        ("one AllReduce in the model, us", model.hardware.allreduce_us.mid, "data/hardware.json"),
        ("reading, ms", reading, "predicted: bytes / (efficiency x bandwidth)"),
        ("everything else, ms", terms["other"], "RESIDUAL: what makes the step come out, not a prediction"),
    ]
    return pd.DataFrame(rows, columns=["figure", "value", "kind"])


def code_count(model: StepModel) -> int:
    """AllReduces a step by vLLM's model code."""
    return model.geometry.expected_allreduces(model.tensor_parallel_size)


def ngram_table(scenario: Scenario, model: StepModel) -> pd.DataFrame:
    """The acceptance length that an n-gram slowdown implies, v(k + 1) / slowdown, for each k and reuse."""
    seen, rows = scenario["ngram"], []
    machine = dataclasses.replace(model.hardware, allreduce_us_per_kib=Range.of(seen["allreduce_us_per_kib"]))
    for k in seen["num_speculative_tokens"]:
        for reuse in seen["reuse"]:
            ratio = dataclasses.replace(model, hardware=machine, reuse=reuse).verify_ratio(k + 1).mid
            for slowdown in seen["slowdown"]:
                row = {"num_speculative_tokens": k, "reuse": reuse, "slowdown": slowdown, "verify_ratio": ratio}
                rows.append(row | {"implied_acceptance_length": ratio / slowdown})
    return pd.DataFrame(rows)


def head_table(scenario: Scenario, model: StepModel) -> pd.DataFrame:
    """What a trained head brings: with the published run's step overhead, and if drafting were free."""
    seen = scenario["head"]
    k = seen["num_speculative_tokens"]
    costs = {"step overhead of the published run": seen["step_over_plain"]}
    for name, reuse in (("drafting free, independent routing", 1.0), ("drafting free, reuse 0.6", 0.6)):
        costs[name] = dataclasses.replace(model, reuse=reuse).verify_ratio(k + 1).mid
    rows = [
        {"case": case, "acceptance_length": length, "break_even": cost, "speedup": length / cost}
        for case, cost in costs.items()
        for length in seen["acceptance_length"]
    ]
    return pd.DataFrame(rows)


def boxes_table(scenario: Scenario) -> pd.DataFrame:
    """Published single-stream boxes, predicted without having been fitted to: tok/s and error."""
    told = scenario["published"]
    model = StepModel(scenario["target"], told["hardware"], context_tokens=told["context_tokens"])
    step = model.step_range_ms(1)
    rows = []
    for box in told["boxes"]:
        row = {"what": box["what"], "published_tok_s": box["tok_s"], "predicted_tok_s": 1e3 / step.mid}
        row |= {"low": 1e3 / step.high, "high": 1e3 / step.low, "error": 1e3 / step.mid / box["tok_s"] - 1}
        rows.append(row | {"source": box["source"]})
    return pd.DataFrame(rows)


def streams_table(scenario: Scenario) -> pd.DataFrame:
    """The published box with and without a head, by streams: tok/s predicted and published, and the errors.

    Columns streams plain plain_published plain_error speculative speculative_published speculative_error speedup
    speedup_low speedup_high speedup_published. Nothing is fitted to it but the overhead of a drafted token
    (data/drafts.json), whose upper end is this box's at one stream.
    """
    told = scenario["published"]
    seen = told["streams"]
    k = seen["num_speculative_tokens"]
    model = model_of(scenario["target"], told["hardware"], context_tokens=told["context_tokens"])
    cost = draft_ms(head(seen["draft"]), model.hardware, model.tensor_parallel_size, k)
    model = dataclasses.replace(model, draft_ms=cost)
    frame = concurrency(model, Range.of(seen["acceptance_length"]), k, map(int, seen["plain_tok_s"]))
    plain = frame["streams"].map({int(n): v for n, v in seen["plain_tok_s"].items()})
    spec = frame["streams"].map({int(n): v for n, v in seen["speculative_tok_s"].items()})
    return pd.DataFrame(
        {
            "streams": frame["streams"],
            "plain": frame["tok_s"],
            "plain_published": plain,
            "plain_error": frame["tok_s"] / plain - 1,
            "speculative": frame["speculative_tok_s"],
            "speculative_published": spec,
            "speculative_error": frame["speculative_tok_s"] / spec - 1,
            "speedup": frame["speedup"],
            "speedup_low": frame["speedup_low"],
            "speedup_high": frame["speedup_high"],
            "speedup_published": spec / plain,
        }
    )
