"""Collectives: the fit, the messages, and two real gloo ranks."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from labkit import collectives, targets, trace
from labkit.plots.interconnect import plot_links
from labkit.settings import BadParameter, Profiling


@pytest.mark.parametrize(("latency", "bandwidth"), [(24.0, 50.0), (4.0, 400.0), (200.0, 2.0)])
def test_fit_finds_what_the_times_were_made_of(latency, bandwidth):
    sizes = np.array([2.0**power for power in range(10, 25)])
    table = pd.DataFrame({"bytes": sizes, "median_us": latency + sizes / bandwidth / 1e3})
    link = collectives.fit(table)
    assert link.latency_us == pytest.approx(latency, rel=1e-6)
    assert link.bandwidth_gb_s == pytest.approx(bandwidth, rel=1e-6)
    assert link.time_us(14336) == pytest.approx(latency + 14336 / bandwidth / 1e3)


def test_fit_keeps_the_latency_when_large_messages_are_noisy():
    """5% of 16 MiB at 10 GB/s is 84 us, more than the latency itself: an unweighted fit would lose it."""
    sizes = np.array([2.0**power for power in range(10, 25)])
    times = (20 + sizes / 10e3) * np.where(np.arange(15) % 2, 1.05, 0.95)
    assert collectives.fit(pd.DataFrame({"bytes": sizes, "median_us": times})).latency_us == pytest.approx(
        20, rel=0.06
    )


def test_flat_times_have_no_bandwidth():
    link = collectives.fit(pd.DataFrame({"bytes": [1024, 4096], "median_us": [5.0, 5.0]}))
    assert link.latency_us == pytest.approx(5)
    assert link.bandwidth_gb_s > 1e6


@pytest.mark.parametrize(
    ("kind", "ranks", "factor"), [("AllReduce", 2, 1.0), ("AllReduce", 8, 1.75), ("AllGather", 8, 0.875)]
)
def test_bus_factors_of_nccl_tests(kind, ranks, factor):
    assert collectives.bus_factor(kind, ranks) == factor


def test_messages_of_a_decode_step():
    """Kimi-K2.5: 7168 hidden numbers in bf16 are 14,336 bytes (moe.md); each of 8 experts gets a copy."""
    geometry = targets.geometry("kimi-k2.5")
    assert collectives.decode_bytes(geometry) == 14336
    assert collectives.decode_bytes(geometry, 4) == 4 * 14336
    assert collectives.dispatch_bytes(geometry, 16) == 16 * 8 * 14336


def test_two_real_ranks():
    rows = collectives.measure(2, sizes=[1024, 65536], samples=4, calls=3, on_gpu=False)
    assert len(rows) == len(collectives.KINDS) * 2 * 4
    assert (rows["time_us"] > 0).all()
    table = collectives.summary(rows)
    assert set(table["collective"]) == set(collectives.KINDS)
    assert (table["q25_us"] <= table["median_us"]).all()
    assert (table["median_us"] <= table["q75_us"]).all()


def test_a_rank_that_fails_is_an_error_with_its_words():
    with pytest.raises(collectives.LaunchFailed, match="KeyError"):
        collectives.measure(2, kinds=["NoSuch"], sizes=[1024], samples=1, on_gpu=False)


def test_more_ranks_than_gpus():
    with pytest.raises(collectives.TooManyRanks):
        collectives.measure(10**6, on_gpu=True)


def test_cores_of_this_machine():
    table = collectives.cores()
    assert len(table) >= 1
    assert table["memory_gb"].sum() > 1


DENSE, MOE = targets.geometry("smollm2-tp2"), targets.geometry("mini-kimi")
REAL = Path(__file__).parents[1] / "data"


def made_of(latency: float, bandwidth: float, mode: str = "graph", kind: str = "AllReduce") -> pd.DataFrame:
    """A summary whose times follow latency + bytes / bandwidth."""
    sizes = np.array([2.0**power for power in range(10, 21)])
    frame = pd.DataFrame({"bytes": sizes, "median_us": latency + sizes / bandwidth / 1e3})
    return frame.assign(collective=kind, mode=mode, q25_us=frame["median_us"], q75_us=frame["median_us"])


def test_fits_by_collective_and_mode():
    table = pd.concat([made_of(9, 100), made_of(30, 80, "eager"), made_of(12, 50, kind="AllToAll")])
    found = collectives.fits(table).set_index(["collective", "mode"])
    assert found.loc[("AllReduce", "graph")].tolist() == pytest.approx([9, 100])
    assert found.loc[("AllReduce", "eager")].tolist() == pytest.approx([30, 80])
    assert found.loc[("AllToAll", "graph")].tolist() == pytest.approx([12, 50])


def test_what_a_decode_message_costs_beside_the_trace():
    """Two H200s: the transfer in the trace is 3.9 us; on links of 9.75 us the graph's fit is what is compared."""
    traces = trace.load(REAL / "trace_tp2_h200_llama")
    table = pd.concat([made_of(9.75, 1e9), made_of(30, 80, "eager")])
    text = collectives.decode_sentence(table, DENSE, traces)
    assert "1,152 bytes" in text
    assert "**9.8 µs** by the fit (graph" in text or "**9.7 µs** by the fit (graph" in text
    assert "takes 3.9 µs, 1/2.5 of that" in text
    assert "fewer calls" in text
    assert collectives.decode_sentence(table.iloc[:0], DENSE, traces) == ""


