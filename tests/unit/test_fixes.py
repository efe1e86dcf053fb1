"""Predicted and measured gains of the cheaper fixes, against figures worked out by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import kineto
import numpy as np
import pandas as pd
import pytest

from labkit import fixes, trace
from labkit.collectives import decode_bytes
from labkit.engine import EngineFailed, variants
from labkit.fixes import choosing, measuring, predicting
from labkit.plots.fixes import plot_fixes
from labkit.settings import Profiling
from labkit.targets.geometry import geometry
from labkit.trace import profiler

DENSE, MOE = geometry("smollm2-tp2"), geometry("mini-kimi")
REAL = Path(__file__).parents[1] / "data" / "trace_tp2_cpu"
COUNT = 2 * kineto.LAYERS + 1
TPOT = 1.1  # ms: the period of kineto.two_ranks
GEMM, NORM, OTHER_COMM = 0.36, 0.027, 0.015
ALLREDUCE = COUNT * kineto.TRANSFER / 1000 + (5 * 0.030 + 4 * 0.010) / 2  # transfer and the mean of the waits


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> trace.Trace:
    return trace.load(kineto.two_ranks(tmp_path_factory.mktemp("base")))


def links(quartile: float, worst: float, backend: str = "nccl", mode: str = "graph") -> pd.DataFrame:
    """A summary in which every message size takes the same time."""
    sizes = [256, decode_bytes(DENSE) * 4]
    row = {"backend": backend, "mode": mode, "collective": "AllReduce", "q25_us": quartile, "p99_us": worst}
    return pd.DataFrame([row | {"bytes": size} for size in sizes])


def client_of(gaps: list[float]) -> pd.DataFrame:
    """What the client saw of one request without the profiler."""
    return pd.DataFrame({"profiled": False, "request": 0, "token": range(len(gaps)), "gap_ms": gaps})


def rows(table: pd.DataFrame) -> pd.DataFrame:
    return table.set_index("fix")


def test_one_rank_has_no_communication_and_all_the_work(base: trace.Trace) -> None:
    free = TPOT - ALLREDUCE - OTHER_COMM
    apart = rows(fixes.predict(base, DENSE)).loc["single-rank"]
    assert (apart.predicted_low_ms, apart.predicted_high_ms) == pytest.approx((free, free + GEMM))
    assert (apart.speedup_low, apart.speedup_high) == pytest.approx((TPOT / (free + GEMM), TPOT / free))


def test_one_rank_of_a_cpu_has_the_cores_of_all() -> None:
    traces = trace.load(REAL)
    parts = traces.parts(window="period").groupby("category")["ms_per_step"].sum() / 2  # two ranks
    talk = parts[[name for name in parts.index if "AllReduce" in name or name == "other communication"]].sum()
    repeated = parts[["norm and elementwise", "sampling", "memory copy"]].sum()
    table = rows(fixes.predict(traces, DENSE))
    assert table.index.tolist() == ["single-rank"], "NCCL and fused kernels are for GPUs"
    least, most = table.loc["single-rank", ["predicted_low_ms", "predicted_high_ms"]]
    assert (least, most) == pytest.approx((parts.sum() - talk - repeated / 2, parts.sum() - talk))


@pytest.mark.parametrize(
    ("tpot", "idle", "wait"), [(9.0, 4.0, 1.0), (6.0, 1.0, 1.0), (4.5, 0.0, 0.5), (1.0, 0.0, 0.0)]
)
def test_the_profiler_s_part_comes_off_gaps_then_waits(tpot: float, idle: float, wait: float) -> None:
    spent = pd.Series({"GEMM": 3.0, "AllReduce transfer": 1.0, "AllReduce wait": 1.0, "idle": 4.0})
    found = predicting.unprofiled(spent, tpot)
    assert found.tolist() == [3.0, 1.0, wait, idle]


def test_predictions_start_from_what_the_client_saw(base: trace.Trace) -> None:
    found = rows(fixes.predict(base, DENSE, client=client_of([1.0, 1.0, 1.0]))).loc["single-rank"]
    assert found.predicted_low_ms == pytest.approx(1.0 - ALLREDUCE - OTHER_COMM), "0.1 ms came off the idle time"


def test_nccl_takes_the_place_of_each_transfer(base: trace.Trace) -> None:
    found = rows(fixes.predict(base, DENSE, links(8.0, 12.0))).loc["nccl-allreduce"]
    slower = [TPOT + COUNT * (us - kineto.TRANSFER) / 1000 for us in (8.0, 12.0)]
    assert [found.predicted_low_ms, found.predicted_high_ms] == pytest.approx(slower)
    for unknown in (None, links(8.0, 12.0, backend="gloo")):
        assert np.isnan(rows(fixes.predict(base, DENSE, unknown)).loc["nccl-allreduce", "predicted_low_ms"])


def test_fusing_saves_the_norms_at_most(tmp_path: Path) -> None:
    events = kineto.marked("execute_context_0(0)_generation_1(1)", 1000.0, 500.0, 1)
    events += [kineto.kernel("vllm::cross_device_reduce_1stage", 1000.0, 5.0)]
    events += [
        kineto.kernel("triton_red_fused_add_rms_norm_0", 1100.0, 40.0),
        kineto.kernel("gemm", 1200.0, 100.0),
    ]
    two = [kineto.write(tmp_path / f"rank{rank}.json", events, **kineto.rank_meta(rank, 2)) for rank in range(2)]
    found = rows(fixes.predict(trace.load(two), DENSE)).loc["fused-allreduce"]
    assert (found.predicted_low_ms, found.predicted_high_ms) == pytest.approx((0.46, 0.5))


@pytest.mark.parametrize(("experts", "chosen", "ranks"), [(8, 2, 2), (6, 3, 2), (6, 3, 3)])
def test_the_busiest_rank_counted_over_all_choices(experts: int, chosen: int, ranks: int) -> None:
    owner = np.arange(experts) * ranks // experts
    loads = [
        np.bincount(owner[list(pick)], minlength=ranks).max()
        for pick in itertools.combinations(range(experts), chosen)
    ]
    assert predicting.busiest(experts, chosen, ranks) == pytest.approx(np.mean(loads), rel=0.01)


def test_expert_parallel_only_for_experts(base: trace.Trace) -> None:
    assert "expert-parallel" not in set(fixes.predict(base, DENSE)["fix"])
    found = rows(fixes.predict(base, MOE)).loc["expert-parallel"]
    assert found.predicted_low_ms == pytest.approx(TPOT), "this trace has no MoE kernel to slow down"


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ("none", {}),
        ("nccl-allreduce", {"nccl-allreduce": ""}),
        (
            "single-rank, fused-allreduce=http://h:1",
            {"single-rank": "", "fused-allreduce": "http://h:1"},
        ),
    ],
)
def test_what_is_asked_for(asked: str, chosen: dict[str, str]) -> None:
    assert fixes.choose(Profiling(fixes=asked), DENSE) == chosen


def test_a_base_that_is_not_served_here_is_compared_only_when_asked() -> None:
    assert not fixes.choose(Profiling(trace_dir="traces"), DENSE)
    assert fixes.choose(Profiling(trace_dir="traces", fixes="single-rank=http://h"), DENSE)


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(fixes.UnknownFix, match="turbo"):
        fixes.choose(Profiling(fixes="single-rank,turbo"), DENSE)


def test_a_machine_offers_what_it_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpus(memory: str) -> None:
        cards = [{"name": "G", "memory.total": memory, "driver_version": "1"}] * 2 if memory else []
        monkeypatch.setattr(choosing.provenance, "gpus", lambda: cards)

    gpus("")
    assert list(fixes.choose(Profiling(), DENSE)) == ["single-rank"]
    assert list(fixes.choose(Profiling(), MOE)) == ["single-rank", "expert-parallel"]
    assert not fixes.choose(Profiling(tensor_parallel_size=1), MOE)
    gpus("143771 MiB")
    assert list(fixes.choose(Profiling(), DENSE)) == ["single-rank", "nccl-allreduce"]
    kimi = geometry("kimi-k2.5")  # some 600 GB
    assert list(fixes.choose(Profiling(), kimi)) == ["nccl-allreduce", "expert-parallel"]


def test_flags_shown_are_flags_given() -> None:
    """What a user is told to restart a server with is what the lab itself serves the variant with."""
    for name, fix in fixes.FIXES.items():
        words = variants.arguments(variants.flags_of(name, variants.options_of(name, {}), on_cpu=False))
        assert fix.flags.split()[0] in words


GAPS = {"base": [10.0, 10.0, 12.0, 10.0], "single-rank": [5.0, 5.0, 6.0, 5.0]}


def test_measured_beside_predicted(base: trace.Trace) -> None:
    predicted = fixes.predict(base, DENSE)
    measured = client_of(GAPS["single-rank"]).assign(fix="single-rank", error="")
    table = rows(fixes.compared(predicted, client_of(GAPS["base"]), measured))
    assert table.index[0] == measuring.BASE
    assert table.loc[measuring.BASE, "tpot_ms"] == 10.0
    found = table.loc["single-rank"]
    assert found.measured_speedup == 2.0
    assert 10 / 6 <= found.measured_low <= 2.0 <= found.measured_high <= 12 / 5
    assert np.isnan(table.loc["nccl-allreduce", "measured_speedup"])
    text = fixes.sentence(table.reset_index(), pd.DataFrame())
    assert "Take single-rank" in text
    assert "2.00×" in text


def test_nothing_measured_says_how_to(base: trace.Trace) -> None:
    table = fixes.compared(
        fixes.predict(base, DENSE), pd.DataFrame(), pd.DataFrame(columns=["fix", "gap_ms", "error"])
    )
    assert "fixes=name=URL" in fixes.sentence(table, pd.DataFrame())


@pytest.mark.parametrize("gaps", [[], [1.0, 1.1]], ids=["brought traces", "served here"])
def test_one_rank_s_table_of_no_fix_is_drawn_and_said(gaps: list[float]) -> None:
    """One rank has no communication: nothing is predicted, and the base stands alone."""
    none = fixes.predict(trace.load(REAL), DENSE).iloc[:0]
    client = client_of(gaps) if gaps else profiler.as_frame([], False)
    table = fixes.compared(none, client, none.assign(gap_ms=0.0, error=""))
    assert list(table["fix"]) == [measuring.BASE]
    assert table[["measured_low", "measured_high"]].isna().all(axis=None)
    assert plot_fixes(table).get_title()
    assert "One rank" in fixes.sentence(table, pd.DataFrame())


def test_a_fix_that_does_not_start_keeps_the_others(
    base: trace.Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(settings: Profiling, name: str, url: str, folder: Path) -> tuple[pd.DataFrame, trace.Trace | None]:
        if name == "nccl-allreduce":
            raise EngineFailed("it ended while starting\nlong log", "look there")
        return client_of(GAPS["single-rank"]), base

    monkeypatch.setattr(measuring, "timed", timed)
    chosen = {"nccl-allreduce": "", "single-rank": ""}
    measured, changes = fixes.measure(Profiling(), chosen, base, tmp_path)
    table = fixes.compared(fixes.predict(base, DENSE), client_of(GAPS["base"]), measured)
    assert rows(table).loc["single-rank", "measured_speedup"] == 2.0
    assert rows(table).loc["nccl-allreduce", "error"] == "it ended while starting"
    assert "could not be measured: it ended while starting" in fixes.sentence(table, changes)
    assert changes["change_ms"].abs().sum() == pytest.approx(0), "the same trace on both sides"


def test_variants_take_the_profiler_and_any_flag() -> None:
    options = variants.options_of("expert-parallel", {"trace_dir": "traces", "flags": {"seed": 7}})
    words = variants.arguments(variants.flags_of("expert-parallel", options, on_cpu=False))
    assert "--enable-expert-parallel" in words
    assert "--profiler-config" in words
    assert words[words.index("--seed") + 1] == "7"
    plain = variants.arguments(variants.flags_of("baseline", variants.options_of("baseline", {}), on_cpu=False))
    assert "--profiler-config" not in plain
