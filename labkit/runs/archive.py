"""A run as somebody names it: a run id, a folder anywhere, or a zip of one, opened without trusting it."""

from __future__ import annotations

import stat
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from labkit import files, settings
from labkit.errors import LabError
from labkit.runs.scrub import Scrubber
from labkit.settings import NOTEBOOKS

WANTED = {".json", ".ipynb", ".parquet", ".png"}  # what pages and comparisons are made of
MOST_FILES, MOST_BYTES, MOST_RATIO = 20_000, 2 << 30, 200
FIELDS = {"notebook": str, "settings": dict, "headline": dict, "provenance": dict}


class UnknownRun(LabError):
    """No run folder of this name, or none with a finished notebook."""


class BadArchive(LabError):
    """A zip is broken, or holds what no run's zip holds."""


class BadRecord(LabError):
    """A run.json is none that a notebook wrote."""


def run_folder(run: str | Path) -> Path:
    """The folder of a run id, or the folder itself; raises UnknownRun."""
    for folder in (Path(run), settings.outputs() / str(run)):
        if folder.is_dir() and any(folder.glob("*/run.json")):
            return folder
    known = sorted({path.parts[-3] for path in settings.outputs().glob("*/*/run.json")})
    raise UnknownRun(
        f"no finished run {str(run)!r} under {settings.outputs()}, and no such folder or zip",
        f"there are: {', '.join(known)}" if known else "run `labkit run all` first",
    )


@contextmanager
def opened(run: str | Path) -> Iterator[Path]:
    """The run's folder; a zip is unpacked into a temporary one. Raises UnknownRun and BadArchive."""
    if not Path(run).is_file():
        yield run_folder(run)
        return
    with tempfile.TemporaryDirectory(prefix="labkit-") as scratch:
        unpack(Path(run), Path(scratch))
        found = sorted(Path(scratch).glob("**/run.json"), key=lambda path: len(path.parts))
        if not found:
            raise UnknownRun(f"{run} holds no run.json", "zip a whole run folder: outputs/<run id>")
        yield found[0].parents[1]


def run_name(run: str | Path) -> str:
    """What a run is called on pages: its id, or the name of the folder or zip."""
    return Path(run).stem if Path(run).is_file() else Path(run).resolve().name


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """notebook: its run.json, in the notebooks' order, scrubbed; raises BadRecord or files.BrokenFile."""
    scrubber = Scrubber()  # runs of earlier versions were stored as they came
    found = {path.parent.name: scrubber.value(record(path)) for path in folder.glob("*/run.json")}
    return {name: found[name] for name in NOTEBOOKS if name in found}


def record(path: Path) -> dict[str, Any]:
    """One run.json, its parts there and of their kind."""
    value = files.read_json(path)
    wrong = [
        name for name, kind in FIELDS.items() if not isinstance(value, dict) or type(value.get(name)) is not kind
    ]
    if wrong or value["notebook"] != path.parent.name or value["notebook"] not in NOTEBOOKS:
        what = f"{path} lacks {', '.join(wrong)}" if wrong else f"{path} is of {value['notebook']!r}"
        raise BadRecord(what, "take the folder as the lab wrote it: <run>/<notebook>/run.json")
    return value


def unpack(archive: Path, into: Path) -> None:
    """Unpack what pages need of a zip; raises BadArchive for anything that would leave `into` or fill the disk.

    Members that no page needs (hidden states, traces) stay packed. Sizes are counted while they are read: what
    the zip's directory says of them may be a lie.
    """
    try:
        with zipfile.ZipFile(archive) as opened_zip:
            members = opened_zip.infolist()
            if len(members) > MOST_FILES:
                raise BadArchive(f"{archive} holds {len(members):,} files", "zip one run folder")
            for member in members:
                refuse(archive, member)
            wanted = [m for m in members if not m.is_dir() and PurePosixPath(m.filename).suffix in WANTED]
            left = MOST_BYTES
            for member in wanted:
                left -= copy(opened_zip, member, into / member.filename, left)
    except (
        zipfile.BadZipFile,
        zipfile.LargeZipFile,
        NotImplementedError,
        RuntimeError,
        EOFError,
        OSError,
    ) as error:
        raise BadArchive(f"{archive} cannot be unpacked ({error})", "have it zipped and sent again") from error
    except ValueError as error:
        raise BadArchive(f"{archive} is damaged ({error})", "have it zipped and sent again") from error


def refuse(archive: Path, member: zipfile.ZipInfo) -> None:
    """Raise BadArchive for a member that points out of the folder, is a link, or is an absurd size."""
    path = PurePosixPath(member.filename)
    outside = path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in path.parts[0][1:2]
    kind = stat.S_IFMT(member.external_attr >> 16)
    advice = "do not open it; ask for a zip of the run folder alone"
    if outside or kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise BadArchive(f"{archive} holds {member.filename!r}, which leaves the folder or is no file", advice)
    if member.file_size > MOST_BYTES and path.suffix in WANTED:
        raise BadArchive(f"{archive}: {member.filename!r} unpacks to {member.file_size / 1e9:.0f} GB", advice)
    if member.file_size > 10 << 20 and member.file_size > MOST_RATIO * max(member.compress_size, 1):
        raise BadArchive(
            f"{archive}: {member.filename!r} is packed {member.file_size / max(member.compress_size, 1):.0f} to 1",
            advice,
        )


def copy(opened_zip: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path, left: int) -> int:
    """Write one member, at most `left` bytes; returns its size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with opened_zip.open(member) as source, path.open("xb") as out:
        while block := source.read(1 << 20):
            written += len(block)
            if written > min(left, MOST_RATIO * member.compress_size + (10 << 20)):
                raise BadArchive(
                    f"{opened_zip.filename} unpacks to too much", "ask for a zip of the run folder alone"
                )
            out.write(block)
    return written
