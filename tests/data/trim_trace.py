"""Cut a Kineto trace down to a few decode steps, for a fixture: trim_trace.py SOURCE OUT FIRST COUNT.

Kept are the step markers, what ran on the device (or, on a CPU, the operators) and the launches in the chosen
decode steps, with the arguments that tell anything; times, names and order stay as they were recorded.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from labkit.trace.steps import marker

HEADER = ("schemaVersion", "distributedInfo", "vllm_version", "displayTimeUnit", "baseTimeNanoseconds")
ARGUMENTS = (
    "External id",
    "correlation",
    "Collective name",
    "Process Group Name",
    "In msg nelems",
    "Out msg nelems",
    "dtype",
)
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
CATEGORIES = (*ON_DEVICE, "user_annotation", "cuda_runtime")
HOST_ONLY = ("cpu_op",)


def chosen_steps(events: list[dict[str, Any]], first: int, count: int) -> dict[bool, tuple[float, float]]:
    """Spans (µs) of the chosen decode steps on the host (False) and on the device (True), where it has markers."""
    spans = {}
    for category in ("gpu_user_annotation", "user_annotation"):
        steps = [e for e in events if e.get("cat") == category and is_decode(e["name"])]
        steps = sorted(steps, key=lambda e: float(e["ts"]))[first : first + count]
        if steps:
            last = steps[-1]
            spans[category in ON_DEVICE] = (float(steps[0]["ts"]), float(last["ts"]) + float(last["dur"]))
    return spans


def is_decode(name: str) -> bool:
    """Whether an annotation marks a decode step."""
    found = marker(name)
    return found is not None and found.phase == "decode"


def inside(event: dict[str, Any], span: tuple[float, float]) -> bool:
    """Whether an event starts in a span."""
    return span[0] <= float(event["ts"]) < span[1]


def reduced(event: dict[str, Any]) -> dict[str, Any]:
    """An event with the arguments that the reader uses."""
    args = {key: value for key, value in event.get("args", {}).items() if key in ARGUMENTS}
    kept = {key: event[key] for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur")}
    return kept | ({"args": args} if args else {})


def trim(source: Path, first: int, count: int) -> dict[str, Any]:
    """The reduced trace of one rank."""
    packed = source.read_bytes()
    content = json.loads(gzip.decompress(packed) if source.suffix == ".gz" else packed)
    events = [e for e in content["traceEvents"] if e.get("ph") == "X"]
    categories = CATEGORIES
    if not any(e["cat"] == "kernel" for e in events):
        categories += HOST_ONLY
    spans = chosen_steps(events, first, count)
    kept = [reduced(e) for e in events if e["cat"] in categories and inside(e, spans[e["cat"] in ON_DEVICE])]
    return {key: content[key] for key in HEADER if key in content} | {"traceEvents": kept}


def main(source: str, out: str, first: str, count: str) -> None:
    """Write the trimmed trace, an event a line."""
    found = trim(Path(source), int(first), int(count))
    events = found.pop("traceEvents")
    head = json.dumps(found)[:-1]
    lines = ",\n".join(json.dumps(event) for event in events)
    text = f'{head}, "traceEvents": [\n{lines}\n]}}\n'
    Path(out).write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
