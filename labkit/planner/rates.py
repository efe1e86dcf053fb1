"""Tokens a second of each step: from the cost model and a machine's figures, or from a calibration run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from labkit.costmodel import Range
from labkit.costmodel.scenario import model_of
from labkit.costmodel.step import StepModel
from labkit.errors import LabError
from labkit.planner.head import Head, state_bytes
from labkit.planner.machines import Machine
from labkit.planner.memory import Serving
from labkit.planner.work import Work
from labkit.targets import Geometry

PREFILL_TOKENS = 8192  # of one prefill step: vLLM's max_num_batched_tokens on a GPU
GRADIENT_BYTES = 4


class NoRate(LabError):
    """A rate was asked for that nothing can give."""


@dataclass(frozen=True)
class Rates:
    """Tokens a second of a whole machine: answers generated, prompts prefilled, states written, head trained."""

    decode: Range
    prefill: Range
    extraction: Range
    training: Range
    source: str = "cost model and data/hardware_training.json"


def predicted(geometry: Geometry, machine: Machine, head: Head, work: Work, served: Serving) -> Rates:
    """Rates of a machine by the cost model; each interval is that of the figures that go in."""
    prefill = scaled(prefill_rate(geometry, machine, served, work), served.replicas)
    extracted = times(prefill, machine.extraction_share)
    on_disk = scaled(machine.disk_gb_s, 1e9 / state_bytes(geometry, work.item_bytes))
    return Rates(
        decode=scaled(decode_rate(geometry, machine, served, work), served.replicas),
        prefill=prefill,
        extraction=slowest(extracted, on_disk) if work.stored else extracted,
        training=training_rate(machine, head, work, on_disk),
    )


def decode_rate(geometry: Geometry, machine: Machine, served: Serving, work: Work) -> Range:
    """Tokens a second of one server with its streams busy: the cost model's step, less what a client loses."""
    context = work.prompt_tokens + work.answer_tokens // 2
    model = model_of(
        geometry, machine.hardware, context_tokens=context, tensor_parallel_size=served.tensor_parallel_size
    )
    step = model.step_range_ms(1, served.streams)
    return times(scaled(inverse(step), 1e3 * served.streams), machine.generation_share)


def prefill_rate(geometry: Geometry, machine: Machine, served: Serving, work: Work) -> Range:
    """Tokens a second of one server's prefill: arithmetic, or reading the weights, and the AllReduces.

    A step of PREFILL_TOKENS of the cost model without its cache and its small messages, and the arithmetic of
    attention over conversations of that length.
    """
    ranks = served.tensor_parallel_size
    model = StepModel(geometry, machine.hardware, ranks, context_tokens=0)
    tflop = sum(flops for _gb, flops in model.parts.values()) + attention_tflop(geometry, work.length) / ranks
    arithmetic = inverse(times(machine.prefill_share, Range.of(machine.peak_tflops / tflop)))
    gb = sum(model.gigabytes(1, PREFILL_TOKENS).values()) / PREFILL_TOKENS
    reading = inverse(times(model.hardware.efficiency, Range.of(model.hardware.bandwidth_gb_s.mid / gb)))
    moved = model.allreduces * geometry.hidden_size * 2 * 2 * (ranks - 1) / ranks / 1e9
    exchanged = scaled(inverse(machine.bus_gb_s), moved)
    return inverse(added(slowest_time(arithmetic, reading), exchanged))


def attention_tflop(g: Geometry, length: int) -> float:
    """TFLOP of attention itself for a token of a conversation of that length: on average half of it is behind."""
    widths = g.qk_nope_head_dim + g.qk_rope_head_dim + g.v_head_dim if g.is_mla else 2 * g.head_dim
    return 2 * length / 2 * g.num_attention_heads * widths * g.num_hidden_layers / 1e12


def training_rate(machine: Machine, head: Head, work: Work, on_disk: Range) -> Range:
    """Tokens a second of data-parallel training on all GPUs: arithmetic, the gradients' AllReduce, and reading."""
    gpus = machine.gpus
    tflop = head.flops_per_token(work.ttt_steps) / 1e12
    arithmetic = inverse(times(machine.training_share, Range.of(gpus * machine.peak_tflops / tflop)))
    gradient = head.trainable * GRADIENT_BYTES * 2 * (gpus - 1) / gpus / 1e9
    exchanged = scaled(inverse(machine.bus_gb_s), gradient / (gpus * work.batch_tokens))
    computed = inverse(added(arithmetic, exchanged))
    return slowest(computed, on_disk) if work.stored else computed


def with_gpus(machine: Machine, gpus: int) -> Machine:
    """The same machine with so many of its GPUs."""
    return dataclasses.replace(machine, hardware=dataclasses.replace(machine.hardware, gpus=gpus))


def inverse(value: Range) -> Range:
    """1 / value, the ends changed over; raises NoRate for nothing."""
    if value.low <= 0:
        raise NoRate(f"a rate of {value.low} to {value.high}", "measure it again; nothing takes forever")
    return Range(1 / value.high, 1 / value.mid, 1 / value.low)


def scaled(value: Range, factor: float) -> Range:
    """value x factor."""
    return Range(value.low * factor, value.mid * factor, value.high * factor)


def times(first: Range, second: Range) -> Range:
    """The product, all low, all middle, all high."""
    return Range(first.low * second.low, first.mid * second.mid, first.high * second.high)


def added(*values: Range) -> Range:
    """The sum, all low, all middle, all high."""
    return Range(*(sum(ends) for ends in zip(*values, strict=True)))


def slowest(*values: Range) -> Range:
    """The lowest of several rates, end by end."""
    return Range(*(min(ends) for ends in zip(*values, strict=True)))


def slowest_time(*values: Range) -> Range:
    """The longest of several times, end by end."""
    return Range(*(max(ends) for ends in zip(*values, strict=True)))
