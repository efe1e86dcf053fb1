"""From a path to reduced ranks: which files are traces, whose they are, and reading them side by side."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import psutil

from labkit.trace import errors
from labkit.trace.errors import NotATrace, TraceNotFound
from labkit.trace.rank import Rank, rank_in_name, reduce, restore

INLINE = 24_000_000  # bytes of JSON below which another process costs more than it saves
FOR_A_WORKER = 150_000_000  # bytes a worker needs beyond its arrays
SUFFIXES = (".json", ".json.gz", ".pt.trace.json.gz")
FRONTEND = re.compile(r"async_llm")  # vLLM's API process: no rank of the model


def find(source: str | Path | Iterable[str | Path]) -> list[Path]:
    """The trace files that are meant: a file, several, or those in a folder. Raises TraceNotFound."""
    several = [source] if isinstance(source, (str, Path)) else list(source)
    found: list[Path] = []
    for path in map(Path, several):
        if path.is_dir():
            found += sorted(
                file for file in path.iterdir() if file.name.endswith(SUFFIXES) and not file.name.startswith(".")
            )
        elif path.is_file():
            found.append(path)
        else:
            raise TraceNotFound(
                f"there is no trace at {path}", "name a Kineto .json or .json.gz file, or a folder"
            )
    if not found:
        where = ", ".join(map(str, several)) or "an empty list"
        raise TraceNotFound(
            f"{where} holds no .json or .json.gz file", "name the folder with one trace file a rank"
        )
    return found


def load_ranks(source: str | Path | Iterable[str | Path]) -> tuple[list[Rank], list[str]]:
    """Read all ranks, sorted by rank; and what there is to say about files that were left out or doubtful.

    Raises TraceNotFound, NotATrace when no file can be used, and NoKernels when any rank's kernels are missing.
    """
    paths = find(source)
    warnings = [f"{path.name}: the API process's trace, left out" for path in paths if FRONTEND.search(path.name)]
    paths = [path for path in paths if not FRONTEND.search(path.name)]
    ranks, refused = [], []
    for path, outcome in zip(paths, read_all(paths), strict=True):
        if isinstance(outcome, NotATrace):
            refused.append(outcome)
            warnings.append(f"{path.name}: left out, {outcome.what}")
        else:
            ranks.append(outcome)
            warnings += outcome.warnings
    if not ranks:
        raise (
            refused[0] if refused else NotATrace("there is only the API process's trace", "add the workers' files")
        )
    ranks = newest_capture(ranks, warnings)
    give_ranks(ranks, warnings)
    return sorted(ranks, key=lambda rank: rank.rank or 0), warnings


def json_bytes(path: Path) -> int:
    """Size of a file once decompressed (a gzip file's own note of it, modulo 4 GiB)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b" or size < 18:
            return size
        file.seek(-4, os.SEEK_END)
        return max(int.from_bytes(file.read(4), "little"), size)


def read_all(paths: list[Path]) -> list[Rank | NotATrace]:
    """Reduce every file, large ones in processes of their own: as many as cores and memory allow."""
    sizes = [json_bytes(path) for path in paths]
    if sum(sizes) < INLINE or len(paths) == 1:
        return [read_here(path) for path in paths]
    room = psutil.virtual_memory().available // (max(sizes) + FOR_A_WORKER)
    workers = max(1, min(len(paths), len(os.sched_getaffinity(0)), int(room)))
    with tempfile.TemporaryDirectory(prefix="labkit-trace-") as scratch:
        outs = [Path(scratch) / f"{i}.npz" for i in range(len(paths))]
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            return list(pool.map(read_apart, paths, outs))


def read_here(path: Path) -> Rank | NotATrace:
    """Reduce a file in this process; a file that is no trace is an answer, other failures are raised."""
    try:
        return reduce(path)
    except NotATrace as error:
        return error
    except (MemoryError, RecursionError) as error:
        return unreadable(path, repr(error))


def unreadable(path: Path, why: str) -> NotATrace:
    """The error for a file at which reading itself failed."""
    return NotATrace(f"{path} could not be read: {why}", "free memory or analyse fewer ranks at a time")


def read_apart(path: Path, out: Path) -> Rank | NotATrace:
    """Reduce a file in a fresh process (a fork of a notebook's kernel would copy its threads' locks)."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("LD_PRELOAD", None)
    command = [sys.executable, "-m", "labkit.trace.rank", str(path), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    failed = out.with_suffix(".error")
    if failed.exists():
        told = json.loads(failed.read_text())
        error = getattr(errors, told["kind"], NotATrace)(told["what"], told["remedy"])
        if isinstance(error, NotATrace):
            return error
        raise error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise unreadable(path, last)
    rank = restore(out)
    out.unlink()
    return rank


def newest_capture(ranks: list[Rank], warnings: list[str]) -> list[Rank]:
    """One file a rank: where a folder holds several captures, the newest of each rank."""
    told = [rank.rank for rank in ranks]
    by_name = [rank_in_name(Path(rank.path)) for rank in ranks]
    if len(set(told)) < len(told) and None not in by_name and len(set(by_name)) == len(by_name):
        for rank, number in zip(ranks, by_name, strict=True):
            rank.rank = number
        warnings.append(f"several files call themselves rank {told[0]}: their names decide")
        return ranks
    newest: dict[int, Rank] = {}
    others = [rank for rank in ranks if rank.rank is None]
    for rank in ranks:
        if rank.rank is None:
            continue
        before = newest.get(rank.rank)
        if before is None:
            newest[rank.rank] = rank
            continue
        older, newer = sorted((before, rank), key=lambda r: stamp(Path(r.path)))
        newest[rank.rank] = newer
        warnings.append(f"{Path(older.path).name}: an older trace of rank {rank.rank}, left out")
    return [*newest.values(), *others]


def stamp(path: Path) -> tuple[int, float]:
    """When a trace was written: the number in its name, else the file's time."""
    numbers = [int(text) for text in re.findall(r"\d{9,}", path.name)]
    return (max(numbers, default=0), path.stat().st_mtime)


def give_ranks(ranks: list[Rank], warnings: list[str]) -> None:
    """Number the ranks that tell none, and say which ranks of the group are missing."""
    free = (i for i in range(10**6) if i not in {rank.rank for rank in ranks})
    for rank in ranks:
        if rank.rank is None:
            rank.rank = next(free)
            warnings.append(f"{Path(rank.path).name}: tells no rank, called rank {rank.rank}")
    world = max((rank.world_size or 0 for rank in ranks), default=0)
    missing = sorted(set(range(world)) - {rank.rank for rank in ranks})
    if missing and len(ranks) < world:
        warnings.append(
            f"{len(missing)} of {world} ranks are missing ({', '.join(map(str, missing[:8]))}): a transfer is the "
            "shortest over the ranks that are there, so it may contain wait"
        )
