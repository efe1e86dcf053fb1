"""Servers and labs that are killed in each step: a clear error, nothing lost, nothing left running."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from labkit import engine
from labkit.engine import launch
from labkit.errors import LabError
from tests.faults import figures, phases

KILLS = 8 if figures.SOAK else 1
CONCURRENT = 2  # requests under way when a server dies


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """`engine.serve` starts the stand-in; the environment's own command comes back."""
    monkeypatch.setattr(launch, "command", launch.command)
    phases.stand_in()


def mentioning(folder: Path) -> list[psutil.Process]:
    """Processes of this folder's servers that run, whoever's children they are by now."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = str(folder) in " ".join(process.cmdline()) + str(process.environ().get("FAULT"))
            found += [process] if mine and process.pid != os.getpid() else []
        except psutil.Error:
            continue
    return found


def all_gone(folder: Path, limit_s: float = 30) -> bool:
    """Whether nothing of this folder runs within the limit."""
    until = time.monotonic() + limit_s
    while left := mentioning(folder):
        if time.monotonic() > until:
            return False
        psutil.wait_procs(left, timeout=0.2)
    return True


@pytest.mark.parametrize(
    ("how", "said"), [("kill", "SIGKILL"), ("memory", "out of memory"), ("disk", "the disk is full")]
)
def test_a_server_that_dies_while_it_starts_is_named_with_the_cause(tmp_path: Path, how: str, said: str) -> None:
    with pytest.raises(engine.EngineFailed, match=said) as failed, phases.serving(tmp_path, at="start", how=how):
        pytest.fail("it never came up")
    assert failed.value.remedy
    assert str(tmp_path / "logs") in failed.value.what
    assert all_gone(tmp_path)
    figures.DONE["kills"] += how == "kill"


def test_a_server_that_never_comes_up_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ignores SIGTERM, as an engine that loads does."""
    real = engine.serve
    monkeypatch.setattr(engine, "serve", lambda *args, **more: real(*args, **more | {"start_limit_s": 2}))
    with (
        pytest.raises(engine.EngineFailed, match="was not ready after 2 s"),
        phases.serving(tmp_path, at="start", how="hang"),
    ):
        pytest.fail("it never came up")
    assert all_gone(tmp_path)


@pytest.mark.parametrize("how", ["kill", "memory"] if figures.SOAK else ["kill"])
@pytest.mark.parametrize("name", phases.PHASES)
def test_a_server_that_dies_in_a_step_costs_what_was_under_way(tmp_path: Path, name: str, how: str) -> None:
    after = 7
    with pytest.raises(LabError) as failed, phases.serving(tmp_path, at="post", how=how, after=after) as server:
        phases.PHASES[name](server, tmp_path)
    assert failed.value.remedy
    assert all_gone(tmp_path)
    kept = phases.finished(name, tmp_path)
    assert kept >= after - CONCURRENT
    before = phases.asked(tmp_path)
    with phases.serving(tmp_path) as server:
        assert phases.PHASES[name](server, tmp_path) == phases.COUNT
    assert phases.asked(tmp_path) - before <= phases.COUNT - after + CONCURRENT
    figures.DONE["kills"] += how == "kill"


@pytest.mark.parametrize("attempt", range(KILLS))
@pytest.mark.parametrize("name", phases.PHASES)
def test_a_lab_that_is_killed_in_a_step_goes_on_from_there(tmp_path: Path, name: str, attempt: int) -> None:
    """kill -9 at a random moment of the step: its server ends by itself, and the next lab does only the rest."""
    words = [sys.executable, "-m", "tests.faults.phases", name, str(tmp_path)]
    environment = phases.environment()
    lab = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    moment = random.Random(attempt + len(name)).randrange(1, phases.COUNT // 2)
    while phases.finished(name, tmp_path) < moment and lab.poll() is None:
        time.sleep(0.002)
    lab.kill()
    assert lab.wait() == -signal.SIGKILL
    assert all_gone(tmp_path)
    kept, before = phases.finished(name, tmp_path), phases.asked(tmp_path)
    assert kept >= moment
    with phases.serving(tmp_path) as server:
        assert phases.PHASES[name](server, tmp_path) == phases.COUNT
    assert phases.asked(tmp_path) - before <= phases.COUNT - kept + 1  # a line may have been cut short
    figures.DONE["kills"] += 1
