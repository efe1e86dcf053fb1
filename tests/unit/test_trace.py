"""Steps, collectives and shares of traces whose truth is known by construction."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import kineto
import numpy as np
import pandas as pd
import pytest

from labkit import trace
from labkit.targets.geometry import geometry

REAL = Path(__file__).parents[1] / "data" / "trace_tp2_cpu"
EMBEDDING_PLUS_LAYERS = 2 * kineto.LAYERS + 1


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> trace.Trace:
    return trace.load(kineto.two_ranks(tmp_path_factory.mktemp("two")))


def test_steps_are_the_device_side_of_the_markers_once_each(two: trace.Trace) -> None:
    steps = two.steps()
    assert steps.groupby("rank").size().tolist() == [3, 3]
    assert steps["phase"].unique().tolist() == ["decode"]
    assert steps["start_us"].tolist() == [1000.0, 2100.0, 3200.0] * 2
    assert steps["dur_us"].tolist() == [1000.0] * 6
    assert steps["generation_tokens"].tolist() == [1] * 6
    np.testing.assert_array_equal(steps["period_us"], [1100, 1100, np.nan] * 2)


def test_transfer_is_the_shortest_and_wait_the_rest(two: trace.Trace) -> None:
    calls = two.collectives()
    reduces = calls[calls["collective"] == "AllReduce"]
    assert len(reduces) == 2 * 3 * EMBEDDING_PLUS_LAYERS
    assert (reduces["transfer_us"] == kineto.TRANSFER).all()
    even = reduces["call"] % 2 == 0
    for rank, wait_even, wait_odd in ((0, 30.0, 0.0), (1, 0.0, 10.0)):
        mine = reduces["rank"] == rank
        assert reduces.loc[mine & even, "wait_us"].tolist() == [wait_even] * 15
        assert reduces.loc[mine & ~even, "wait_us"].tolist() == [wait_odd] * 12
    np.testing.assert_allclose(reduces["late_us"], reduces["wait_us"])
    np.testing.assert_allclose(reduces["dur_us"], reduces["wait_us"] + reduces["transfer_us"])


def test_shares_add_up_and_idle_is_what_is_left_by_hand(two: trace.Trace) -> None:
    summary = two.summary().set_index("rank")
    shares = summary.filter(like="_share")
    np.testing.assert_allclose(shares.sum(axis=1), 1.0)
    wait = {0: 5 * 30.0, 1: 4 * 10.0}
    for rank in (0, 1):
        reduce_us = wait[rank] + EMBEDDING_PLUS_LAYERS * kineto.TRANSFER
        assert summary.loc[rank, "allreduce_share"] == pytest.approx(reduce_us / 1000)
        assert summary.loc[rank, "gemm_share"] == pytest.approx(0.36)
        assert summary.loc[rank, "norm_elementwise_share"] == pytest.approx(0.027)
        assert summary.loc[rank, "other_communication_share"] == pytest.approx(0.015)
        assert summary.loc[rank, "idle_share"] == pytest.approx(1 - reduce_us / 1000 - 0.36 - 0.027 - 0.015)
        assert summary.loc[rank, "allreduce_wait_ms"] == pytest.approx(wait[rank] / 1000)
    # from the first GEMM (8 µs into the step) to the gather's end (975 µs), idle lies between activities
    edges = 8 + 25
    assert summary.loc[0, "launch_gap_ms"] == pytest.approx(summary.loc[0, "idle_share"] - edges / 1000)
    assert summary["step_ms"].tolist() == [1.0, 1.0]
    assert summary["period_ms"].tolist() == [1.1, 1.1]
    assert summary["allreduce_per_step"].tolist() == [9, 9]


def test_breakdown_of_periods_covers_the_time_between_steps(two: trace.Trace) -> None:
    periods = two.breakdown(window="period")
    assert periods.groupby(["rank", "step"])["dur_us"].sum().tolist() == pytest.approx([1100.0] * 4)
    steps = two.breakdown()
    assert steps.groupby(["rank", "step"])["share"].sum().tolist() == pytest.approx([1.0] * 6)


def test_what_if_by_hand(two: trace.Trace) -> None:
    cases = trace.what_if(two).set_index("case")["tpot_ms"]
    transfer = EMBEDDING_PLUS_LAYERS * kineto.TRANSFER / 1000
    wait = {0: 0.150, 1: 0.040}
    assert cases["as measured"] == pytest.approx(1.1)
    assert cases["AllReduce transfer halved"] == pytest.approx(1.1 - transfer / 2)
    assert cases["AllReduce transfer free"] == pytest.approx(1.1 - transfer)
    assert cases["no wait: ranks balanced"] == pytest.approx(1.1 - (wait[0] + wait[1]) / 2)
    assert cases["AllReduce free, ranks as they are"] == pytest.approx(1.1 - transfer - min(wait.values()))
    floored = trace.what_if(two, 0.25).set_index("case")
    assert floored.iloc[-1].to_dict() == pytest.approx({"tpot_ms": 0.25, "saved_ms": 0.85, "speedup": 4.4})
    assert "(reading alone: 0.25 ms)" in trace.conclusion(two, floored.reset_index())
    assert trace.conclusion(two, trace.what_if(two)).replace(" (reading alone: 0.25 ms)", "") == trace.conclusion(
        two, floored.reset_index()
    ).replace(" (reading alone: 0.25 ms)", "")


@pytest.mark.parametrize("clock", [0.0, 2.5e6, -3.7e5])
@pytest.mark.parametrize("drop", [None, (1, 0), (1, 4), (2, 8)])
def test_clocks_apart_and_a_missing_call_change_no_other_figure(
    tmp_path: Path, clock: float, drop: tuple[int, int] | None
) -> None:
    found = trace.load(kineto.two_ranks(tmp_path, clock=clock, drop=drop, uneven=True, origin=5e6))
    calls = found.collectives()
    reduces = calls[(calls["collective"] == "AllReduce") & calls["wait_us"].notna()]
    assert len(reduces) == 2 * (3 * EMBEDDING_PLUS_LAYERS - (drop is not None))
    assert (reduces["transfer_us"] - kineto.TRANSFER).abs().max() < 1e-3
    expected = np.where(
        reduces["rank"] == 0, np.where(reduces["call"] % 2, 0, 30), np.where(reduces["call"] % 2, 10, 0)
    )
    assert np.abs(reduces["wait_us"] - expected).max() < 1e-3
    summary = found.summary()
    assert summary["clock_lead_us"].tolist() == pytest.approx([0, clock], abs=1e-3)
    assert summary["allreduce_per_step_min"].tolist() == [9, 8 if drop else 9]
    sentence = trace.allreduce_sentence(found)
    assert (f"8 in step {drop[0]} of rank 1" if drop else "9 AllReduces a decode step.") in sentence


@pytest.mark.parametrize("clock", [0.0, 4.2e8])
def test_a_profiler_that_started_later_on_one_rank(tmp_path: Path, clock: float) -> None:
    found = trace.load(kineto.two_ranks(tmp_path, steps=6, skip_steps=2, clock=clock, uneven=True))
    steps = found.steps()
    assert steps.loc[steps["rank"] == 1, "step"].tolist() == [2, 3, 4, 5]
    calls = found.collectives()
    matched = calls[(calls["rank"] == 1) & (calls["collective"] == "AllReduce")]
    assert (matched["wait_us"] == np.where(matched["call"] % 2, 10.0, 0.0)).all()
    alone = calls[(calls["rank"] == 0) & calls["step"].isin([0, 1])]
    assert alone["wait_us"].isna().all()
    assert any("4 steps are in every rank's trace; rank 0 has 2 more" in text for text in found.warnings)


def test_without_markers_steps_are_told_by_what_repeats(tmp_path: Path) -> None:
    with_marks = trace.load(kineto.two_ranks(tmp_path / "a", steps=5))
    without = trace.load(kineto.two_ranks(tmp_path / "b", steps=5, markers=False))
    assert any("no step markers; 5 steps" in text for text in without.warnings)
    assert without.summary()["allreduce_per_step"].tolist() == [9, 9]
    # from the first kernel (8 µs in) to the last one's end (975 µs in)
    assert without.steps()["start_us"].tolist() == (with_marks.steps()["start_us"] + 8).tolist()
    assert without.steps()["dur_us"].tolist() == pytest.approx([967.0] * 10)
    a, b = with_marks.collectives(), without.collectives()
    pd.testing.assert_frame_equal(a[["wait_us", "transfer_us", "step"]], b[["wait_us", "transfer_us", "step"]])


def test_one_rank_alone_does_not_tell_wait_from_transfer(tmp_path: Path) -> None:
    folder = kineto.two_ranks(tmp_path)
    found = trace.load(folder / "rank0.pt.trace.json.gz")
    assert any("1 of 2 ranks are missing (1)" in text for text in found.warnings)
    summary = found.summary().iloc[0]
    assert summary["allreduce_unsplit_ms"] == pytest.approx(0.195)
    assert summary["allreduce_wait_ms"] == summary["allreduce_transfer_ms"] == 0
    assert summary["allreduce_share"] == pytest.approx(0.195)
    assert found.collectives()["wait_us"].isna().all()
    assert "cannot be told" in trace.wait_sentence(found)


def test_communication_under_compute_is_not_exposed(tmp_path: Path) -> None:
    for rank in (0, 1):
        events = kineto.marked("step[DECODE bs=4]", 0.0, 100.0, 1)
        events += [
            kineto.kernel("sm90_xmma_gemm_bf16", 10.0, 50.0, stream=7),
            kineto.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 40.0, 30.0, stream=20),
            kineto.event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 65.0, 10.0, 0, 21),
        ]
        kineto.write(tmp_path / f"rank{rank}.json", events, **kineto.rank_meta(rank, 2))
    row = trace.load(tmp_path).summary().iloc[0]
    # 10..60 GEMM, 60..70 the AllReduce's exposed end, 70..75 the rest of the copy, 35 idle
    assert row["gemm_share"] == pytest.approx(0.5)
    assert row["allreduce_share"] == pytest.approx(0.1)
    assert row["copy_share"] == pytest.approx(0.05)
    assert row["idle_share"] == pytest.approx(0.35)
    assert row["hidden_ms"] == pytest.approx(0.02)


def test_a_marker_copied_to_several_streams_is_one_step(tmp_path: Path) -> None:
    events = []
    for step in range(3):
        start = 100.0 * step
        events += kineto.marked("step[DECODE bs=2]", start, 80.0, step + 1)
        events += [kineto.marked("step[DECODE bs=2]", start + 5, 90.0, step + 1, stream=9)[1]]
        events.append(kineto.kernel("gemm", start + 5, 10.0))
    steps = trace.load(kineto.write(tmp_path / "t.json", events)).steps()
    assert steps["start_us"].tolist() == [0, 100, 200]
    assert steps["dur_us"].tolist() == [95, 95, 95]
    assert steps["generation_requests"].tolist() == [2, 2, 2]


def test_steps_from_launches_where_the_device_has_no_copy_of_the_marker(tmp_path: Path) -> None:
    events = []
    for step in range(2):
        host, device = 1000.0 * step, 1000.0 * step + 400  # the device runs behind the host
        name = "execute_64_context_0(sq0sk0sqsq0sqsk0)_generation_64(sq64sk900sqsq64sqsk900)"
        events.append(kineto.event("user_annotation", name, host, 300.0))
        for i in range(3):
            correlation = 10 * step + i
            launch = {"correlation": correlation}
            events.append(kineto.event("cuda_runtime", "cudaLaunchKernel", host + 50 * i, 5.0, **launch))
            events.append(kineto.kernel("gemm", device + 100 * i, 60.0, correlation=correlation))
    steps = trace.load(kineto.write(tmp_path / "t.json", events)).steps()
    assert steps["start_us"].tolist() == [400, 1400]
    assert steps["dur_us"].tolist() == [260, 260]
    assert steps["generation_tokens"].tolist() == [64, 64]


@pytest.mark.parametrize("where", ["host", "device", "both"])
@pytest.mark.parametrize("short", [(1,), (0, 1, 2)])
def test_a_step_of_no_time_is_no_step(tmp_path: Path, where: str, short: tuple[int, ...]) -> None:
    """Damage, or a clock too coarse for what was marked: shares of nothing would be divided by zero."""
    events = []
    for step in range(3):
        at, name = 1000.0 * step, "execute_context_0(0)_generation_1(1)"
        host, device = kineto.marked(name, at, 0.0 if step in short else 900.0, step + 1)
        events += {"host": [host], "device": [device], "both": [host, device]}[where]
        if where != "host":
            events.append(kineto.kernel("gemm", at + 10, 50.0))
        else:
            events.append(kineto.event("cpu_op", "aten::mm", at + 10, 50.0))
    found = trace.load(kineto.write(tmp_path / "t.json", events))
    if len(short) == 3:
        with pytest.raises(trace.NoSteps, match="no steps"):
            found.summary()
        return
    [row] = found.summary().to_dict("records")
    assert (row["steps"], row["step_ms"]) == (2, pytest.approx(0.9))
    assert sum(value for column, value in row.items() if column.endswith("_share")) == pytest.approx(1)


def test_operators_on_a_cpu_nest_and_are_counted_once(tmp_path: Path) -> None:
    op = lambda name, ts, dur, **args: kineto.event("cpu_op", name, ts, dur, 5, 5, **args)  # noqa: E731
    shapes = {"Input Dims": [[], [1, 576]], "Input type": ["Scalar", "c10::BFloat16"]}
    for rank in (0, 1):
        begin = 60.0 + 20.0 * rank
        events = [
            kineto.event("user_annotation", "execute_context_0(0)_generation_3(3)", 0.0, 100.0, 5, 5),
            op("aten::linear", 0.0, 40.0),
            op("aten::t", 0.0, 5.0),
            op("_C::onednn_mm", 5.0, 30.0),
            op("vllm::unified_attention_with_output", 40.0, 10.0),
            op("aten::copy_", 42.0, 4.0),
            op("vllm::all_reduce", begin - 1, 90.0 - begin + 2),
            op("_C::shm_allreduce", begin, 90.0 - begin, **shapes),
            op("aten::copy_", begin + 1, 1.0),
        ]
        kineto.write(tmp_path / f"rank{rank}.json", events, **kineto.rank_meta(rank, 2))
    found = trace.load(tmp_path)
    summary = found.summary().set_index("rank")
    assert summary["allreduce_per_step"].tolist() == [1, 1]
    assert summary["gemm_share"].tolist() == pytest.approx([0.35, 0.35])
    assert summary["attention_share"].tolist() == pytest.approx([0.10, 0.10])
    assert summary["overhead_share"].tolist() == pytest.approx([0.07, 0.07])
    assert summary["allreduce_share"].tolist() == pytest.approx([0.30, 0.10])
    assert summary["copy_share"].tolist() == [0, 0]
    np.testing.assert_allclose(summary.filter(like="_share").sum(axis=1), 1.0)
    calls = found.collectives()
    assert calls["bytes"].tolist() == [1152, 1152]
    assert calls["wait_us"].tolist() == [20, 0]
    kernels = found.kernels()
    assert kernels.loc[kernels["name"] == "aten::linear", "ms_per_step"].tolist() == pytest.approx([0.005] * 2)
    assert kernels.loc[kernels["name"] == "aten::linear", "calls_per_step"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "layers", [("c10d::allreduce_",), ("gloo:all_reduce",), ("c10d::allreduce_", "gloo:all_reduce")]
)
def test_one_call_recorded_by_several_layers_counts_once(tmp_path: Path, layers: tuple[str, ...]) -> None:
    events = [kineto.event("user_annotation", "ProfilerStep#4", 0.0, 100.0, 1, 1)]
    for i in range(3):
        for depth, name in enumerate(layers):  # the transport starts after the asynchronous call has returned
            lane = 1 if depth == 0 else 2
            events.append(kineto.event("cpu_op", name, 10.0 + 30 * i + 12 * depth, 10.0, 1, lane))
        if layers[0].startswith("c10d"):
            note = {"Collective name": "allreduce", "In msg nelems": 64, "Out msg nelems": 64, "dtype": "Float"}
            events.append(kineto.event("cpu_op", "record_param_comms", 11.0 + 30 * i, 5.0, 1, 1, **note))
    found = trace.load(kineto.write(tmp_path / "rank0.json", events))
    assert found.collectives()["collective"].tolist() == ["AllReduce"] * 3
    assert found.summary()["allreduce_per_step"].tolist() == [3]


def test_a_collective_without_a_name_is_told_by_its_arguments_or_the_host(tmp_path: Path) -> None:
    note = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "BFloat16"}
    events = [
        *kineto.marked("step[DECODE bs=1]", 0.0, 100.0, 1),
        kineto.event("cpu_op", "record_param_comms", 0.0, 10.0, 1, 1, **note),
        kineto.event("cuda_runtime", "hipLaunchKernel", 4.0, 2.0, 1, 1, correlation=5),
        kineto.kernel("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", 20.0, 10.0, correlation=5),
        kineto.kernel("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", 40.0, 10.0, correlation=6),
        kineto.kernel("ncclDevKernel_Generic_1(x)", 60.0, 10.0, correlation=7, **note),
    ]
    calls = trace.load(kineto.write(tmp_path / "rank0.json", events)).collectives()
    assert calls["collective"].tolist() == ["AllReduce", "unknown collective", "AllReduce"]
    assert calls["bytes"].tolist() == [2000, pd.NA, 2000]


def test_phases_and_sizes_of_every_marker() -> None:
    from labkit.trace.steps import Marker, marker

    assert marker("execute_context_2(14721)_generation_0(0)") == Marker("prefill", 2, 14721, 0, 0)
    assert marker("execute_context_1(9)_generation_3(12)") == Marker("mixed", 1, 9, 3, 12)
    assert marker("execute_context_0(0)_generation_0(0)") == Marker("empty", 0, 0, 0, 0)
    assert marker("step[DECODE bs=64]") == Marker("decode", 0, 0, 64, 64)
    assert marker("step[EXTEND bs=1 toks=107]") == Marker("prefill", 1, 107, 0, 0)
    assert marker("step[MIXED bs=2]").phase == "mixed"  # type: ignore[union-attr]
    assert marker("ProfilerStep#12") == Marker("step")
    assert marker("forward") is None


def test_geometry_explains_the_count(two: trace.Trace) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 256,
              "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128}  # fmt: skip
    fits = geometry(config | {"num_hidden_layers": 4})
    assert "2 × 4 layers + 1 for the embedding = 9" in trace.allreduce_sentence(two, fits)
    assert two.counts(fits).loc[lambda f: f["collective"] == "AllReduce", "predicted"].tolist() == [9, 9]
    more = geometry(config | {"num_hidden_layers": 8})
    assert "8 fewer were seen (one a layer is gone" in trace.allreduce_sentence(two, more)


def test_the_timeline_adds_up_on_one_clock(tmp_path: Path) -> None:
    found = trace.load(kineto.two_ranks(tmp_path, clock=5e5, uneven=True))
    line = found.timeline(1)
    assert line.groupby("rank")["dur_us"].sum().tolist() == pytest.approx([1000, 1000])
    waits = line[line["category"] == "AllReduce wait"]
    mine = waits[waits["rank"] == 0]["start_us"]
    assert mine.tolist() == pytest.approx([50 + 200 * i for i in range(5)], abs=1e-3)


@pytest.fixture(scope="module")
def found() -> trace.Trace:
    return trace.load(REAL)


class TestReal:
    """A prefill and two decode steps of SmolLM2, zero-padded, at TP=2 on two CPU cores (vLLM 0.32)."""

    def test_sixty_one_allreduces_and_one_gather(self, found: trace.Trace) -> None:
        counts = found.counts()
        calls = dict(
            zip(zip(counts["rank"], counts["collective"], strict=True), counts["calls_per_step"], strict=True)
        )
        assert calls == {(r, c): n for r in (0, 1) for c, n in (("AllReduce", 61), ("AllGather", 1))}
        calls = found.collectives()
        decode = calls[(calls["step"] == 1) & (calls["collective"] == "AllReduce")]
        assert decode["bytes"].unique().tolist() == [576 * 2]

    def test_against_the_raw_events(self, found: trace.Trace) -> None:
        """Share, transfer and wait computed again, from the JSON and with plain loops."""
        raw = [json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] for path in sorted(REAL.glob("*.gz"))]
        spans = []
        for events in raw:
            steps = [e for e in events if re.match(r"execute_context_0\(0\)_generation_1\(1\)", e["name"])]
            calls = sorted((e["ts"], e["dur"]) for e in events if e["name"] == "_C::shm_allreduce")
            inside = [[c for c in calls if s["ts"] <= c[0] < s["ts"] + s["dur"]] for s in steps]
            spans.append((steps, inside))
        summary = found.summary()
        for rank, (steps, inside) in enumerate(spans):
            total = sum(s["dur"] for s in steps)
            held = sum(duration for step in inside for _, duration in step)
            assert summary.loc[rank, "allreduce_share"] == pytest.approx(held / total, abs=1e-6)
            assert summary.loc[rank, "step_ms"] == pytest.approx(total / len(steps) / 1e3)
        shortest = sum(
            min(a[1], b[1])
            for x, y in zip(spans[0][1], spans[1][1], strict=True)
            for a, b in zip(x, y, strict=True)
        )
        assert summary["allreduce_transfer_ms"].tolist() == pytest.approx([shortest / 2e3] * 2, abs=1e-5)

    def test_everything_is_classified_and_adds_up(self, found: trace.Trace) -> None:
        summary = found.summary()
        assert (summary["unclassified_share"] < 0.02).all()
        np.testing.assert_allclose(summary.filter(like="_share").sum(axis=1), 1.0)

    def test_one_event_deleted(self, found: trace.Trace, tmp_path: Path) -> None:
        for path in REAL.glob("*.gz"):
            trimmed = json.loads(gzip.decompress(path.read_bytes()))
            events = trimmed["traceEvents"]
            if path.name.startswith("rank0"):
                at = [i for i, e in enumerate(events) if e["name"] == "_C::shm_allreduce"]
                del events[at[61 + 17]]  # the eighteenth of the first decode step
            (tmp_path / path.name).write_bytes(gzip.compress(json.dumps(trimmed).encode()))
        less = trace.load(tmp_path)
        assert less.summary()["allreduce_per_step_min"].tolist() == [60, 61]
        assert "60 in step 1 of rank 0" in trace.allreduce_sentence(less)
        before, after = found.collectives(), less.collectives()
        keep = ~((before["step"] == 1) & (before["call"] == 17) & (before["collective"] == "AllReduce"))
        key = ["rank", "start_us"]
        joined = before[keep].merge(after, on=key, suffixes=("", "_less"))
        assert len(joined) == keep.sum()
        np.testing.assert_allclose(joined["wait_us"], joined["wait_us_less"])


def test_two_traces_side_by_side(tmp_path: Path, two: trace.Trace) -> None:
    """The same trace with every AllReduce 7 µs longer on both ranks: only the transfer changes."""
    folder = tmp_path / "slow"
    folder.mkdir()
    for rank in (0, 1):
        events: list[kineto.Event] = []
        for step in range(3):
            start = 1000.0 + 1100 * step
            events += kineto.marked("execute_context_0(0)_generation_1(1)", start, 1000.0, step + 1)
            events += [
                kineto.kernel("cross_device_reduce_1stage", begin, end + 7 - begin)
                for begin, end in kineto.reduces(rank, start)
            ]
        kineto.write(folder / f"rank{rank}.json", events, **kineto.rank_meta(rank, 2))
    changed = trace.compare(two, trace.load(folder)).set_index("category")
    assert changed.loc["AllReduce transfer", "change_ms"] == pytest.approx(9 * 0.007)
    assert changed.loc["AllReduce wait", "change_ms"] == pytest.approx(0)
    assert changed.loc["GEMM", "change_ms"] == pytest.approx(-0.36)
    assert changed.loc["decode step", "change_ms"] == pytest.approx(0, abs=1e-9)
    assert changed["change_ms"].drop("decode step").sum() == pytest.approx(0, abs=1e-9)
    counts = trace.compare_counts(two, trace.load(folder)).set_index("collective")
    assert counts.loc["AllGather"].tolist() == [1, 0]
    assert counts.loc["AllReduce"].tolist() == [9, 9]


def test_a_disturbed_machine_is_named(tmp_path: Path, two: trace.Trace) -> None:
    assert trace.steadiness_sentence(two) == ""
    events = []
    for step, length in enumerate([10.0, 10.0, 10.0, 50.0]):
        events += kineto.marked("step[DECODE bs=1]", 100.0 * step, length, step + 1)
        events.append(kineto.kernel("gemm", 100.0 * step, length))
    told = trace.steadiness_sentence(trace.load(kineto.write(tmp_path / "rank0.json", events)))
    assert "1 of 4 steps" in told


@pytest.mark.parametrize("gathered", [False, True])
def test_steps_without_markers_from_pauses_or_from_a_rare_call(tmp_path: Path, gathered: bool) -> None:
    """Nothing but 61 AllReduces a step: told apart by the pauses, or by the gather where there are no pauses."""
    events, at = [], 0.0
    for _ in range(6):
        for _ in range(61):
            events.append(kineto.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", at, 5.0))
            at += 15.0
        if gathered:
            events.append(kineto.kernel("ncclDevKernel_AllGather_RING_LL(x)", at, 5.0))
            at += 15.0
        else:
            at += 200.0
    found = trace.load(kineto.write(tmp_path / "rank0.json", events))
    assert found.summary()["allreduce_per_step"].tolist() == [61]
    assert len(found.steps()) in (5, 6)  # without a pause the first or the last step has no visible border
