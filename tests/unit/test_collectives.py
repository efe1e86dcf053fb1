"""Collectives: the fit, the messages, and two real gloo ranks."""

import numpy as np
import pandas as pd
import pytest

from labkit import collectives, targets


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
