"""One Kineto file to arrays, block by block, so that memory does not grow with the file.

Kineto writes every event with its keys in one order, which a single regular expression reads at several
hundred MB/s. A block that does not look like that (other tools' key order, damage) goes through the JSON
decoder event by event instead. Times are integers in nanoseconds: a float loses them at epoch scale.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from labkit.trace import fields, names, stream
from labkit.trace.errors import NotATrace, TraceNotFound

HOPELESS = 500  # places that cannot be decoded, after which the rest of a file is not looked at
LONGEST = 86_400_000_000_000  # ns: a profile does not last a day
PATIENCE = 4 << 20  # an event that is still incomplete after so many bytes is damaged
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
ANNOTATION = ("user_annotation", "gpu_user_annotation")
RUNTIME = ("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "privateuse1_runtime")
KEPT = (*DEVICE, *ANNOTATION, *RUNTIME, "cpu_op")  # python_function and flows are most of a file and not needed
RAN = (*DEVICE, *RUNTIME)

EVENT = re.compile(  # possessive: what does not fit at once does not fit at all
    rb'"ph":\s*+"X",\s*+"cat":\s*+"([^"]*+)",\s*+"name":\s*+"([^"\\]*+(?:\\.[^"\\]*+)*+)",\s*+'
    rb'"pid":\s*+([^,]*+,\s*+"tid":\s*+[^,]*+),\s*+"ts":\s*+([-+.\deE]++),\s*+"dur":\s*+([-+.\deE]++)'
    rb'(?:\s*+,\s*+"args":\s*+\{([^{}]*+)\})?'
)
COMPLETE = re.compile(rb'"ph":\s*"X"')
LANE = re.compile(rb'(.*?),\s*"tid":\s*(.*)', re.DOTALL)
EVENT_START = re.compile(rb'\{\s*"ph"\s*:')
EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
ANY_START = re.compile(r'\{\s*"(?:ph|name|cat|ts|args)"\s*:')
SEPARATORS = re.compile(r"[\s,]*")
DECODER = json.JSONDecoder(strict=False, parse_float=str)  # text keeps every digit of a time


@dataclass
class Events:
    """The events of one file. `start` and `dur` in ns; `name`, `cat` and `lane` are indices into the lists."""

    start: np.ndarray
    dur: np.ndarray
    name: np.ndarray
    cat: np.ndarray
    lane: np.ndarray  # a thread or a stream: (pid, tid)
    correlation: np.ndarray  # joins a launch and what it launched; -1 where unknown
    external: np.ndarray  # joins an annotation on the host and its copies on the device; -1 where unknown
    names: list[str]
    cats: list[str]
    lanes: list[tuple[str, str]]
    args: dict[int, dict[str, Any]]  # of events that may be collectives
    meta: dict[str, Any]
    warnings: list[str] = field(default_factory=list)

    def of_category(self, *wanted: str) -> np.ndarray:
        """A mask of the events in the given categories."""
        return np.isin(self.cat, [i for i, cat in enumerate(self.cats) if cat in wanted])


def read(path: Path) -> Events:
    """Parse one trace file, plain or gzipped. Raises TraceNotFound and NotATrace.

    What can be used of a damaged file is used; `warnings` says what was left out.
    """
    if not path.is_file():
        raise TraceNotFound(f"there is no trace file {path}", "name a Kineto .json or .json.gz file, or a folder")
    table, blocks = Table(path), stream.Blocks(path)
    for block in blocks:
        table.add(block)
        if table.failures > HOPELESS:
            break
    return table.finish(blocks)


class Table:
    """Collects events from blocks that need not end where an event does."""

    def __init__(self, path: Path) -> None:
        """Start empty."""
        self.path = path
        self.warnings: list[str] = []
        self.header = b""
        self.rest = b""
        self.inside = False  # past the `[` of traceEvents
        self.ended = False  # past the `]`, where `rest` is what follows
        self.canonical = True  # events begin with "ph", so a block can be cut without parsing it
        self.columns: list[tuple[np.ndarray, ...]] = []
        self.size = 0
        self.seen = 0
        self.dropped = 0
        self.failures = 0  # of the decoder; a damaged event can take several
        self.sound: int | None = None  # how many events came before the first damage
        self.ids: dict[str, dict[Any, int]] = {"name": {}, "cat": {}, "lane": {}}
        self.maybe: list[bool] = []  # by name: whether it may be a collective
        self.args: dict[int, dict[str, Any]] = {}

    def add(self, block: bytes) -> None:
        """Take the next block."""
        if self.failures > HOPELESS:
            return
        if self.ended and len(self.rest) > stream.BLOCK:  # what a trace says of itself is short
            return
        self.rest += block
        if self.ended or (not self.inside and not self.enter()):
            return
        if not self.canonical:
            self.rest, self.ended = self.decode(self.rest, last=False)
            return
        cut = 0
        for window in (1 << 16, len(self.rest)):  # the last event is near the end, but need not be
            base = max(0, len(self.rest) - window)
            for match in EVENT_START.finditer(self.rest, base):
                cut = match.start()
            if cut:
                break
        if not cut and len(self.rest) > stream.BLOCK + PATIENCE:
            cut = len(self.rest)
        self.match(self.rest[:cut])
        self.rest = self.rest[cut:]

    def enter(self) -> bool:
        """Find the list of events; the text before it is the header."""
        found = EVENTS_KEY.search(self.rest) or re.match(rb"\s*\[", self.rest)
        if not found:
            if len(self.rest) > 8 * stream.BLOCK:
                raise self.not_a_trace()
            return False
        self.header, self.rest, self.inside = self.rest[: found.start()], self.rest[found.end() :], True
        first = re.match(rb'\s*\{\s*"(\w+)"', self.rest)
        self.canonical = first is None or first[1] == b"ph"
        return True

    def not_a_trace(self) -> NotATrace:
        """The error for a file without traceEvents."""
        return NotATrace(
            f"{self.path} has no traceEvents: it starts with {self.rest[:40]!r}",
            "give a trace that torch.profiler wrote (.pt.trace.json or .json.gz)",
        )

    def match(self, block: bytes) -> None:
        """Whole events in Kineto's own form; anything else in the block sends it through the decoder."""
        found = EVENT.findall(block)
        complete = block.count(b'"ph": "X"') or len(COMPLETE.findall(block))
        if len(found) == complete and block.count(b'"ph":') == block.count(b'"pid":'):
            self.store(found)
        else:
            self.decode(block, last=True)

    def decode(self, block: bytes, *, last: bool) -> tuple[bytes, bool]:
        """Events one by one through the JSON decoder.

        Returns the bytes of an event that is not whole yet, or what follows the list of events, and whether the
        list ended. In the `last` block an event that cannot be decoded is left out and counted.
        """
        text = block.decode("utf-8", errors="replace")
        found: list[tuple[Any, ...]] = []
        position, ended, damaged = 0, False, False
        while True:
            position = SEPARATORS.match(text, position).end()  # type: ignore[union-attr]
            ended = text.startswith("]", position)
            if ended or position >= len(text):
                break
            try:
                event, position = DECODER.raw_decode(text, position)
            except (ValueError, RecursionError):  # ValueError also for a number of over 4,300 digits
                if not last and len(text) - position < PATIENCE:
                    break
                if self.sound is None:
                    self.store(found)
                    found, self.sound = [], self.size
                self.dropped += not damaged
                self.failures += 1
                damaged = True
                if self.failures > HOPELESS:
                    break
                following = ANY_START.search(text, position + 1)
                position = following.start() if following else len(text)
                continue
            if isinstance(event, dict) and "ph" in event:
                damaged = False
                if event["ph"] == "X" and "ts" in event:
                    found.append(fields.as_row(event))
        self.store(found)
        return text[position + ended :].encode(), ended

    def store(self, found: list[tuple[Any, ...]]) -> None:
        """Append rows (cat, name, lane, ts, dur, args) to the columns."""
        self.seen += len(found)
        if not found:
            return
        seen = {row[0] for row in found}
        kept = {cat for cat in seen if fields.category(cat) in KEPT}
        rows = found if kept == seen else [row for row in found if row[0] in kept]
        if not rows:
            return
        cat, name, lane, ts, dur, args = zip(*rows, strict=True)
        name_ids, cat_ids, lane_ids = self.intern("name", name), self.intern("cat", cat), self.intern("lane", lane)
        cats = [fields.category(text) for text in self.ids["cat"]]
        ran, noted = (np.array([cat in group for cat in cats])[cat_ids] for group in (RAN, ANNOTATION))
        correlation = fields.numbers(args, ran, "correlation")
        external = fields.numbers(args, noted, "External id")
        maybe = self.maybe_collective()[name_ids] & ~ran  # a kernel's own arguments tell something only if
        maybe[fields.with_key(args, ran, b"Collective name")] = True  # torch knows of the collective
        for i in np.flatnonzero(maybe):
            if args[i]:
                self.args[self.size + int(i)] = fields.as_object(args[i])
        start, length = fields.nanoseconds(ts), fields.nanoseconds(dur)
        self.columns.append((start, length, name_ids, cat_ids, lane_ids, correlation, external))
        self.size += len(rows)

    def intern(self, kind: str, values: tuple[bytes, ...]) -> np.ndarray:
        """Indices of values in the list of that kind."""
        ids = self.ids[kind]
        for value in dict.fromkeys(values):
            ids.setdefault(value, len(ids))
        return np.fromiter(map(ids.__getitem__, values), np.int32, len(values))

    def maybe_collective(self) -> np.ndarray:
        """For each name seen so far, whether it speaks of communication."""
        for name in list(self.ids["name"])[len(self.maybe) :]:
            text = fields.plain_text(name)
            self.maybe.append(text == names.PARAM_COMMS or names.collective(text) is not None)
        return np.array(self.maybe)

    def finish(self, blocks: stream.Blocks) -> Events:
        """Take what is left and put the columns together; raises NotATrace when there is nothing."""
        if not self.inside:
            raise self.not_a_trace()
        tail = self.close()
        if not self.seen:
            raise NotATrace(
                f"{self.path} holds no complete event",
                "profile again: the profiler recorded nothing, or the file is cut",
            )
        columns = [np.concatenate(parts) for parts in zip(*self.columns, strict=True)] if self.columns else []
        if not columns:
            columns = [np.zeros(0, np.int64)] * 7
        columns = self.believed(columns, blocks)
        lanes, columns[4] = self.lanes(columns[4])
        return Events(
            *columns,
            names=[fields.plain_text(name) for name in self.ids["name"]],
            cats=[fields.category(cat) for cat in self.ids["cat"]],
            lanes=lanes,
            args=self.args,
            meta=fields.metadata(self.header) | fields.metadata(tail),
            warnings=self.warnings,
        )

    def believed(self, columns: list[np.ndarray], blocks: stream.Blocks) -> list[np.ndarray]:
        """The columns without events that cannot be right; says which faults the file has."""
        if blocks.fault:
            self.warnings.append(f"{self.path.name}: {blocks.fault}; events up to there are used")
        count = len(columns[0])
        if blocks.corrupt and self.sound is not None:
            count = self.sound
        elif self.failures > HOPELESS:
            self.warnings.append(f"{self.path.name}: damaged in over {HOPELESS} places; what follows is left out")
        elif self.dropped:
            self.warnings.append(f"{self.path.name}: {self.dropped} damaged event(s) left out")
        start, dur = columns[0][:count], columns[1][:count]
        middle = np.median(start) if count else 0
        right = (np.abs(start - middle) < LONGEST) & (dur >= 0) & (dur < LONGEST)
        if not right.all():
            self.warnings.append(
                f"{self.path.name}: {int((~right).sum())} event(s) with impossible times left out"
            )
        keep = np.flatnonzero(right)
        place = np.full(len(columns[0]), -1)
        place[keep] = np.arange(len(keep))
        self.args = {int(place[i]): args for i, args in self.args.items() if place[i] >= 0}
        return [column[keep] for column in columns]

    def lanes(self, column: np.ndarray) -> tuple[list[tuple[str, str]], np.ndarray]:
        """(pid, tid) of each lane, and the column with one number a lane however the file spaced it."""
        split = [LANE.fullmatch(text) for text in self.ids["lane"]]
        plain = [
            tuple(part.decode(errors="replace").strip('" \n\t') for part in m.groups()) if m else ("", "")
            for m in split
        ]
        numbers = {lane: i for i, lane in enumerate(dict.fromkeys(plain))}
        again = np.array([numbers[lane] for lane in plain] or [0])
        return list(numbers), again[column] if len(column) else column  # type: ignore[return-value]

    def close(self) -> bytes:
        """Parse the last block; returns what follows the events. Says so when the file ends too early."""
        if self.canonical:
            end = re.search(rb"\}\s*\]", self.rest)  # the last event is all that is left, so this closes the list
            body, tail, whole = self.rest, b"", end is not None
            if end:
                body, tail = self.rest[: end.start() + 1], self.rest[end.end() :]
            dropped = self.dropped
            self.match(body)
            self.dropped = self.dropped if whole else dropped
        else:
            tail, whole = (self.rest, True) if self.ended else self.decode(self.rest, last=True)
        if not whole:
            self.warnings.append(f"{self.path.name}: ends in the middle of the events; whole ones are used")
        return tail
