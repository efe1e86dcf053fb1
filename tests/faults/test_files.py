"""Files that are damaged, of another kind, or made to do harm: a LabError that names them, and the others stay."""

from __future__ import annotations

import gzip
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save_file

from labkit import conversations, draft, files, runs, settings, targets, trace
from labkit.bench.journal import Journal
from labkit.conversations.store import Store
from labkit.draft import weights
from labkit.errors import LabError
from labkit.extract import forms, record
from labkit.runs import stage
from labkit.runs.archive import BadRecord
from labkit.runs.execute import finished
from labkit.trace import stream
from labkit.train import checkpoint
from tests.unit import kineto


class Harm:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.mkdir, (self.mark,))


def cut(content: bytes) -> bytes:
    """The first two thirds."""
    return content[: len(content) * 2 // 3]


def flipped(content: bytes) -> bytes:
    """A bit of each of the first hundred bytes, and some further on."""
    data = bytearray(content)
    for i in [*range(min(100, len(data))), *range(0, len(data), 97)]:
        data[i] ^= 1 << i % 8
    return bytes(data)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": cut,
    "flipped": flipped,
    "empty": lambda _: b"",
    "zeros": lambda content: bytes(len(content)),
    "another kind": lambda _: b"PK\x03\x04 this is a zip file",
    "deep": lambda _: b"[" * 100_000,
    "a number without an end": lambda _: b"9" * 100_000,
}


def safetensors(path: Path) -> None:
    """Hidden states of three tokens."""
    save_file({"hidden_states": np.ones((3, 4, 8), np.float32), "token_ids": np.arange(3)}, path)


def table(path: Path) -> None:
    """A data set of the lab's own."""
    turn = [{"role": "user", "content": "a" * 50}]
    frame = pd.DataFrame(
        {"input_ids": [[1, 2, 3]] * 20, "loss_mask": [[False, True, True]] * 20, "messages": [turn] * 20}
    )
    files.write_parquet(path, frame)


READERS: dict[str, tuple[str, Callable[[Path], None], Callable[[Path], Any]]] = {
    "states": ("hs_0.safetensors", safetensors, forms.load_states),
    "weights": ("model.safetensors", safetensors, lambda path: weights.places(path.parent)),
    "data set": ("dataset.parquet", table, lambda path: conversations.load(path.parent)),
    "prompts": ("prompts.json", lambda path: files.write_json(path, ["a"]), conversations.read),
    "record": ("run.json", lambda path: files.write_json(path, {"notebook": "x"}), files.read_record),
    "trace": (
        "rank0.json",
        lambda path: path.write_bytes(kineto.canonical([kineto.kernel("k", 10.0 * i, 5.0) for i in range(9)])),
        trace.load,
    ),
    "packed trace": (
        "rank0.json.gz",
        lambda path: path.write_bytes(gzip.compress(kineto.canonical([kineto.kernel("k", 1.0, 5.0)]))),
        trace.load,
    ),
}
USED = {
    ("trace", "cut"),
    ("trace", "flipped"),
    ("packed trace", "cut"),
    ("packed trace", "flipped"),
}  # as far as it goes


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_file_is_named(tmp_path: Path, kind: str, damage: str) -> None:
    name, write, read = READERS[kind]
    path = tmp_path / name
    write(path)
    read(path)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    try:
        found = read(path)
    except LabError as error:
        failed = error
    else:
        assert (kind, damage) in USED
        assert found.warnings
        return
    assert name in failed.what
    assert failed.remedy


@pytest.mark.parametrize("kind", ["states", "weights", "data set", "record", "prompts"])
def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path, kind: str) -> None:
    name, _write, read = READERS[kind]
    (tmp_path / name).mkdir()
    with pytest.raises(LabError, match=name.split(".")[0]):
        read(tmp_path / name)


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("kind", ["states", "weights", "data set", "record", "trace", "prompts"])
def test_a_pickle_in_place_of_a_file_is_refused_and_never_run(tmp_path: Path, kind: str, protocol: int) -> None:
    name, _write, read = READERS[kind]
    (tmp_path / name).write_bytes(pickle.dumps(Harm(tmp_path / "harm"), protocol))
    with pytest.raises(LabError):
        read(tmp_path / name)
    assert not (tmp_path / "harm").exists()


def head_with(folder: Path, weight_map: Any) -> Path:
    """A head's directory whose index says where its tensors are."""
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 8, "hidden_size": 4}
    files.write_json(folder / "config.json", config)
    files.write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    return folder


@pytest.mark.parametrize("name", ["../secret.safetensors", "sub/x.safetensors", "..", 5, None])
def test_an_index_never_leads_out_of_its_folder(tmp_path: Path, name: Any) -> None:
    safetensors(tmp_path / "secret.safetensors")
    head = head_with(tmp_path / "head", {"fc.weight": name})
    with pytest.raises(LabError, match=r"index|plain file name"):
        draft.forms.read(head)
    safetensors(head / "model.safetensors")
    with pytest.raises(targets.sources.BrokenTarget, match=r"plain file name|missing"):
        targets.resolve(head)
    files.write_json(
        head / "model.safetensors.index.json", {"weight_map": {"fc.weight": str(tmp_path / "secret.safetensors")}}
    )
    with pytest.raises(LabError, match="plain file name"):
        draft.forms.read(head)


@pytest.mark.parametrize("weight_map", [None, [], "x", 5])
def test_an_index_of_another_shape_is_named(tmp_path: Path, weight_map: Any) -> None:
    head = head_with(tmp_path / "head", weight_map)
    safetensors(head / "model.safetensors")
    with pytest.raises(LabError, match=r"index\.json"):
        draft.forms.read(head)
    with pytest.raises(targets.sources.BrokenTarget, match=r"index\.json"):
        targets.resolve(head)


