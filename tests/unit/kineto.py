"""Synthetic Kineto traces whose truth is known by construction."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def event(cat: str, name: str, ts: float, dur: float, pid: Any = 1, tid: Any = 1, **args: Any) -> Event:
    """A complete event, times in µs."""
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(name: str, ts: float, dur: float, stream: int = 7, **args: Any) -> Event:
    """A kernel on a stream of device 0."""
    return event("kernel", name, ts, dur, 0, stream, stream=stream, device=0, **args)


def marked(name: str, ts: float, dur: float, external: int, ahead: float = 0.0, stream: int = 7) -> list[Event]:
    """A step's annotation on the host, `ahead` µs early, and its copy on the device."""
    return [
        event("user_annotation", name, ts - ahead, dur, **{"External id": external}),
        event("gpu_user_annotation", name, ts, dur, 0, stream, **{"External id": external}),
    ]


def number(value: float) -> str:
    """µs as Kineto writes them."""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def canonical(events: list[Event], **meta: Any) -> bytes:
    """A file as Kineto itself lays it out."""
    parts = []
    for e in events:
        lines = [f'"ph": "{e["ph"]}"', f'"cat": {json.dumps(e["cat"])}', f'"name": {json.dumps(e["name"])}']
        lines += [f'"pid": {json.dumps(e["pid"])}', f'"tid": {json.dumps(e["tid"])}']
        lines += [f'"ts": {number(e["ts"])}', f'"dur": {number(e["dur"])}']
        text = ",\n    ".join(lines)
        args = ",".join(f'"{key}": {json.dumps(value)}' for key, value in e["args"].items())
        parts.append(f'  {{\n    {text}\n    ,\n    "args": {{\n      {args}\n    }}\n  }}')
    head = json.dumps({"schemaVersion": 1, **meta}, indent=2)[:-2]
    return (head + ',\n  "traceEvents": [\n' + ",\n".join(parts) + '\n  ],"traceName": "x"\n}').encode()


def plain(events: list[Event], **meta: Any) -> bytes:
    """A file as json.dumps writes it: other spacing, metadata last."""
    return json.dumps({"traceEvents": events, **meta}).encode()


def sorted_keys(events: list[Event], **meta: Any) -> bytes:
    """A file whose events begin with "args"."""
    return json.dumps({"traceEvents": events, **meta}, sort_keys=True, separators=(",", ":")).encode()


def write(path: Path, events: list[Event], form: Any = canonical, **meta: Any) -> Path:
    """Write a trace, gzipped when the name says so."""
    content = form(events, **meta)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def rank_meta(rank: int, world: int) -> dict[str, Any]:
    """A trace's own word on whose it is."""
    return {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world}}


# The ground truth of `two_ranks`: a decode step of 1000 µs with 4 layers, one embedding and one gather.
LAYERS = 4
TRANSFER = 5.0


def reduces(rank: int, step_start: float) -> list[tuple[float, float]]:
    """(start, end) of the nine AllReduces of a step: rank 1 comes 30 µs later to the even ones, rank 0 10 µs later
    to the odd ones, and both end together, TRANSFER after the later start."""
    found = []
    for i in range(2 * LAYERS + 1):
        base = step_start + 50 + 100 * i
        late = {0: 10.0 if i % 2 else 0.0, 1: 0.0 if i % 2 else 30.0}
        found.append((base + late[rank], base + max(late.values()) + TRANSFER))
    return found


def two_ranks(
    folder: Path,
    steps: int = 3,
    *,
    clock: float = 0.0,
    origin: float = 1000.0,
    markers: bool = True,
    skip_steps: int = 0,
    drop: tuple[int, int] | None = None,
    uneven: bool = False,
    form: Any = canonical,
    suffix: str = ".pt.trace.json.gz",
) -> Path:
    """Traces of two GPU ranks: GEMM 40 µs before and elementwise 20 µs after the start of each AllReduce's slot.

    Rank 1's clock is `clock` µs ahead; its profiler misses the first `skip_steps`; `drop` = (step, index) removes
    one of its AllReduces. With `uneven` steps differ in length, as real ones do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = "execute_context_0(0)_generation_1(1)"
    for rank in (0, 1):
        events: list[Event] = []
        start = origin
        for step in range(steps):
            shift = clock if rank else 0.0
            step_events: list[Event] = []
            for i, (begin, end) in enumerate(reduces(rank, start)):
                base = start + 50 + 100 * i
                step_events.append(kernel("nvjet_tst_128x64", base - 42, 40.0))
                if not (rank == 1 and drop == (step, i)):
                    step_events.append(
                        kernel("void vllm::cross_device_reduce_1stage<bf16, 2>", begin, end - begin)
                    )
                step_events.append(kernel("vectorized_elementwise_kernel", end + 1, 3.0))
            step_events.append(kernel("ncclDevKernel_AllGather_RING_LL(x)", start + 960, 15.0))
            if markers:
                step_events += marked(name, start, 1000.0, step + 1, ahead=300.0)
            if not (rank == 1 and step < skip_steps):
                events += [e | {"ts": e["ts"] + shift} for e in step_events]
            start += 1100.0 + (37.0 * step * step if uneven else 0.0)
        events.append(event("python_function", "model.py(1): forward", origin, 5.0))
        write(folder / f"rank{rank}{suffix}", events, form, **rank_meta(rank, 2))
    return folder
