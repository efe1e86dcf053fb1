"""One rank's file reduced to what the analysis needs: activities, collectives, steps.

Runs in a process of its own for each large file (`python -m labkit.trace.rank FILE OUT`), so it imports
neither pandas nor anything else that takes long to start.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from labkit.errors import LabError
from labkit.trace import errors as failures
from labkit.trace import fields, names, nesting, steps
from labkit.trace.calls import Calls, device_calls, host_calls
from labkit.trace.parse import DEVICE, RUNTIME, Events, read
from labkit.trace.repetition import from_repetition

RANK_IN_NAME = (  # the first that fits; vLLM: dp0_pp0_tp3_dcp0_ep3_rank3.<time>; SGLang: <time>-TP-3.trace
    re.compile(r"rank[-_]?(\d+)", re.I),
    re.compile(r"(?:^|[-_.])tp[-_]?(\d+)", re.I),
    re.compile(r"(?:worker|device|gpu)[-_]?(\d+)", re.I),
)
LAUNCHED_BUT_UNSEEN = 0.5  # of the graph launches have no kernel: the profile cannot be used
COLLAPSED = 0.8  # of the device time in one launch event: it stands for kernels that were not recorded


@dataclass
class Rank:
    """A reduced rank. Times in ns on the rank's own clock; names are indices into `names`."""

    path: str
    rank: int | None
    world_size: int | None
    device: str  # "gpu" or "cpu"
    base_ns: int
    names: list[str]
    start: np.ndarray  # of what ran, communication left out: kernels, or operators' own time
    end: np.ndarray
    category: np.ndarray  # index into names.CATEGORIES
    name: np.ndarray
    first: np.ndarray  # whether it is the first stretch of its operator
    calls: Calls
    steps: steps.Windows
    warnings: list[str]


def reduce(path: Path) -> Rank:
    """Read one rank's file. Raises NotATrace, TraceNotFound, NoKernels."""
    events = read(path)
    on_device = events.of_category(*DEVICE)
    refuse_unseen_kernels(path, events, on_device)
    if on_device.any():
        calls = device_calls(events, on_device)
        work = np.flatnonzero(on_device)
        work = work[~np.isin(work, calls.event)]
        start, end, name = events.start[work], events.start[work] + events.dur[work], events.name[work]
        categories = category_of(events)[name]
        first = np.ones(len(work), bool)
        copies = events.of_category("gpu_memcpy", "gpu_memset")[work]
        categories[copies] = names.CATEGORIES.index(names.COPY)
        windows = steps.find(events, on_device)
    else:
        windows = steps.find(events, on_device)
        lane = nesting.main_lane(events, windows.lane)
        calls = host_calls(events)
        start, end, name, categories, first = nesting.own_time(events, lane, calls, category_of(events))
    rank = Rank(
        path=str(path),
        rank=rank_of(path, events.meta),
        world_size=world_of(events.meta),
        device="gpu" if on_device.any() else "cpu",
        base_ns=events.meta.get("baseTimeNanoseconds", 0),
        names=events.names,
        start=start,
        end=end,
        category=categories.astype(np.int8),
        name=name,
        first=first,
        calls=calls,
        steps=windows,
        warnings=events.warnings,
    )
    if not len(windows):
        rank.steps, told = from_repetition(start[first], end[first], name[first], calls)
        rank.warnings.append(f"{path.name}: no step markers; {told}")
    return rank


def category_of(events: Events) -> np.ndarray:
    """The category of each name, as indices into names.CATEGORIES."""
    return np.array([names.CATEGORIES.index(names.work(name)) for name in events.names] or [0])


def distributed(meta: dict[str, Any]) -> dict[str, Any]:
    """The trace's distributedInfo where it is a mapping."""
    found = meta.get("distributedInfo")
    return found if isinstance(found, dict) else {}


def world_of(meta: dict[str, Any]) -> int | None:
    """How many ranks there are, where the trace says so."""
    size = distributed(meta).get("world_size")
    return size if fields.whole(size, 1 << 20) else None


