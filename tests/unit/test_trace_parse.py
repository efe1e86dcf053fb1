"""Imperfect files: what can be used is used, with a warning; what cannot is refused with the reason."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path

import kineto
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import trace
from labkit.errors import LabError
from labkit.trace import fields, parse, sources, stream

FORMS = [kineto.canonical, kineto.plain, kineto.sorted_keys]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".pt.trace.json.gz"])
def test_every_layout_and_packing_gives_the_same_figures(tmp_path: Path, form: object, suffix: str) -> None:
    found = trace.load(kineto.two_ranks(tmp_path, form=form, suffix=suffix))
    assert not found.warnings
    calls = found.collectives()
    reduces = calls[calls["collective"] == "AllReduce"]
    assert reduces["wait_us"].sum() == 3 * (5 * 30 + 4 * 10)
    assert (reduces["transfer_us"] == kineto.TRANSFER).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block", [64, 1000, 8 << 20])
def test_blocks_may_end_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: object, block: int
) -> None:
    folder = kineto.two_ranks(tmp_path, form=form)
    whole = parse.read(folder / "rank0.pt.trace.json.gz")
    monkeypatch.setattr(stream, "BLOCK", block)
    cut = parse.read(folder / "rank0.pt.trace.json.gz")
    for column in ("start", "dur", "name", "cat", "lane", "external"):
        np.testing.assert_array_equal(getattr(whole, column), getattr(cut, column))
    assert (cut.warnings, cut.meta, cut.names) == ([], whole.meta, whole.names)


@given(st.integers(-(10**9), 2 * 10**18), st.integers(0, 10**9))
def test_times_keep_every_nanosecond(start_ns: int, dur_ns: int) -> None:
    text = [str(Decimal(value) / 1000).encode() for value in (start_ns, dur_ns)]
    assert fields.nanoseconds(tuple(text)).tolist() == [start_ns, dur_ns]


@pytest.mark.parametrize("form", FORMS)
def test_epoch_time_stamps_keep_nanoseconds(tmp_path: Path, form: object) -> None:
    """At epoch scale a float64 of microseconds holds a quarter of one."""
    base = 1_790_857_026_000_123
    text = form([kineto.event("kernel", f"gemm_{i}", 111111, 222, 0, 7) for i in range(50)]).decode()
    for i in range(50):
        text = text.replace("111111", f"{base + 10 * i}.{i:03d}", 1).replace(" 222", " 9.001", 1)
        text = text.replace(":222,", ":9.001,", 1)
    path = tmp_path / "rank0.json"
    path.write_text(text)
    events = parse.read(path)
    order = np.argsort(events.start)
    assert events.start[order].tolist() == [(base + 10 * i) * 1000 + i for i in range(50)]
    assert set(events.dur.tolist()) == {9001}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keep", [0.5, 0.9, 0.999])
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_is_cut_off(tmp_path: Path, form: object, keep: float, packed: bool) -> None:
    """Whether the JSON or the gzip stream ends early: whole events are used, and it is said."""
    whole = kineto.two_ranks(tmp_path / "whole", steps=12, form=form, suffix=".json")
    count = len(parse.read(whole / "rank0.json").start)
    content = (whole / "rank0.json").read_bytes()
    content = (
        gzip.compress(content)[: int(len(gzip.compress(content)) * keep)]
        if packed
        else content[: int(len(content) * keep)]
    )
    path = tmp_path / "rank0.json"
    path.write_bytes(content)
    events = parse.read(path)
    if keep < 0.99:  # beyond, only what follows the events may be missing
        assert 0.3 * count < len(events.start) < count
        assert any("ends in the middle" in text for text in events.warnings)
    assert any("cut off" in text for text in events.warnings) == packed
    pristine = parse.read(whole / "rank0.json")
    np.testing.assert_array_equal(events.start, pristine.start[: len(events.start)])


@pytest.mark.parametrize("where", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("width", [1, 40])
def test_nothing_after_the_damage_in_a_gzip_stream_is_believed(tmp_path: Path, where: float, width: int) -> None:
    folder = kineto.two_ranks(tmp_path, steps=40)
    path = folder / "rank0.pt.trace.json.gz"
    pristine = parse.read(path)
    content = bytearray(path.read_bytes())
    for i in range(int(len(content) * where), int(len(content) * where) + width):
        content[i] ^= 0xFF
    path.write_bytes(bytes(content))
    events = parse.read(path)
    assert any("gzip data are damaged" in text for text in events.warnings)
    assert 0.1 * len(pristine.start) < len(events.start) < len(pristine.start)
    np.testing.assert_array_equal(events.start[:-2], pristine.start[: len(events.start) - 2])


@pytest.mark.parametrize("time", ["1e99", "-1e30", "NaN", "99999999999999999999999", '"soon"'])
@pytest.mark.parametrize("form", FORMS)
def test_impossible_times_are_left_out(tmp_path: Path, form: object, time: str) -> None:
    events = [kineto.kernel(f"gemm_{i}", 10.0 * i, 5.0) for i in range(20)]
    content = form([*events, kineto.kernel("odd", 7777.0, 5.0)]).decode()
    path = tmp_path / "rank0.json"
    path.write_text(content.replace("7777.000", time).replace("7777.0", time))
    read = parse.read(path)
    assert "odd" not in {read.names[i] for i in read.name}
    assert len(read.start) == 20
    assert read.warnings


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_is_survived_or_refused(tmp_path: Path, seed: int) -> None:
    """Whatever is changed, dropped, doubled or put in: figures that add up, or an error that says what to do."""
    random = np.random.default_rng(seed)
    folder = kineto.two_ranks(tmp_path, suffix=".json", form=FORMS[seed % 3])
    content = bytearray((folder / "rank0.json").read_bytes())
    for _ in range(random.choice([1, 3, 20])):
        at, length = int(random.integers(len(content))), int(random.integers(1, 200))
        kind = random.integers(4)
        if kind == 0:
            content[at] = int(random.integers(256))
        elif kind == 1:
            del content[at : at + length]
        else:
            other = int(random.integers(len(content)))
            content[at:at] = content[other : other + length] if kind == 2 else random.bytes(length)
    packed = bytearray(gzip.compress(bytes(content)))
    if seed % 4 == 1:
        packed[int(random.integers(len(packed)))] ^= 0x55
    (folder / "rank0.json").write_bytes(bytes(packed) if seed % 2 else bytes(content))
    try:
        found = trace.load(folder)
        told = trace.conclusion(found, trace.what_if(found))
        shares = found.summary().filter(like="_share").sum(axis=1)
    except LabError as error:
        told, shares = error.remedy, np.ones(1)
    assert told
    np.testing.assert_allclose(shares, 1.0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "damage",
    [b'"dur": 4x.000', b'"dur": ', b"\xff\xfe\x00", b'"name": "un"terminated"', b"}}}}", b"nonsense"],
)
def test_damage_in_the_middle_costs_only_what_is_damaged(tmp_path: Path, form: object, damage: bytes) -> None:
    events = [kineto.kernel(f"gemm_{i}", 10.0 * i, 5.0) for i in range(200)]
    content = form(events)
    name = b'"gemm_100"'
    at = content.index(name)
    path = tmp_path / "rank0.json"
    path.write_bytes(content[:at] + name + b"," + damage + b"," + content[at + len(name) + 1 :])
    read = parse.read(path)
    names = {read.names[i] for i in read.name}
    assert {f"gemm_{i}" for i in range(200)} - names <= {"gemm_99", "gemm_100", "gemm_101"}
    assert read.warnings or "gemm_100" in names


@pytest.mark.parametrize("form", FORMS)
def test_odd_characters_in_names(tmp_path: Path, form: object) -> None:
    names = ['quote " and \\ backslash', "ünïcödé 漢字", "tab\tand newline\n", "brace } ] {", 'a,b: {"ph": "X"}']
    path = kineto.write(
        tmp_path / "rank0.json", [kineto.kernel(n, 10.0 * i, 5.0) for i, n in enumerate(names)], form
    )
    events = parse.read(path)
    assert [events.names[i] for i in events.name] == names
    assert not events.warnings
    raw = form([kineto.kernel("control_QQ_char", 0.0, 5.0)]).replace(b"QQ", b"\x01\xff")
    (tmp_path / "raw.json").write_bytes(raw)
    events = parse.read(tmp_path / "raw.json")
    assert [events.names[i] for i in events.name] == ["control_\x01\ufffd_char"]


def test_missing_metadata_takes_the_rank_from_the_name(tmp_path: Path) -> None:
    folder = kineto.two_ranks(tmp_path)
    for rank, name in ((0, "1722.5-TP-0.trace.json.gz"), (1, "1722.5-TP-1.trace.json.gz")):
        content = json.loads(gzip.decompress((folder / f"rank{rank}.pt.trace.json.gz").read_bytes()))
        del content["distributedInfo"]
        (folder / name).write_bytes(gzip.compress(json.dumps(content).encode()))
        (folder / f"rank{rank}.pt.trace.json.gz").unlink()
    found = trace.load(folder)
    assert found.summary()["rank"].tolist() == [0, 1]
    assert found.summary()["allreduce_wait_ms"].tolist() == pytest.approx([0.150, 0.040])


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("dp0_pp0_tp3_dcp0_ep3_rank11.1796.pt.trace.json.gz", 11),
        ("rank7.1796002386720720726.pt.trace.json.gz", 7),
        ("1722-TP-5.trace.json.gz", 5),
        ("1722-TP-12-DP-1.trace.json", 12),
        ("host_4711.1796002386720720726.pt.trace.json", None),
    ],
)
def test_rank_in_a_name(name: str, rank: int | None) -> None:
    from labkit.trace.rank import rank_in_name

    assert rank_in_name(Path(name)) == rank


def test_files_that_all_call_themselves_rank_zero(tmp_path: Path) -> None:
    folder = kineto.two_ranks(tmp_path)
    for path in folder.iterdir():
        text = gzip.decompress(path.read_bytes()).replace(b'"rank": 1', b'"rank": 0')
        path.write_bytes(gzip.compress(text))
    found = trace.load(folder)
    assert found.summary()["rank"].tolist() == [0, 1]
    assert any("their names decide" in text for text in found.warnings)


def test_compact_metadata_and_ranks_without_any(tmp_path: Path) -> None:
    events = [*kineto.marked("step[DECODE bs=1]", 0.0, 10.0, 1), kineto.kernel("gemm", 1.0, 5.0)]
    kineto.write(tmp_path / "x.json", events, kineto.sorted_keys, **kineto.rank_meta(3, 4))
    kineto.write(tmp_path / "y.json", events)
    found = trace.load([tmp_path / "x.json", tmp_path / "y.json"])
    assert [rank.rank for rank in found.ranks] == [0, 3]
    assert any("y.json: tells no rank" in text for text in found.warnings)
    assert any("2 of 4 ranks are missing (1, 2)" in text for text in found.warnings)


def test_a_folder_with_other_files_older_captures_and_the_api_process(tmp_path: Path) -> None:
    folder = kineto.two_ranks(tmp_path)
    (folder / "run.json").write_text('{"settings": {}}')
    (folder / "notes.txt").write_text("x")
    older = (folder / "rank0.pt.trace.json.gz").read_bytes()
    (folder / "rank0.1790000000.pt.trace.json.gz").write_bytes(older)
    (folder / "rank0.pt.trace.json.gz").rename(folder / "rank0.1790000009.pt.trace.json.gz")
    kineto.write(folder / "h_1.async_llm.17.pt.trace.json.gz", [kineto.event("cpu_op", "aten::add", 0.0, 1.0)])
    found = trace.load(folder)
    assert Path(found.ranks[0].path).name == "rank0.1790000009.pt.trace.json.gz"
    for part in ("run.json: left out", "API process", "rank0.1790000000.pt.trace.json.gz: an older trace"):
        assert any(part in text for text in found.warnings), part
    assert found.summary()["allreduce_per_step"].tolist() == [9, 9]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"<html>404</html>", "has no traceEvents"),
        (b"", "has no traceEvents"),
        (b'{"traceEvents": []}', "no complete event"),
        (b'{"traceEvents": [{"ph": "X", "cat": "ker', "no complete event"),
        (gzip.compress(b'{"schemaVersion": 1}', mtime=0), "has no traceEvents"),
        (b"\x1f\x8b\x08\x00broken", "has no traceEvents"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "rank0.json"
    path.write_bytes(content)
    with pytest.raises(trace.NotATrace, match=says):
        trace.load(path)


def test_paths_that_hold_nothing(tmp_path: Path) -> None:
    for source in (tmp_path / "none", tmp_path, []):
        with pytest.raises(trace.TraceNotFound):
            trace.load(source)


def graph_trace(kernels: int, launches: int = 10, api: str = "hipGraphLaunch") -> list[kineto.Event]:
    """Decode steps that each replay a graph; `kernels` of the launches have their kernels in the trace."""
    events = []
    for i in range(launches):
        events += kineto.marked("step[DECODE bs=1]", 1000.0 * i, 900.0, i + 1)[:1]
        events.append(kineto.event("cuda_runtime", api, 1000.0 * i, 870.0, correlation=i + 1))
        if i < kernels:
            events.append(kineto.kernel("gemm", 1000.0 * i + 10, 800.0, correlation=i + 1))
    return events


@pytest.mark.parametrize("api", ["hipGraphLaunch", "cudaGraphLaunch"])
@pytest.mark.parametrize("kernels", [0, 2])
def test_graph_replay_without_kernels_is_refused(tmp_path: Path, api: str, kernels: int) -> None:
    path = kineto.write(tmp_path / "rank0.json", graph_trace(kernels, api=api))
    with pytest.raises(trace.NoKernels, match="graph launches") as caught:
        trace.load(path)
    assert "enforce_eager" in caught.value.remedy
    assert len(trace.load(kineto.write(tmp_path / "ok.json", graph_trace(10))).steps()) == 10


def test_a_launch_event_that_stands_for_its_kernels_is_refused(tmp_path: Path) -> None:
    events = [kineto.kernel("hipGraphLaunch", 1000.0 * i, 970.0) for i in range(5)]
    events += [kineto.kernel("gemm", 1000.0 * i + 970, 20.0) for i in range(5)]
    with pytest.raises(trace.NoKernels, match="one graph-launch event"):
        trace.load(kineto.write(tmp_path / "rank0.json", events))


def test_a_profile_of_the_host_alone_is_refused(tmp_path: Path) -> None:
    events = [kineto.event("cuda_runtime", "cudaLaunchKernel", 10.0 * i, 5.0, correlation=i) for i in range(9)]
    with pytest.raises(trace.NoKernels, match="not one kernel"):
        trace.load(kineto.write(tmp_path / "rank0.json", events))


def test_nothing_that_repeats_has_no_steps(tmp_path: Path) -> None:
    events = [kineto.kernel(f"gemm_{i}", 10.0 * i, 5.0) for i in range(20)]
    found = trace.load(kineto.write(tmp_path / "rank0.json", events))
    assert found.steps().empty
    with pytest.raises(trace.NoSteps, match="no marker"):
        found.summary()


def test_processes_of_their_own_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = kineto.two_ranks(tmp_path)
    here = trace.load(folder)
    monkeypatch.setattr(sources, "INLINE", 0)
    apart = trace.load(folder)
    for frame in ("steps", "collectives", "breakdown", "summary", "kernels"):
        assert getattr(here, frame)().equals(getattr(apart, frame)()), frame
    (folder / "other.json").write_text("{}")
    assert any("other.json: left out" in text for text in trace.load(folder).warnings)
    kineto.write(folder / "rank5.json", graph_trace(0))
    with pytest.raises(trace.NoKernels, match="rank5"):
        trace.load(folder)


@pytest.mark.parametrize("key", ["cat", "name", "ts", "dur"])
def test_text_that_no_encoding_has_is_a_mark_and_no_crash(key: str) -> None:
    """A lone surrogate, which JSON can spell; found by the fuzzer in a time."""
    event = {"cat": "kernel", "name": "k", "pid": 0, "tid": 0, "ts": 1, "dur": 1} | {key: "\ud800"}
    assert b"?" in fields.as_row(event)
