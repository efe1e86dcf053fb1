"""Traces captured here, from a CPU and from two H200s, against figures counted from the files' own JSON."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit import trace
from labkit.trace.steps import marker

DATA = Path(__file__).parents[1] / "data"
# fixture: AllReduces a step, how such an event is called, logits gathered inside the marked step
REAL = {
    "trace_tp2_cpu": (2 * 30 + 1, "_C::shm_allreduce", True),
    "trace_tp2_h200_llama": (2 * 16 + 1, "cross_device_reduce", False),
    "trace_tp2_h200_moe": (2 * 16 + 1, "cross_device_reduce", False),
}
EXACT = 0.0015  # µs: what a float64 keeps of a time stamp


def events_of(folder: str) -> list[list[dict[str, Any]]]:
    """The events of each rank, as the json module reads them."""
    files = sorted((DATA / folder).glob("*.json.gz"))
    assert len(files) == 2
    return [json.loads(gzip.decompress(file.read_bytes()))["traceEvents"] for file in files]


def decode_spans(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Start and end (µs) of the decode steps: the device's copies of the markers where there are any."""
    on_device = any(e["cat"] == "gpu_user_annotation" for e in events)
    wanted = "gpu_user_annotation" if on_device else "user_annotation"
    found = [e for e in events if e["cat"] == wanted and (m := marker(e["name"])) and m.phase == "decode"]
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in found)


def reduces_by_step(events: list[dict[str, Any]], name: str) -> list[list[tuple[float, float]]]:
    """(start, dur) of the AllReduces of each decode step, in order."""
    calls = sorted((e["ts"], e["dur"]) for e in events if name in e["name"])
    return [[call for call in calls if start <= call[0] < end] for start, end in decode_spans(events)]


@pytest.mark.parametrize("folder", REAL)
def test_counts_of_a_decode_step(folder: str) -> None:
    count, name, inside = REAL[folder]
    traces = trace.load(DATA / folder)
    assert traces.warnings == []
    assert traces.summary()["allreduce_per_step"].tolist() == [count] * 2
    assert [len(step) for events in events_of(folder) for step in reduces_by_step(events, name)] == [count] * (
        2 * int(traces.summary()["steps"].iloc[0])
    )
    gathers = traces.counts().set_index("collective").loc["AllGather"]
    assert (gathers["calls_per_step"] == (1 if inside else 0)).all()
    assert ((gathers["between_steps"] > 0) == (not inside)).all(), "a GPU gathers the logits after the marked step"


@pytest.mark.parametrize("folder", REAL)
def test_transfer_and_wait_to_the_nanosecond(folder: str) -> None:
    """The shortest over the ranks and the rest, by zipping the n-th call of each step over the ranks."""
    steps = [reduces_by_step(events, REAL[folder][1]) for events in events_of(folder)]
    durations = np.array([[[dur for _, dur in step] for step in rank] for rank in steps])  # [ranks, steps, calls]
    transfer = durations.min(axis=0)
    traces = trace.load(DATA / folder)
    phases = traces.steps().set_index(["rank", "step"])["phase"]
    calls = traces.collectives().dropna(subset=["step"])
    mine = calls[(calls["collective"] == "AllReduce")].groupby(["rank", "step"])
    decode = [rows for key, rows in mine if phases[key] == "decode"]
    waits = np.array([row["wait_us"] for row in decode]).reshape(durations.shape)
    transfers = np.array([row["transfer_us"] for row in decode]).reshape(durations.shape)
    np.testing.assert_allclose(transfers, np.broadcast_to(transfer, durations.shape), atol=EXACT)
    np.testing.assert_allclose(waits, durations - transfer, atol=EXACT)


@pytest.mark.parametrize("folder", REAL)
def test_categories_add_up_and_little_is_unclassified(folder: str) -> None:
    traces = trace.load(DATA / folder)
    steps = traces.steps().set_index(["rank", "step"])["dur_us"]
    parts = traces.breakdown().groupby(["rank", "step"])["dur_us"].sum()
    np.testing.assert_allclose(parts, steps[parts.index], rtol=0.01)
    assert (traces.summary()["unclassified_share"] < 0.02).all()


@pytest.mark.parametrize("folder", [name for name in REAL if "h200" in name])
def test_a_share_read_from_one_rank_says_next_to_nothing(folder: str) -> None:
    """On two H200s one rank spent several times the other's share in AllReduce: nearly all of it is waiting."""
    summary = trace.load(DATA / folder).summary().set_index("rank")
    assert summary.loc[1, "allreduce_share"] > 5 * summary.loc[0, "allreduce_share"]
    assert summary["allreduce_transfer_ms"].nunique() == 1
    assert (summary["allreduce_transfer_ms"] / summary["step_ms"] < 0.06).all()


@pytest.mark.parametrize("folder", [name for name in REAL if "h200" in name])
def test_idle_of_a_gpu_is_what_no_kernel_covers(folder: str) -> None:
    """The union of the kernels' spans by a sweep over sorted intervals, against idle computed on its own."""
    summary = trace.load(DATA / folder).summary().set_index("rank")
    for rank, events in enumerate(events_of(folder)):
        spans = decode_spans(events)
        ran = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")
        )
        idle = 0.0
        for start, end in spans:
            reached = start
            for begin, stop in ran:
                if stop <= start or begin >= end:
                    continue
                idle += max(0.0, min(begin, end) - reached)
                reached = max(reached, min(stop, end))
            idle += end - reached
        assert summary.loc[rank, "idle_share"] == pytest.approx(idle / sum(b - a for a, b in spans), abs=1e-4)
