"""What a decoding step costs when it verifies n tokens, from bytes, bandwidth and collectives; what pays."""

from __future__ import annotations

from labkit.costmodel.bandwidth import (
    Bandwidth,
    bandwidth_for,
    floor_ms,
    floor_sentence,
    machine_at_hand,
    measure_bandwidth,
)
from labkit.costmodel.calibration import MeasuredSteps, calibrate
from labkit.costmodel.cases import break_even_table, cases, compare, needed, one_token
from labkit.costmodel.comparison import beside
from labkit.costmodel.fitting import which_regime
from labkit.costmodel.hardware import Hardware, UnknownHardware, hardware, known_hardware
from labkit.costmodel.kernels import Regime, pairwise_limit, regime
from labkit.costmodel.questions import (
    answer,
    best_k,
    concurrency,
    length_at,
    rate_for,
    sensitivity,
    speedups,
    stops_paying,
)
from labkit.costmodel.ranges import Range
from labkit.costmodel.step import BadEstimate, StepModel
from labkit.costmodel.verdict import Verdict, verdict
from labkit.costmodel.weights import UnknownQuantization, expert_bytes, kv_bytes_per_token, weights
from labkit.costmodel.whatif import assuming, what_if

__all__ = [
    "BadEstimate",
    "Bandwidth",
    "Hardware",
    "MeasuredSteps",
    "Range",
    "Regime",
    "StepModel",
    "UnknownHardware",
    "UnknownQuantization",
    "Verdict",
    "answer",
    "assuming",
    "bandwidth_for",
    "beside",
    "best_k",
    "break_even_table",
    "calibrate",
    "cases",
    "compare",
    "concurrency",
    "expert_bytes",
    "floor_ms",
    "floor_sentence",
    "hardware",
    "known_hardware",
    "kv_bytes_per_token",
    "length_at",
    "machine_at_hand",
    "measure_bandwidth",
    "needed",
    "one_token",
    "pairwise_limit",
    "rate_for",
    "regime",
    "sensitivity",
    "speedups",
    "stops_paying",
    "verdict",
    "weights",
    "what_if",
    "which_regime",
]
