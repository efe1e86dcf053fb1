"""Files: whole or not at all, digests, full disks."""

import errno
from pathlib import Path

import pandas as pd
import pytest

from labkit import files


def test_failed_write_leaves_the_old_file_and_no_scratch(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"x": 1})
    with pytest.raises(ZeroDivisionError), files.atomic(path) as temporary:
        temporary.write_text(f"half {1 / 0}")
    assert files.read_json(path) == {"x": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_folder_replaces_folder(tmp_path):
    for content in ("old", "new"):
        with files.atomic(tmp_path / "model") as temporary:
            temporary.mkdir()
            (temporary / content).write_text(content)
    assert [entry.name for entry in (tmp_path / "model").iterdir()] == ["new"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_named(tmp_path, number):
    with pytest.raises(files.DiskFull, match=r"big\.bin"), files.atomic(tmp_path / "big.bin"):
        raise OSError(number, "no space")


def test_really_full_disk(tmp_path):
    """/dev/full gives the kernel's own error on every write."""
    with (
        pytest.raises(files.DiskFull),
        files.atomic(tmp_path / "x"),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        full.write(b"0")


def test_space_is_asked_for_before_a_step(tmp_path):
    files.require_space(tmp_path / "not" / "there" / "yet", 1000)
    with pytest.raises(files.DiskFull, match="needed"):
        files.require_space(tmp_path, 10**18)


def test_other_os_errors_pass_through(tmp_path):
    with pytest.raises(PermissionError), files.atomic(tmp_path / "x"):
        raise PermissionError(errno.EACCES, "no")


def test_broken_files_are_named(tmp_path):
    (tmp_path / "a.json").write_text('{"x": ')
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(files.BrokenFile, match=r"a\.json"):
        files.read_json(tmp_path / "a.json")
    with pytest.raises(files.BrokenFile, match=r"a\.parquet"):
        files.read_parquet(tmp_path / "a.parquet")


def test_parquet_round_trip(tmp_path):
    frame = pd.DataFrame({"a_ms": [1.5, 2.5], "ids": [[1, 2], [3]]})
    files.write_parquet(tmp_path / "f.parquet", frame)
    assert files.read_parquet(tmp_path / "f.parquet")["a_ms"].tolist() == [1.5, 2.5]


def test_digest_changes_with_value_not_with_order():
    assert files.digest({"a": 1, "b": 2}) == files.digest({"b": 2, "a": 1})
    assert files.digest({"a": 1}) != files.digest({"a": 2})


@pytest.mark.parametrize("where", ["tempfile.mkdtemp", "pathlib.Path.mkdir"])
def test_full_disk_is_named_even_before_the_first_byte(tmp_path, monkeypatch, where):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(where, full)
    with pytest.raises(files.DiskFull):
        files.write_json(tmp_path / "deep" / "a.json", {})
