"""Cut a Kineto trace down to a few decode steps, for a fixture: trim_trace.py SOURCE OUT FIRST COUNT.

Kept is every event, as it was written, that starts in the chosen decode steps: on the device between the device's
copies of the step markers, on the host between the markers themselves. The header stays; what follows the events
(the name of a temporary file) goes.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

from labkit.trace.steps import marker

EVENT = re.compile(rb'(?<=\n)  \{\n    "ph".*?\n  \}(?=,?\n)', re.DOTALL)
HEADER_END = re.compile(rb'"traceEvents": \[\n')
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
MARKERS = {True: "gpu_user_annotation", False: "user_annotation"}
Span = tuple[float, float]


def is_decode(name: str) -> bool:
    """Whether an annotation marks a decode step."""
    found = marker(name)
    return found is not None and found.phase == "decode"


def chosen(events: list[dict[str, Any]], category: str, first: int, count: int) -> Span | None:
    """From the start of the first chosen step to the end of the last (µs); None without markers of that kind."""
    steps = [e for e in events if e.get("cat") == category and is_decode(e["name"])]
    steps = sorted(steps, key=lambda e: float(e["ts"]))[first : first + count]
    return (steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]) if steps else None


def on_device(event: dict[str, Any]) -> bool:
    """Whether an event is on the device's time line; an arrow's end ("f") lies on its kernel."""
    return event.get("cat") in ON_DEVICE or event["ph"] == "f"


def trim(content: bytes, first: int, count: int) -> bytes:
    """The trace with the chosen steps only."""
    start = HEADER_END.search(content)
    assert start, "not in Kineto's own layout"
    texts = EVENT.findall(content, start.end())
    events = [json.loads(text) for text in texts]
    spans = {device: chosen(events, name, first, count) for device, name in MARKERS.items()}
    kept = []
    for text, event in zip(texts, events, strict=True):
        span = spans[on_device(event)] or spans[False]
        if event["ph"] == "M" or (span and "ts" in event and span[0] <= float(event["ts"]) < span[1]):
            kept.append(text)
    return content[: start.end()] + b",\n".join(kept) + b"\n  ]\n}\n"


def main(source: str, out: str, first: str, count: str) -> None:
    """Write the trimmed trace, gzipped."""
    packed = Path(source).read_bytes()
    content = gzip.decompress(packed) if source.endswith(".gz") else packed
    Path(out).write_bytes(gzip.compress(trim(content, int(first), int(count)), mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
