"""What a decoding step costs when it verifies n tokens, from bytes, bandwidth and collectives; what pays."""

from __future__ import annotations

from labkit.costmodel.bandwidth import Bandwidth, bandwidth_for, floor_ms, floor_sentence, measure_bandwidth
from labkit.costmodel.calibration import MeasuredSteps, calibrate
from labkit.costmodel.cases import break_even_table, cases, compare, needed, one_token
from labkit.costmodel.hardware import Hardware, UnknownHardware, hardware
from labkit.costmodel.ranges import Range
from labkit.costmodel.step import BadEstimate, StepModel
from labkit.costmodel.weights import UnknownQuantization, expert_bytes, kv_bytes_per_token, weights

__all__ = [
    "BadEstimate",
    "Bandwidth",
    "Hardware",
    "MeasuredSteps",
    "Range",
    "StepModel",
    "UnknownHardware",
    "UnknownQuantization",
    "bandwidth_for",
    "break_even_table",
    "calibrate",
    "cases",
    "compare",
    "expert_bytes",
    "floor_ms",
    "floor_sentence",
    "hardware",
    "kv_bytes_per_token",
    "measure_bandwidth",
    "needed",
    "one_token",
    "weights",
]