def test_all_to_all_is_told_by_tokens():
    rows = pd.DataFrame({"bytes": [1024, 16384], "tokens": [1.0, 16.0], "collective": "AllToAll"})
    table = pd.DataFrame(
        {"collective": "AllToAll", "mode": "eager", "bytes": [1024, 16384], "median_us": [19.0, 1007.0]}
    )
    assert "19 µs at 1, 1007 µs at 16" in collectives.all_to_all_sentence(table, MOE, rows)
    assert collectives.all_to_all_sentence(table, DENSE, rows) == ""


def test_links_of_another_machine_are_not_made_up(tmp_path):
    rows, why = collectives.obtain(Profiling(trace_dir="somewhere"), DENSE)
    table = collectives.summary(rows)
    assert rows.empty
    assert table.empty
    assert collectives.fits(table).empty
    assert "interconnect" in why
    saved = pd.DataFrame({"collective": ["AllReduce"], "bytes": [8], "mode": ["graph"], "time_us": [5.0]})
    saved.to_parquet(tmp_path / "links.parquet")
    rows, where = collectives.obtain(Profiling(trace_dir="x", interconnect=str(tmp_path / "links.parquet")), DENSE)
    assert rows["time_us"].tolist() == [5.0]
    assert "links.parquet" in where
    pd.DataFrame({"bytes": [1]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(collectives.NoLinks, match="lacks collective"):
        collectives.obtain(Profiling(interconnect=str(tmp_path / "other.parquet")), DENSE)
    with pytest.raises(BadParameter, match="is no file"):
        Profiling(interconnect=str(tmp_path / "none.parquet"))


def test_links_that_cannot_be_measured_cost_a_sentence_not_the_notebook(monkeypatch):
    def broken(*args, **options):
        raise collectives.LaunchFailed("torchrun ended with code 1", "see the lines above")

    monkeypatch.setattr("labkit.collectives.links.measure", broken)
    rows, why = collectives.obtain(Profiling(scale="smoke"), DENSE)
    assert rows.empty
    assert "torchrun ended with code 1" in why


def test_the_plot_shows_message_and_transfer():
    table = pd.concat([made_of(9, 100), made_of(30, 80, "eager")])
    ax = plot_links(table, collectives.fits(table), decode_bytes=1152, transfer_us=3.9)
    labels = ax.get_legend_handles_labels()[1]
    assert {"AllReduce, graph", "AllReduce, eager", "message of one token", "transfer in the trace"} <= set(labels)
    assert plot_links(table.iloc[:0], collectives.fits(table.iloc[:0]), decode_bytes=1152).texts
