"""A clock that is set while the lab works: durations stay, and no server is ended."""

from __future__ import annotations

import os
import subprocess
import time
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from labkit import bench, files, settings
from labkit.engine import supervisor
from labkit.engine.service import steps
from labkit.progress import Waiting
from labkit.runs import Stage
from tests.unit.sse_server import ROLE, Reply, delta, serving, usage

ANSWER = [ROLE, delta(content="a"), 0.002, delta(content="b"), delta("stop"), usage(3)]
OPTIONS = {"max_tokens": 4, "repeats": 1, "warmup": 0, "model": "toy"}


JUMPS = (3600.0, -3600.0, 10 * 365 * 86400.0, -1.7e9)


@pytest.mark.parametrize("jump", JUMPS)
def test_durations_are_those_of_a_clock_that_nobody_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """The wall clock is set in the middle of a stage, of a wait and of a benchmark."""
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    chosen = settings.NOTEBOOKS["02_ngram_baseline"].of({"run_id": "r"})
    made, waiting, real = Stage(chosen), Waiting("x"), time.time
    with serving(lambda *_: Reply(ANSWER)) as server:
        monkeypatch.setattr(time, "time", lambda: real() + jump)
        assert 0 <= made.lap("one") < 100
        assert 0 <= waiting.seconds < 100
        row = bench.run(server.url, ["hi"], **OPTIONS).iloc[0]
    assert 0 < row["ttft_ms"] < row["e2e_ms"] < 60_000
    told = files.read_json(made.finish({}))
    assert 0 <= told["seconds"] < 100
    assert (
        abs(datetime.fromisoformat(told["started"]).timestamp() - real()) < 600
    )  # when it began, not when it ended
    waiting.done("x")


@pytest.mark.parametrize("jump", JUMPS)
def test_a_set_clock_ends_no_server(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """The kernel's boot time, from which psutil counts a process's creation, moves with the clock."""
    me = os.getpid()
    since, created = supervisor.started(me), psutil.Process(me).create_time()
    real = psutil._psplatform.boot_time
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: real() + jump)
    assert abs(psutil.Process(me).create_time() - created - jump) < 1  # what a comparison of times would see
    assert supervisor.alive(me, since)
    assert not steps.older(me, steps.uptime() - 1e6)
    assert steps.older(1, steps.uptime())


def test_a_later_process_of_the_same_id_is_another(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    since = supervisor.started(child.pid)
    assert supervisor.alive(child.pid, since)
    boot, tick = since.split("/")
    assert int(tick) == supervisor.ticks(child.pid)
    assert not supervisor.alive(child.pid, f"{boot}/{int(tick) + 1}")
    assert not supervisor.alive(child.pid, f"{boot[::-1]}/{tick}")  # another boot
    child.kill()
    deadline = time.monotonic() + 20
    while supervisor.alive(child.pid, since):  # a zombie does not live
        assert time.monotonic() < deadline
    child.wait()
    assert not supervisor.alive(child.pid, since)
    with pytest.raises(psutil.NoSuchProcess):
        supervisor.started(child.pid)
