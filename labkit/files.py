"""Files that are written whole or not at all, and digests that tell whether inputs changed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import LabError

if TYPE_CHECKING:  # takes seconds to import, which nobody who writes JSON should wait
    import pandas as pd


class DiskFull(LabError):
    """There is no room for a file that a step has to write."""


class BrokenFile(LabError):
    """A file that the lab wrote or was given cannot be read."""


def disk_full(path: Path, needed: int | None = None) -> DiskFull:
    """The error for a full disk under `path`; `needed` in bytes when known."""
    folder = next(p for p in [path, *path.parents] if p.exists())
    free = shutil.disk_usage(folder).free
    want = f", {needed / 1e9:.2f} GB needed" if needed is not None else ""
    return DiskFull(
        f"no room to write {path}: {free / 1e9:.2f} GB free{want}",
        "free some space (outputs/ and .cache/ hold what the lab made) or set LABKIT_CACHE to another disk, "
        "then run the same command again: finished work is kept",
    )


def require_space(path: Path, needed: int) -> None:
    """Raise DiskFull unless `needed` bytes, and a little more, are free where `path` is or will be."""
    folder = next(p for p in [path, *path.parents] if p.exists())
    if shutil.disk_usage(folder).free < needed + 50_000_000:
        raise disk_full(path, needed)


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` (a file or a folder to be made); rename it there on success.

    Raises DiskFull where the disk is full. Nothing of a failed write stays.
    """
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        inner = scratch / path.name
        yield inner
        if inner.is_dir() and path.is_dir():
            path.rename(scratch / "replaced")  # a folder cannot be renamed over another
        inner.replace(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(path) from error
        raise
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=False, default=str) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON; raises BrokenFile naming the file when it is no JSON."""
    try:
        return json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BrokenFile(f"{path} is not readable JSON ({error})", f"delete {path} or restore it") from error


def write_parquet(path: Path, frame: pd.DataFrame) -> None:
    """Write a frame as parquet, atomically."""
    with atomic(path) as temporary:
        frame.to_parquet(temporary, index=False)


def read_parquet(path: Path) -> pd.DataFrame:
    """Read a parquet file; raises BrokenFile naming the file when it cannot be read."""
    import pandas as pd

    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise BrokenFile(f"{path} is not readable parquet ({error})", f"delete {path} and run again") from error


def digest(value: Any) -> str:
    """Sixteen hex digits that change when `value` (anything JSON can hold, and paths) does."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_file(path: Path) -> str:
    """Sixteen hex digits of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
