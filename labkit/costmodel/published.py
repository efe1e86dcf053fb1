"""What others published beside what the model says (data/published.json; rows of moe.md section 2, 0: others)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from labkit import files, settings
from labkit.costmodel.hardware import hardware
from labkit.costmodel.questions import length_at
from labkit.costmodel.ranges import Range
from labkit.costmodel.step import StepModel
from labkit.costmodel.weights import expert_bytes
from labkit.experts import expected
from labkit.targets import geometry

COLUMNS = ["row", "what", "published", "low", "predicted", "high", "error", "inside", "how", "source"]
Entry = Mapping[str, Any]


def published() -> pd.DataFrame:
    """A row a published figure: what the model predicts (low, predicted, high), the relative error, and how.

    `inside`: whether the figure lies in the interval. NaN where nothing can be predicted.
    """
    rows = []
    for entry in files.read_json(settings.root() / "data" / "published.json"):
        how, found = PREDICTIONS[entry["kind"]](entry)
        row = {"row": entry["row"], "what": entry["what"], "published": entry["published"], "how": how}
        row |= {"source": entry["source"], "low": np.nan, "predicted": np.nan, "high": np.nan, "error": np.nan}
        if found is not None:
            row |= {"low": found.low, "predicted": found.mid, "high": found.high}
            row |= {"error": found.mid / entry["published"] - 1}
            # Figures are published with two digits or so.
            row |= {"inside": bool(found.low * 0.995 <= entry["published"] <= found.high * 1.005)}
        rows.append(row)
    return pd.DataFrame(rows, columns=COLUMNS).astype({"published": float})


def independent(entry: Entry) -> tuple[str, Range]:
    """Unique experts of tokens that choose at random."""
    found = expected.expected_unique(entry["n_routed_experts"], entry["num_experts_per_tok"], entry["n"])
    return "N (1 - (1 - k/N)^n)", Range.of(float(found))


def unique(entry: Entry) -> tuple[str, Range]:
    """Unique experts by the reuse that the other published models show."""
    others = expected.published_reuse()
    same = (others["n_routed_experts"] == entry["n_routed_experts"]) & (
        others["num_experts_per_tok"] == entry["num_experts_per_tok"]
    )
    trend = expected.reuse_trend(others[~same], [entry["n"]])[entry["n"]]
    chosen = entry["num_experts_per_tok"]
    extra = expected.expected_unique(entry["n_routed_experts"], chosen, entry["n"]) - chosen
    return "reuse of the published models of other sizes", Range.of([chosen + r * extra for r in trend])


def amdahl(entry: Entry) -> tuple[str, Range]:
    """Verify ratio of a step whose expert share grows with unique experts (Cohere)."""
    share = entry["share"]
    return "f U / k + 1 - f", Range.of(share * entry["unique"] / entry["num_experts_per_tok"] + 1 - share)


def ratio_of_times(entry: Entry) -> tuple[str, Range]:
    """Speedup of a measured step."""
    return "length x plain step / step", Range.of(
        entry["acceptance_length"] * entry["plain_ms"] / entry["step_ms"]
    )


def step_ratio(entry: Entry) -> tuple[str, Range]:
    """How much longer a speculating step is, from time per token and acceptance."""
    length = length_at(entry["acceptance"], 1)
    return "TPOT ratio x acceptance length", Range.of(length * entry["tpot_ms"] / entry["plain_ms"])


def bytes_ratio(entry: Entry) -> tuple[str, Range]:
    """Bytes of a step of n tokens over one token's, from published reuse to independent routing."""
    n = entry["n"]
    trend = expected.reuse_trend(expected.published_reuse(), [n])[n]
    found = []
    for reuse in (trend[0], trend[1], 1.0):
        model = StepModel(entry["model"], "nvidia-a100-80gb", context_tokens=0, reuse=reuse, loading="unique")
        found.append(sum(model.gigabytes(n).values()) / sum(model.gigabytes(1).values()))
    return "bytes, published reuse to independent", Range.of(found)


def expert_ms(entry: Entry) -> tuple[str, Range]:
    """Reading one more expert in every layer."""
    model, machine = geometry(entry["model"]), hardware(entry["hardware"])
    at_peak = expert_bytes(model) * model.num_moe_layers / machine.bandwidth_gb_s.mid / 1e6
    low, mid, high = machine.efficiency
    return "bytes / (efficiency x bandwidth)", Range(at_peak / high, at_peak / mid, at_peak / low)


def allreduce(entry: Entry) -> tuple[str, Range]:
    """One AllReduce by latency and size."""
    machine = hardware(entry["hardware"])
    beyond = max(0.0, entry["kib"] - machine.allreduce_flat_kib.mid)
    ends = zip(machine.allreduce_us, machine.allreduce_us_per_kib, strict=True)
    return "latency + beyond the flat size x per KiB: a fit", Range.of([a + b * beyond for a, b in ends])


def step_ms(entry: Entry) -> tuple[str, Range]:
    """A step of as many unquantised layers of a model, whose tokens all choose the same experts."""
    few = dataclasses.replace(geometry(entry["model"]), num_hidden_layers=entry["layers"], quantization_config={})
    model = StepModel(few, entry["hardware"], reuse=0.0)
    how = f"step model; {model.regime(entry['n']).loading}; the hardware's efficiency was read off this run"
    return how, model.step_range_ms(entry["n"])


def nothing(entry: Entry) -> tuple[str, None]:
    """No prediction."""
    return "not predicted", None


PREDICTIONS: dict[str, Callable[[Entry], tuple[str, Range | None]]] = {
    "unique_independent": independent,
    "unique": unique,
    "amdahl": amdahl,
    "speedup": ratio_of_times,
    "step_ratio": step_ratio,
    "bytes_ratio": bytes_ratio,
    "expert_ms": expert_ms,
    "allreduce_us": allreduce,
    "step_ms": step_ms,
    "none": nothing,
}