def test_a_heads_shard_that_is_a_pickle_is_refused_when_it_is_read(tmp_path: Path) -> None:
    head = head_with(tmp_path / "head", {"fc.weight": "model.safetensors"})
    (head / "model.safetensors").write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    with pytest.raises(LabError, match=r"model\.safetensors cannot be read"):
        draft.forms.read(head).shapes()
    assert not (tmp_path / "harm").exists()


def bomb(path: Path, before: bytes, piece: bytes, megabytes: int) -> None:
    """A small gzip file that unpacks to many megabytes of a piece."""
    packer = zlib.compressobj(9, wbits=31)
    with path.open("wb") as file:
        file.write(packer.compress(before))
        for _ in range(megabytes):
            file.write(packer.compress(piece * ((1 << 20) // len(piece))))
        file.write(packer.flush())


@pytest.mark.parametrize(
    ("before", "piece"),
    [
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "', b"a"),
        (b'{"traceEvents": [], "x": "', b"a"),
        (b'{"traceEvents": [', b'{"ph": "M", "name": "x", "args": {}}, '),
    ],
    ids=["one event", "after the events", "events"],
)
def test_a_packed_bomb_is_left_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes, piece: bytes
) -> None:
    monkeypatch.setattr(stream, "BOMB", 24 << 20)
    path = tmp_path / "rank0.json.gz"
    bomb(path, before, piece, 64)
    assert path.stat().st_size < 256 << 10
    with pytest.raises(trace.NotATrace, match="no profile does"):
        trace.load(path)


def test_a_trace_that_packs_well_is_no_bomb(tmp_path: Path) -> None:
    """A thousand equal steps: what the limit must not refuse."""
    events = [kineto.kernel("gemm", 10.0 * i, 5.0) for i in range(30_000)]
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(kineto.canonical(events)))
    assert len(trace.rank.reduce(path).start) == 30_000


@pytest.mark.parametrize("name", ["../evil", "a/b", "/etc/x", "..", ".", " "])
def test_a_run_stays_in_its_folder(name: str) -> None:
    with pytest.raises(settings.BadParameter, match="run_id"):
        settings.NOTEBOOKS["02_ngram_baseline"].of({"run_id": name})


@pytest.mark.parametrize(
    "content", ["[]", "5", '"x"', "null", "{}", '{"notebook": 5}', '{"executed": []}', '{"notebook": "../../x"}']
)
def test_a_record_of_another_shape_is_named_or_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    chosen = settings.NOTEBOOKS["02_ngram_baseline"].of({"run_id": "r"})
    chosen.folder.mkdir(parents=True)
    (chosen.folder / "run.json").write_text(content)
    if isinstance(json.loads(content), dict):
        assert not finished(chosen)
    else:
        with pytest.raises(files.BrokenFile, match=r"run\.json"):
            finished(chosen)
    with pytest.raises(files.BrokenFile, match=r"run\.json"):
        runs.headline_of(tmp_path / "r")
    with pytest.raises((files.BrokenFile, BadRecord), match=r"run\.json"):
        runs.render("r")


def test_a_record_of_another_folder_is_not_followed(tmp_path: Path) -> None:
    record_ = {"notebook": "../../elsewhere", "headline": {}, "settings": {}, "provenance": {}}
    files.write_json(tmp_path / "02_ngram_baseline" / "run.json", record_)
    with pytest.raises(files.BrokenFile, match="not of its folder"):
        stage.record_of(tmp_path / "02_ngram_baseline" / "run.json")


LINES = [
    b"", b"[]", b"5", b'"x"', b"null", b"{}", b"[" * 5000, b"\x00" * 50, b"\xff\xfe", b"9" * 5000, b'{"key": 5}',
    b'{"key": []}', b'{"key": "k"}', b'{"key": "k", "token_ids": 5}', b'{"concurrency": Infinity, "repeat": 0}',
    b'{"concurrency": 1e999, "repeat": 1, "prompt_id": "p"}',
    b'{"key": "k", "prompt_token_ids": [1], "token_ids": ["x"], "text": "", "finish_reason": "stop"}',
]  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_bad_line_among_kept_rows_costs_only_itself(tmp_path: Path, line: bytes) -> None:
    """The benchmark's journal and the answers' store, in the middle and at the end."""
    row = {"concurrency": 1, "repeat": 0, "prompt_id": "a"}
    answer = {"key": "a", "prompt_token_ids": [1], "token_ids": [2], "text": "t", "finish_reason": "stop"}
    for path, good, read in (
        (tmp_path / "rows.jsonl", row, lambda path: Journal(path).rows()),
        (tmp_path / "answers.jsonl", answer, lambda path: list(Store(path).rows.values())),
    ):
        other = {name: "b" if value == "a" else value for name, value in good.items()}
        path.write_bytes(b"\n".join([json.dumps(good).encode(), line, json.dumps(other).encode(), line]) + b"\n")
        assert read(path) == [good, other]


def test_states_that_are_damaged_are_made_anew_and_checkpoints_passed_over(tmp_path: Path) -> None:
    wanted = {"layers": [1, 2, 3, 4], "hidden_size": 8}
    for damage in DAMAGE.values():
        path = record.states_path(tmp_path, 0)
        safetensors(path)
        assert record.finished(tmp_path, 0, [0, 1, 2], wanted)
        path.write_bytes(damage(path.read_bytes()))
        assert not record.finished(tmp_path, 0, [0, 1, 2], wanted)
        assert checkpoint.newest(path, "d") is None
