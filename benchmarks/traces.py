"""Traces to measure with: the project's own, repeated in time until a file has the size that is wanted."""

from __future__ import annotations

import gzip
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

EVENTS = re.compile(rb'"traceEvents":\s*\[')
LIST_END = re.compile(rb"\s*\](?=[^\[\]]*\Z)")
SHIFTED = re.compile(rb'("(?:ts|External id|correlation|id)": )(\d+)')
SPAN = re.compile(rb'"ts": ([\d.]+),\s*"dur": ([\d.]+)')
PAUSE = 1000  # µs between two copies


@dataclass
class Template:
    """A trace whose times and ids are open: `events` % values is a copy of it."""

    header: bytes
    events: bytes
    tail: bytes
    values: list[int]
    is_time: list[bool]
    first_us: float
    last_us: float

    @property
    def ids(self) -> int:
        """How far apart the ids of two copies have to be."""
        return max((v for v, time in zip(self.values, self.is_time, strict=True) if not time), default=0) + 1

    def copy(self, number: int, period_us: int, ids: int) -> bytes:
        """The events `number` periods later, with ids of their own."""
        step = (number * ids, number * period_us)
        return self.events % tuple(v + step[time] for v, time in zip(self.values, self.is_time, strict=True))

    def header_of(self, rank: int, world: int) -> bytes:
        """The header, for another rank."""
        told = re.sub(rb'"rank": \d+', b'"rank": %d' % rank, self.header)
        return re.sub(rb'"world_size": \d+', b'"world_size": %d' % world, told)


def template(path: Path) -> Template:
    """Read a small trace, plain or gzipped, in Kineto's own layout."""
    packed = path.read_bytes()
    text = gzip.decompress(packed) if path.suffix == ".gz" else packed
    start, end = EVENTS.search(text), LIST_END.search(text)
    if start is None or end is None:
        raise ValueError(f"{path} is not laid out as Kineto does")
    body = text[start.end() : end.start()]
    spans = [(float(ts), float(dur)) for ts, dur in SPAN.findall(body)]
    gaps = SHIFTED.split(body)
    keys = gaps[1::3]
    pieces = [(text + key).replace(b"%", b"%%") for text, key in zip(gaps[0::3], [*keys, b""], strict=True)]
    return Template(
        header=text[: start.end()],
        events=b"%d".join(pieces),
        tail=text[end.start() :],
        values=[int(value) for value in gaps[2::3]],
        is_time=[key.startswith(b'"ts') for key in keys],
        first_us=min(ts for ts, _ in spans),
        last_us=max(ts + dur for ts, dur in spans),
    )


def enlarge(sources: list[Path], folder: Path, *, ranks: int, megabytes: float, packed: bool = True) -> int:
    """Write a trace of `megabytes` (of JSON, plain) for each of `ranks`; returns the number of copies in each.

    Rank r repeats the events of source r modulo their number, all ranks with the same period, so that what was
    matched stays matched. Files are gzipped, as vLLM writes them, or plain.
    """
    folder.mkdir(parents=True, exist_ok=True)
    templates = [template(path) for path in sources]
    period = math.ceil(max(t.last_us for t in templates) - min(t.first_us for t in templates)) + PAUSE
    ids = max(t.ids for t in templates)
    copies = max(1, round(megabytes * 1e6 / max(len(t.copy(0, 0, 0)) for t in templates)))
    for i, source in enumerate(templates[:ranks]):
        body = folder / f"body{i}"
        with gzip.open(body, "wb", 6) if packed else body.open("wb") as file:
            for number in range(copies):
                file.write((b"," if number else b"") + source.copy(number, period, ids))
            file.write(source.tail)
        for rank in range(i, ranks, len(templates)):
            header = source.header_of(rank, ranks)
            out = folder / f"rank{rank}.pt.trace.json{'.gz' if packed else ''}"
            with out.open("wb") as file, body.open("rb") as events:
                file.write(
                    gzip.compress(header, mtime=0) if packed else header
                )  # gzip files may be strung together
                shutil.copyfileobj(events, file, 1 << 20)
        body.unlink()
    return copies
