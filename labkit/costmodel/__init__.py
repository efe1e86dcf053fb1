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
from labkit.costmodel.comparison import (
    CALIBRATED_AT,
    beside,
    cut_config,
    each_beside,
    measured_steps,
    verify_table,
)
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
from labkit.costmodel.whatif import assuming, at_length, choices, what_if, what_ifs

__all__ = [
    "CALIBRATED_AT",
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
    "at_length",
    "bandwidth_for",
    "beside",
    "best_k",
    "break_even_table",
    "calibrate",
    "cases",
    "choices",
    "compare",
    "concurrency",
    "cut_config",
    "each_beside",
    "expert_bytes",
    "floor_ms",
    "floor_sentence",
    "hardware",
    "known_hardware",
    "kv_bytes_per_token",
    "length_at",
    "machine_at_hand",
    "measure_bandwidth",
    "measured_steps",
    "needed",
    "one_token",
    "pairwise_limit",
    "rate_for",
    "regime",
    "sensitivity",
    "speedups",
    "stops_paying",
    "verdict",
    "verify_table",
    "weights",
    "what_if",
    "what_ifs",
    "which_regime",
]