def rank_of(path: Path, meta: dict[str, Any]) -> int | None:
    """The rank from the content, failing that from the file's name, failing that None."""
    rank = distributed(meta).get("rank")
    return rank if fields.whole(rank, 1 << 20) else rank_in_name(path)


def rank_in_name(path: Path) -> int | None:
    """The rank that a file's name gives."""
    found = next((m for pattern in RANK_IN_NAME if (m := pattern.search(path.name))), None)
    return int(found[1]) if found and len(found[1]) < 7 else None


def refuse_unseen_kernels(path: Path, events: Events, on_device: np.ndarray) -> None:
    """Raise NoKernels where a graph's launch was recorded and its kernels were not: idle would be a lie."""
    graph = np.array([bool(re.search(r"GraphLaunch", name)) for name in events.names] or [False])[events.name]
    launches = events.of_category(*RUNTIME) & graph
    remedy = (
        "profile with enforce_eager (no CUDA/HIP graphs), or with a profiler that records kernels inside graphs"
    )
    total = int(events.dur[on_device].sum())
    if on_device.any() and events.dur[on_device & graph].sum() > COLLAPSED * total:
        raise failures.NoKernels(
            f"{path}: over {COLLAPSED:.0%} of the device time is one graph-launch event", remedy
        )
    host = events.of_category("cpu_op") & graph
    if not on_device.any():
        if launches.any() or host.any():
            raise failures.NoKernels(
                f"{path} has {int((launches | host).sum())} graph launches and not one kernel", remedy
            )
        if (events.of_category(*RUNTIME) & (events.correlation >= 0)).any():
            raise failures.NoKernels(
                f"{path} has runtime launches and not one kernel",
                "profile with the device's activity (ProfilerActivity.CUDA) as well as the host's",
            )
        return
    known = launches & (events.correlation >= 0)
    if known.any():
        seen = np.isin(events.correlation[known], events.correlation[on_device])
        if (~seen).mean() > LAUNCHED_BUT_UNSEEN:
            raise failures.NoKernels(
                f"{path}: {int((~seen).sum())} of {len(seen)} graph launches have no kernel in the trace", remedy
            )


PLAIN = ("path", "rank", "world_size", "device", "base_ns", "names", "warnings")
ARRAYS = ("start", "end", "category", "name", "first")


def save(rank: Rank, out: Path) -> None:
    """Write a reduced rank to an .npz file."""
    arrays = {key: getattr(rank, key) for key in ARRAYS}
    arrays |= {f"calls.{key}": value for key, value in vars(rank.calls).items() if isinstance(value, np.ndarray)}
    arrays |= {f"steps.{key}": getattr(rank.steps, key) for key in ("start", "end", "name")}
    plain = {key: getattr(rank, key) for key in PLAIN}
    plain |= {"groups": rank.calls.groups, "lane": rank.steps.lane}
    with out.open("wb") as file:
        np.savez(file, plain=np.frombuffer(json.dumps(plain).encode(), np.uint8), **arrays)


def restore(out: Path) -> Rank:
    """Read what `save` wrote."""
    with np.load(out) as stored:
        arrays = {key: stored[key] for key in stored.files}
    plain = json.loads(arrays.pop("plain").tobytes())
    calls = {key.removeprefix("calls."): value for key, value in arrays.items() if key.startswith("calls.")}
    windows = {key.removeprefix("steps."): value for key, value in arrays.items() if key.startswith("steps.")}
    return Rank(
        calls=Calls(**calls, groups=plain.pop("groups")),
        steps=steps.Windows(**windows, lane=plain.pop("lane")),
        **{key: arrays[key] for key in ARRAYS},
        **plain,
    )


def main(source: str, out: str) -> None:
    """Reduce a file for the parent process; a failure that the lab explains is written as JSON instead."""
    gc.disable()  # nothing here refers to itself, and looking for what does takes a tenth of the time
    try:
        save(reduce(Path(source)), Path(out))
    except LabError as error:
        told = {"kind": type(error).__name__, "what": error.what, "remedy": error.remedy}
        Path(out).with_suffix(".error").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
