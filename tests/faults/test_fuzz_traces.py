"""The trace reader against damage by chance: a valid result or a LabError, and an end."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import trace
from labkit.errors import LabError
from labkit.trace import rank
from tests.faults import figures
from tests.faults.fuzzing import LIMIT_S, STRUCTURED, VALUE, parts, share
from tests.faults.mutations import Mutator, ends_within
from tests.unit import kineto


def trace_events() -> list[dict[str, Any]]:
    """Two marked steps with kernels, a launch and collectives that tell of themselves in several ways."""
    found = []
    for step in range(2):
        at = 1000.0 * step
        name = "execute_context_0(sq0sk0)_generation_1(sq1sk9)"
        found += kineto.marked(name, at, 900.0, step + 1)
        found.append(kineto.event("cuda_runtime", "cudaLaunchKernel", at + 1, 2.0, correlation=step + 1))
        found.append(kineto.kernel("gemm", at + 10, 50.0, correlation=step + 1))
        told = {"Collective name": "allreduce", "In msg nelems": 64, "dtype": "BFloat16"}
        found.append(kineto.kernel("ncclDevKernel_AllReduce_Sum_bf16", at + 100, 40.0, **told))
        shapes = {"Input Dims": [[4, 8]], "Input type": ["c10::BFloat16"]}
        found.append(kineto.event("cpu_op", "vllm::all_reduce", at + 90, 60.0, **shapes))
    return found


def trace_files() -> list[bytes]:
    """The same trace in every form, and packed."""
    meta = kineto.rank_meta(0, 2) | {"baseTimeNanoseconds": 1_700_000_000_000_000_000}
    whole = [form(trace_events(), **meta) for form in (kineto.canonical, kineto.plain, kineto.sorted_keys)]
    return [*whole, *whole, gzip.compress(whole[0], mtime=0)]  # the same bytes, so the same damage, in every run


def read_trace(path: Path, everything: bool) -> None:
    """One file to a reduced rank, or further to all tables."""
    try:
        if not everything:
            found = rank.reduce(path)
            assert (found.end >= found.start).all()
            return
        loaded = trace.load(path)
        for table in (loaded.collectives(), loaded.steps()):
            assert (table["dur_us"] >= 0).all()
        parts = loaded.breakdown()
        assert parts["share"].between(0, 1 + 1e-9).all()
        loaded.summary(), loaded.parts(), loaded.counts()
    except LabError:
        return


@parts
def test_traces(tmp_path: Path, part: int) -> None:
    mutator, path = Mutator(trace_files(), part), tmp_path / "rank0.json"
    for number in range(share("traces")):
        path.write_bytes(data := mutator.draw())
        with ends_within(LIMIT_S, data):
            read_trace(path, everything=number % 20 == 0)


@given(st.lists(st.dictionaries(st.sampled_from(["ph", "cat", "name", "pid", "tid", "ts", "dur", "args"]), VALUE)))
@STRUCTURED
def test_traces_of_any_values(tmp_path_factory: pytest.TempPathFactory, events: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.getbasetemp() / "rank0.json"
    path.write_text(json.dumps({"traceEvents": [*trace_events(), *({"ph": "X", "ts": 5} | e for e in events)]}))
    figures.DONE["fuzzed traces"] += 1
    read_trace(path, everything=True)


def test_the_whole_traces_are_read(tmp_path: Path) -> None:
    """What the damage is done to is sound: without it everything is understood."""
    for number, content in enumerate(trace_files()):
        path = tmp_path / f"{number}.json"
        path.write_bytes(content)
        assert len(trace.load(path).steps()) == 2
        assert len(trace.load(path).collectives()) == 2
