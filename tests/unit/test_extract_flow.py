"""Rows side by side: never too many, never more than the disk takes; shards; one worker a shard."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tiny_target
from test_extract import FakeServer, dataset, target  # noqa: F401
from typer.testing import CliRunner

from labkit import cli, engine, extract, files, pipeline, targets
from labkit.extract import flow, record
from labkit.settings import Eagle3Pipeline

PLACE = Path("/nowhere")


class Disk:
    """A disk of so many bytes; work takes some of them for good."""

    def __init__(self, monkeypatch, size):
        self.free, self.lock = size + flow.MARGIN, threading.Lock()
        monkeypatch.setattr(flow, "free", lambda _: self.free)
        monkeypatch.setattr(files.shutil, "disk_usage", lambda _: type("Usage", (), {"free": self.free}))

    def take(self, amount):
        with self.lock:
            self.free -= amount
            assert self.free >= flow.MARGIN, "the disk ran full"


@pytest.fixture
def watched():
    """Work that counts how many are at it at once."""
    state = {"now": 0, "most": 0, "done": []}
    lock = threading.Lock()

    def work(row):
        with lock:
            state["now"] += 1
            state["most"] = max(state["most"], state["now"])
        time.sleep(0.005)
        with lock:
            state["now"] -= 1
            state["done"].append(row)

    return work, state


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_no_more_than_the_limit_are_under_way_and_all_are_done(monkeypatch, watched, limit):
    Disk(monkeypatch, 10**9)
    work, state = watched
    room = flow.Room([PLACE], dict.fromkeys(range(40), 1))
    done = list(flow.side_by_side(range(40), work, limit, room))
    assert sorted(done) == sorted(state["done"]) == list(range(40))
    assert state["most"] == limit


def test_a_filling_disk_holds_work_back_and_stops_it_before_it_is_full(monkeypatch, watched):
    """Room for 5 rows of 10 bytes and a little more: never more under way than fit; the error counts the rest."""
    disk = Disk(monkeypatch, 57)
    work, state = watched

    def writing(row):
        work(row)
        disk.take(10)

    room = flow.Room([PLACE], dict.fromkeys(range(12), 10))
    done = []
    with pytest.raises(files.DiskFull, match="no room"):
        done.extend(flow.side_by_side(range(12), writing, 8, room))
    assert sorted(state["done"]) == list(range(5))
    assert state["most"] <= 5


def test_work_waits_for_room_that_others_give_back(monkeypatch):
    """A staging disk that holds two rows: what is moved away makes room for the next."""
    disk = Disk(monkeypatch, 25)

    def staged(_row):
        disk.take(10)
        time.sleep(0.002)
        disk.take(-10)

    done = list(flow.side_by_side(range(20), staged, 8, flow.Room([PLACE], dict.fromkeys(range(20), 10))))
    assert sorted(done) == list(range(20))


def test_the_first_failure_stops_the_rest(monkeypatch):
    Disk(monkeypatch, 10**9)
    begun = []

    def work(row):
        begun.append(row)
        if row == 3:
            raise extract.BrokenStates("row 3", "")

    with pytest.raises(extract.BrokenStates, match="row 3"):
        list(flow.side_by_side(range(1000), work, 2, flow.Room([PLACE], dict.fromkeys(range(1000), 1))))
    assert len(begun) < 10


def test_a_disk_that_fills_up_loses_nothing(tmp_path, monkeypatch, target, dataset):  # noqa: F811
    """Full after two rows: those stay, the error says what is missing, and with room it goes on from there."""
    server, folder, out = FakeServer(monkeypatch, target, tmp_path / "s"), tmp_path / "data", tmp_path / "hs"
    real, left = flow.free, [2]

    def free(place):
        return real(place) if len(list(out.glob("hs_*"))) < left[0] else flow.MARGIN

    monkeypatch.setattr(flow, "free", free)
    options = {"target": target, "layers": "1,2,3", "concurrency": 1}
    with pytest.raises(files.DiskFull, match="needed"):
        extract.run(folder, server, out, **options)
    assert sorted(path.name for path in out.glob("hs_*")) == ["hs_0.safetensors", "hs_1.safetensors"]
    left[0] = 99
    extract.run(folder, server, out, **options)
    assert len(server.asked) == 3
    assert extract.verify(out, compare=False).empty


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 20])
def test_shards_are_disjoint_and_complete(parts):
    rows = [row for part in range(1, parts + 1) for row in extract.rows_of_shard(f"{part}/{parts}", 17)]
    assert sorted(rows) == list(range(17))
    assert list(extract.rows_of_shard("", 17)) == list(range(17))


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/0", "1/2/3", "-1/2"])
def test_an_impossible_shard_is_refused(shard):
    with pytest.raises(extract.BadShard, match="no part of a whole"):
        extract.rows_of_shard(shard, 10)


@pytest.mark.parametrize("folders", [("hs", "hs", "hs"), ("a", "b", "c")])
def test_shards_into_one_folder_or_several(tmp_path, monkeypatch, target, dataset, folders):  # noqa: F811
    for part, name in enumerate(folders, start=1):
        server, out = FakeServer(monkeypatch, target, tmp_path / "s"), tmp_path / name
        options = {"target": target, "layers": "1,2,3", "shard": f"{part}/3"}
        extract.run(dataset, server, out, **options)
        assert len(server.asked) == 1
        assert extract.verify(out, shard=f"{part}/3", compare=False).empty
    files_ = [path.name for name in set(folders) for path in (tmp_path / name).glob("hs_*")]
    assert sorted(files_) == [f"hs_{row}.safetensors" for row in range(3)]


def test_two_workers_on_one_shard_are_refused_and_on_two_are_not(tmp_path, monkeypatch, target, dataset):  # noqa: F811
    server, out = FakeServer(monkeypatch, target, tmp_path / "s"), tmp_path / "hs"
    options = {"target": target, "layers": "1,2,3"}
    out.mkdir()
    with record.alone(out, "1/2"):
        with pytest.raises(extract.ShardBusy, match="1/2"):
            extract.run(dataset, server, out, shard="1/2", **options)
        extract.run(dataset, server, out, shard="2/2", **options)
    extract.run(dataset, server, out, shard="1/2", **options)
    assert len(list(out.glob("hs_*"))) == 3


def test_what_a_killed_run_left_with_the_server_goes_and_others_files_stay(
    tmp_path,
    monkeypatch,
    target,  # noqa: F811
    dataset,  # noqa: F811
):
    storage, out = tmp_path / "s", tmp_path / "hs"
    server = FakeServer(monkeypatch, target, storage)
    mine = f"labkit-{files.digest([out.resolve(), ''])}"
    for name in (
        f"cmpl-{mine}-dead-1-0.safetensors",
        f"cmpl-{mine}-dead-1-0.safetensors.lock",
        "other.safetensors",
    ):
        (storage / name).touch()
    extract.run(dataset, server, out, target=target, layers="1,2,3")
    assert [path.name for path in storage.iterdir()] == ["other.safetensors"]


def test_a_server_started_with_other_layers_is_refused(tmp_path, monkeypatch, target, dataset):  # noqa: F811
    server = FakeServer(monkeypatch, target, tmp_path / "s")
    server.options = {"layers": [0, 2, 3, 6], "storage": tmp_path / "s"}
    with pytest.raises(extract.BadLayers, match=r"gives layers \[0, 2, 3, 6\]"):
        extract.run(dataset, server, tmp_path / "hs", target=target, layers="1,2,3")
    assert not server.asked


@pytest.mark.parametrize(
    ("model", "flags", "said"),
    [
        ("kimi-k2.5", {"pipeline-parallel-size": 8}, "tensor_parallel_size"),
        ("kimi-k2.5", {"enable-prefix-caching": True}, "prefix caching off"),
        ("kimi-k2.5", {"kv-cache-dtype": "fp8_e4m3"}, "fp8 form of the files"),
        ("kimi-k2.5", {"enable-expert-parallel": True}, ""),
        ("qwen3-30b-a3b", {"pipeline-parallel-size": 8}, ""),
    ],
)
def test_options_that_spoil_states_are_refused_before_the_load(tmp_path, monkeypatch, model, flags, said):
    shape = targets.geometry(model)
    served = type("Named", (), {"name": model, "geometry": shape})()
    monkeypatch.setattr(engine, "serve", lambda *_, **__: pytest.fail("started"))
    if not said:
        pipeline.extract_server(served, tmp_path / "hs", "", flags=flags)
        return
    with pytest.raises(extract.UnfitServer) as refused:
        pipeline.extract_server(served, tmp_path / "hs", "", flags=flags)
    assert said in refused.value.remedy


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_connector_is_the_engines_own_where_it_has_a_gpu(on_cpu, tmp_path):
    """And the layers of Kimi-K2.5 are asked for by vLLM's count, its 61 as the last."""
    start = pipeline.extract_server(
        type("Named", (), {"name": "kimi", "geometry": targets.geometry("kimi-k2.5")})(), tmp_path / "hs", ""
    )
    options = engine.variants.options_of("extract", {name: start.keywords[name] for name in ("layers", "storage")})
    flags = engine.variants.flags_of("extract", options, on_cpu=on_cpu)
    transfer, speculative = flags["kv-transfer-config"], flags["speculative-config"]
    assert transfer["kv_connector"] == ("CpuHiddenStatesConnector" if on_cpu else "ExampleHiddenStatesConnector")
    assert ("kv_connector_module_path" in transfer) == on_cpu
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path / "staging")}
    assert speculative["draft_model_config"]["hf_config"] == {"eagle_aux_hidden_state_layer_ids": [2, 30, 58, 61]}
    assert speculative["method"] == "extract_hidden_states"
    assert speculative["num_speculative_tokens"] == 1
    assert flags["no-enable-prefix-caching"] is True


