"""Enlarged traces are the same traces, longer."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks import measuring, traces
from labkit import trace

DATA = Path(__file__).parents[1] / "data"
SOURCES = sorted((DATA / "trace_tp2_h200_llama").glob("*.gz"))


@pytest.mark.parametrize("packed", [True, False])
def test_an_enlarged_trace_has_the_same_steps_more_often(tmp_path: Path, packed: bool) -> None:
    one = len(gzip.decompress(SOURCES[0].read_bytes())) / 1e6
    copies = traces.enlarge(SOURCES, tmp_path, ranks=2, megabytes=3 * one, packed=packed)
    assert copies == 3
    small, large = trace.load(SOURCES), trace.load(tmp_path)
    assert large.warnings == []
    before, after = small.summary(), large.summary()
    assert after["steps"].tolist() == [3 * n for n in before["steps"]]
    for column in ("step_ms", "allreduce_share", "idle_share", "allreduce_transfer_ms", "allreduce_wait_ms"):
        assert after[column].tolist() == pytest.approx(before[column].tolist(), rel=1e-3)
    assert (after["allreduce_per_step_min"] == 33).all()


def test_more_ranks_than_sources(tmp_path: Path) -> None:
    traces.enlarge(SOURCES, tmp_path, ranks=4, megabytes=2)
    found = trace.load(tmp_path)
    assert [rank.rank for rank in found.ranks] == [0, 1, 2, 3]
    assert {rank.world_size for rank in found.ranks} == {4}


def test_ids_of_copies_differ(tmp_path: Path) -> None:
    copies = traces.enlarge(SOURCES[:1], tmp_path, ranks=1, megabytes=4)
    (path,) = tmp_path.glob("*.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    launches = [
        e["args"]["correlation"] for e in events if e.get("cat") == "cuda_runtime" and "Launch" in e["name"]
    ]
    assert copies > 1
    assert len(launches) == len(set(launches)), "each launch keeps kernels of its own"


def test_a_program_that_fails_is_not_a_time() -> None:
    with pytest.raises(RuntimeError, match="ended with 3"):
        measuring.run(["python3", "-c", "raise SystemExit(3)"], {})


def test_an_interrupt_ends_the_sampling_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measuring.run([sys.executable, "-c", ""], {})
    assert threading.active_count() == before


def test_spread_is_median_and_range() -> None:
    assert measuring.spread([3.0, 1.0, 2.0]) == "2.00 [1.00, 3.00]"
    assert measuring.spread([4.0, 1.0, 2.0, 3.0]) == "2.50 [1.00, 4.00]"
    assert measuring.spread([1.5]) == "1.50"
