"""Rows as they lie in files, directories and hub data sets, not yet understood."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from labkit import files, settings
from labkit.errors import LabError

REMEDY = "give a .jsonl, .json or .parquet file, a directory of such files, a preset's name, or prompts=templated"
LONGEST = 64 << 20  # bytes of a line: none of a data set is longer, and one without an end would fill the memory
ENDINGS = (".jsonl", ".json", ".parquet")


class BadPromptFile(LabError):
    """A file or directory of prompts is missing, empty, unreadable, or no row of it can be used."""


class DatasetUnreachable(LabError):
    """A data set of the hub was asked for and the hub could not deliver it."""


class Broken(str):
    """A line that is no JSON."""


@dataclass(frozen=True)
class Source:
    """Where rows come from: a file, a directory, or a hub data set, and what its columns are called."""

    place: str
    subset: str | None = None
    split: str = "train"
    columns: dict[str, str] = field(default_factory=dict)


def presets() -> dict[str, Source]:
    """The data sets known by name (data/datasets.json)."""
    known = files.read_json(settings.root() / "data" / "datasets.json")
    return {
        name: Source(entry["repo"], entry.get("subset"), entry["split"], entry["columns"])
        for name, entry in known.items()
    }


def source(name: str) -> Source:
    """The source that a preset, `preset@directory` (a copy of it on disk), a path or a hub id stands for."""
    preset, _, copy = name.partition("@")
    known = presets()
    if preset in known and copy:
        return Source(copy, None, known[preset].split, known[preset].columns)
    return known.get(name, Source(name))


def rows(chosen: Source, most: int = 0, seed: int = 0) -> Iterator[Any]:
    """The rows of a source, in order; `most` > 0 takes that many at random where the source is a larger data set.

    Raises BadPromptFile, DatasetUnreachable.
    """
    path = Path(chosen.place).expanduser()
    if path.is_file():
        return of_file(path)
    if path.is_dir():
        return of_dataset(from_directory(path, chosen), most, seed)
    if chosen.place.count("/") == 1 and not path.suffix and not chosen.place.startswith((".", "/", "~")):
        return of_dataset(from_hub(chosen), most, seed)
    raise no_file(path)


def refuse_missing(chosen: Source) -> None:
    """Raise BadPromptFile where a source is plainly a file, by its ending, and not there."""
    path = Path(chosen.place).expanduser()
    if path.suffix in ENDINGS and not path.exists():
        raise no_file(path)


def no_file(path: Path) -> BadPromptFile:
    """The error for a file that is not there."""
    return BadPromptFile(f"there is no prompt file {path}", f"{REMEDY}; presets: {', '.join(presets())}")


def of_file(path: Path) -> Iterator[Any]:
    """The rows of one file; a line that is no JSON comes as Broken."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix not in ENDINGS:
        raise BadPromptFile(f"{path} has the unknown ending {path.suffix!r}", REMEDY)
    try:
        if path.suffix == ".jsonl":
            yield from lines(path)
        elif path.suffix == ".json":
            value = json.loads(path.read_text(encoding="utf-8-sig"))
            yield from value if isinstance(value, list) else [value]
        else:
            with pq.ParquetFile(path) as table:
                for batch in table.iter_batches(1024):
                    yield from batch.to_pylist()
    except (OSError, ValueError, LookupError, TypeError, RecursionError, ArithmeticError) as error:
        raise BadPromptFile(f"{path} cannot be read: {error}", REMEDY) from error
    except (pa.ArrowException, MemoryError) as error:
        raise BadPromptFile(f"{path} cannot be read: {error}", REMEDY) from error


def lines(path: Path) -> Iterator[Any]:
    """The values of a JSON-lines file, line by line."""
    with path.open("rb") as file:
        while line := file.readline(LONGEST):
            if line.strip():
                try:
                    yield json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError):  # no JSON, or bytes that are no UTF-8
                    yield Broken(line.decode("utf-8", "replace").strip())


def of_dataset(dataset: Any, most: int, seed: int) -> Iterator[Any]:
    """The rows of a `datasets` data set, or a random part of them in order."""
    if 0 < most < len(dataset):
        chosen = np.random.default_rng(seed).choice(len(dataset), most, replace=False)
        dataset = dataset.select(np.sort(chosen))
    return iter(dataset)


def from_directory(path: Path, chosen: Source) -> Any:
    """A data set that `save_to_disk` wrote or that `load_dataset` finds in a directory of files.

    Where the files have no split of the wanted name, the one split that there is counts.
    """
    import datasets

    try:
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path), chosen.subset)
    except Exception as error:  # datasets has an error class for each of its builders, with no common base
        cause = " ".join(str(error.__cause__ or error).split())[:300]  # datasets hides the file and row there
        raise BadPromptFile(
            f"{path} cannot be loaded: {cause}",
            "its files have to be readable and alike; or give one .jsonl file: there, bad rows are left out",
        ) from error
    if isinstance(found, datasets.Dataset):
        return found
    if chosen.split not in found and len(found) > 1:
        raise BadPromptFile(
            f"{path} has no split {chosen.split!r}", f"it has {', '.join(found)}: give one's own path"
        )
    return found[chosen.split] if chosen.split in found else next(iter(found.values()))


def from_hub(chosen: Source) -> Any:
    """A data set of the hub (Hugging Face's cache is used)."""
    import datasets

    try:
        return datasets.load_dataset(chosen.place, chosen.subset, split=chosen.split)
    except Exception as error:  # no network, no such data set, a builder's own error: all mean "not to be had"
        raise DatasetUnreachable(
            f"the data set {chosen.place} cannot be had: {type(error).__name__}: {str(error)[:200]}",
            "download it elsewhere and give its directory (`preset@directory` for a preset), or use "
            "prompts=self (the target writes its own) or prompts=templated",
        ) from error
