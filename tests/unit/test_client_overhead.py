"""The arithmetic of benchmarks/client_overhead.py, and what its server records. No time is asserted."""

from __future__ import annotations

import subprocess
import sys
import time

import httpx
import psutil
import pytest

from benchmarks import client_overhead
from benchmarks.client_overhead import compared
from labkit.engine import supervisor


def test_what_was_measured_beside_what_was_written() -> None:
    written = {"a": [20.0, 20.0, 20.0], "b": [20.0, 30.0, 20.0]}
    measured = {"b": [21.0, 29.0, 21.0], "a": [21.0, 21.0, 19.0]}
    found = compared("x", measured, written)
    assert (found.client, found.streams) == ("x", 2)
    assert found.ratio == pytest.approx(21 / 20)
    # Of six values the 99th percentile lies 0.95 of the way from the fifth to the sixth (numpy, linear).
    assert found.p99_ratio == pytest.approx((21 + 0.95 * 8) / (20 + 0.95 * 10))
    assert found.off_ms == pytest.approx(1.0)
    assert compared("x", written, written).ratio == 1.0


@pytest.mark.parametrize("measured", [{"a": [20.0]}, {"a": [20.0, 20.0], "c": [1.0]}, {}])
def test_gaps_that_do_not_belong_together_are_refused(measured: dict) -> None:
    with pytest.raises(RuntimeError, match="one for one"):
        compared("x", measured, {"a": [20.0, 20.0]})


def test_the_server_s_record_is_of_the_streams_that_were_read() -> None:
    with client_overhead.steady_server(5) as url:
        gaps = client_overhead.by_labkit(url, 3, 5)
        truth = client_overhead.written(url, 3)
    assert {name: len(found) for name, found in gaps.items()} == dict.fromkeys(client_overhead.names(3), 4)
    assert client_overhead.compared("labkit", gaps, truth).streams == 3
    assert all(gap > 0 for found in truth.values() for gap in found)


def test_the_server_of_a_killed_benchmark_ends() -> None:
    """kill -9 of the process that started it: its standard input ends, and so does the server."""
    starter = (
        "from benchmarks.client_overhead import steady_server\n"
        "with steady_server(5) as url:\n    print(url, flush=True)\n    input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", starter], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        url = process.stdout.readline().strip()
        assert httpx.get(f"{url}/v1/models", trust_env=False).status_code == 200
        (server,) = psutil.Process(process.pid).children()
        since = supervisor.started(server.pid)
        process.kill()
        deadline = time.monotonic() + 30
        while supervisor.alive(server.pid, since):  # a zombie does not live
            assert time.monotonic() < deadline
            time.sleep(0.05)
