"""Files that are written whole or not at all, and digests that tell whether inputs changed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import LabError

if TYPE_CHECKING:  # takes seconds to import, which nobody who writes JSON should wait
    import pandas as pd


# Errors of a write without room; what writes through Rust (safetensors) has the number in its text alone.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FULL_TEXT = re.compile(rf"os error ({'|'.join(map(str, FULL))})\b")


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


def no_room(error: BaseException) -> bool:
    """Whether a write failed because disk, quota or the limit of a file's size allow no more."""
    number = error.errno if isinstance(error, OSError) else None
    return number in FULL or bool(FULL_TEXT.search(str(error)))


def is_plain_name(name: Any) -> bool:
    """Whether this is a file's name without a path: what lies in a folder, and never leads out of it."""
    return isinstance(name, str) and Path(name).name == name and name not in ("", ".", "..")


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
    except Exception as error:
        if no_room(error):
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
    """Read JSON; raises BrokenFile naming the file when it is no JSON, FileNotFoundError where there is none."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenFile(f"{path} is not readable JSON ({error})", f"delete {path} or restore it") from error


def read_record(path: Path, **kinds: type) -> dict[str, Any]:
    """A JSON object whose named fields are of these kinds; raises BrokenFile for anything else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise BrokenFile(f"{path} holds {value!r:.60}, no JSON object", f"delete {path} or restore it")
    for name, kind in kinds.items():
        if not isinstance(value.get(name), kind):
            found = f"{name}={value.get(name)!r:.60}, no {kind.__name__}"
            raise BrokenFile(f"{path} has {found}", f"delete {path} or restore it")
    return value


def write_parquet(path: Path, frame: pd.DataFrame) -> None:
    """Write a frame as parquet, atomically."""
    with atomic(path) as temporary:
        frame.to_parquet(temporary, index=False)


def read_parquet(path: Path) -> pd.DataFrame:
    """Read a parquet file; raises BrokenFile naming the file when it cannot be read."""
    import pandas as pd
    import pyarrow as pa

    try:
        with path.open("rb") as file:  # of a folder pandas would make an empty frame
            return pd.read_parquet(file)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError, pa.ArrowException) as error:
        raise BrokenFile(f"{path} is not readable parquet ({error})", f"delete {path} and run again") from error


def digest(value: Any) -> str:
    """Sixteen hex digits that change when `value` (anything JSON can hold, and paths) does."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_file(path: Path) -> str:
    """Sixteen hex digits of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