def test_files_of_another_disk_are_copied_whole(tmp_path, monkeypatch, target, dataset):  # noqa: F811
    """A staging folder in memory: a rename cannot cross disks."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here")
    import tempfile

    with tempfile.TemporaryDirectory(dir=memory) as storage:
        server = FakeServer(monkeypatch, target, Path(storage))
        out = extract.run(dataset, server, tmp_path / "hs", target=target, layers="1,2,3")
        assert list(Path(storage).iterdir()) == []
    assert extract.verify(out, compare=False).empty
    assert not [path for path in out.iterdir() if path.name.startswith(".hs_")]


def test_the_pipeline_awaits_the_other_shards_and_then_goes_on(tmp_path, monkeypatch):
    made = tiny_target.build(tmp_path / "tiny")
    tiny_target.answers(made, tmp_path / "data", rows=4)
    monkeypatch.setattr(Eagle3Pipeline, "folder", tmp_path)
    chosen = {"aux_layers": "1,2,3", "states_backend": "transformers", "hidden_states": "zstd"}
    with pytest.raises(extract.ShardDone, match=r"shard 1/2 is done.* lacks 2/2 \(2 rows\)") as done:
        pipeline.states(Eagle3Pipeline(**chosen, shard="1/2"), made)
    assert done.value.exit_code == 0
    assert f"labkit extract {tmp_path / 'data'} OUT --shard i/n" in done.value.remedy
    assert pipeline.states(Eagle3Pipeline(**chosen, shard="2/2"), made) == tmp_path / "hidden_states"
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "hidden_states").glob("hs_*")}
    pipeline.states(Eagle3Pipeline(**chosen), made)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "hidden_states").glob("hs_*")} == before
    assert len(before) == 4


def test_the_command_extracts_a_shard(tmp_path):
    made = tiny_target.build(tmp_path / "tiny")
    (made.path / "tokenizer.json").write_text("{}")
    rows = tiny_target.answers(made, tmp_path / "data", rows=5)
    words = ["extract", str(tmp_path / "data"), str(tmp_path / "hs"), "--target", str(made.path), "--shard", "2/2"]
    words += ["--layers", "1,2,3", "--backend", "transformers", "--form", "fp8"]
    result = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "hs").glob("hs_*")) == ["hs_1.safetensors", "hs_3.safetensors"]
    assert "0 problems" in result.output
    assert f"shard 2/2 is done and checked; {tmp_path / 'hs'} lacks 1/2 (3 rows)" in result.output
    assert "shard empty" in result.output
    found = extract.load_states(tmp_path / "hs" / "hs_3.safetensors")
    assert found["token_ids"].tolist() == rows.input_ids[3]
    words[words.index("1,2,3")] = "1,2,4"  # states of other layers are kept until somebody says that they may go
    with pytest.raises(extract.OtherStates, match=r"(?s)layers \[1, 2, 3, .*--force"):
        CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert len(list((tmp_path / "hs").glob("hs_*"))) == 2
    assert CliRunner().invoke(cli.app, [*words, "--force"], catch_exceptions=False).exit_code == 0


def test_disk_that_is_needed_is_counted_while_under_way(tmp_path):
    """A smaller form needs the engine's file and its own at once."""
    from labkit.extract.states import Order

    ids = [np.arange(10), np.arange(20)]
    plain = Order(ids, [0, 1], {"layers": [1, 2], "hidden_size": 8}, tmp_path, "bf16", 2)
    small = Order(ids, [0, 1], {"layers": [1, 2], "hidden_size": 8}, tmp_path, "fp8", 2)
    assert plain.needs() == {0: 10 * (32 + 8), 1: 20 * (32 + 8)}
    assert small.needs() == {0: 10 * (40 + 16 + 8 + 8), 1: 20 * (40 + 16 + 8 + 8)}
    assert plain.total() == 30 * 40
    assert pd.Series(small.needs()).sum() > small.total() == 30 * (16 + 8 + 8)
