"""The collectives of one rank: each call once, with its kind and, where the trace tells, its bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.trace import names
from labkit.trace.parse import RUNTIME, Events

KINDS = (*dict.fromkeys(kind for _, kind in names.SPELLINGS), names.UNKNOWN)
ITEM_BYTES = {
    "double": 8, "float64": 8, "long": 8, "int64": 8, "float": 4, "float32": 4, "int": 4, "int32": 4, "half": 2,
    "float16": 2, "bfloat16": 2, "short": 2, "byte": 1, "char": 1, "uint8": 1, "int8": 1, "bool": 1,
}  # fmt: skip


@dataclass
class Calls:
    """Collective calls in the order of their start: ns; `kind` indexes KINDS, `name` the rank's names."""

    start: np.ndarray
    end: np.ndarray
    kind: np.ndarray
    name: np.ndarray
    bytes: np.ndarray  # of the larger of input and output, on this rank; -1 where unknown
    fused: np.ndarray  # the kernel does more than communicate
    group: np.ndarray  # index into `groups`
    event: np.ndarray  # index of the event it came from
    groups: list[str]  # the ranks that take part, as the trace writes them; "" where it does not say

    def __len__(self) -> int:
        """How many."""
        return len(self.start)


def build(
    events: Events, index: np.ndarray, found: dict[int, names.Collective], hints: dict[int, dict[str, Any]]
) -> Calls:
    """Calls from the events at `index`; `found` by event, `hints` are arguments that tell of bytes and group."""
    index = index[np.argsort(events.start[index], kind="stable")]
    groups: dict[str, int] = {}
    told = [hints.get(int(i), {}) for i in index]
    group = [groups.setdefault(str(args.get("Process Group Ranks", "")), len(groups)) for args in told]
    return Calls(
        start=events.start[index],
        end=events.start[index] + events.dur[index],
        kind=np.array([KINDS.index(found[int(i)].kind) for i in index], np.int8),
        name=events.name[index],
        bytes=np.array([bytes_of(args) for args in told], np.int64),
        fused=np.array([found[int(i)].fused for i in index], bool),
        group=np.array(group, np.int32),
        event=index,
        groups=list(groups),
    )


def device_calls(events: Events, on_device: np.ndarray) -> Calls:
    """Collectives among a device's kernels. What a kernel's name does not tell, its arguments or the host do."""
    by_name = [names.collective(name) for name in events.names]
    may_be = np.array([c is not None and c.layer == 0 for c in by_name] or [False])[events.name]
    kernels = on_device & events.of_category("kernel")
    index = np.flatnonzero(kernels & may_be)
    told = [i for i, args in events.args.items() if kernels[i] and "Collective name" in args]
    index = np.union1d(index, np.array(told, np.int64)).astype(np.int64)
    hints = {int(i): events.args.get(int(i), {}) for i in index}
    found = {int(i): by_name[events.name[i]] or names.Collective(names.UNKNOWN) for i in index}
    blind = [i for i in found if "Collective name" not in hints[i] and events.correlation[i] >= 0]
    hints |= from_host(events, np.array(blind, np.int64))
    for i, args in hints.items():
        kind = names.from_argument(str(args.get("Collective name", "")))
        if kind and (found[i].kind in (names.UNKNOWN, "SendRecv") or kind == found[i].kind):
            found[i] = names.Collective(kind, fused=found[i].fused)
    return build(events, index, found, hints)


def from_host(events: Events, kernels: np.ndarray) -> dict[int, dict[str, Any]]:
    """The host's note of the collective that launched each of these kernels, where there is one."""
    notes = np.array([i for i, args in events.args.items() if "Collective name" in args], np.int64)
    notes = notes[events.of_category("cpu_op", "user_annotation")[notes]] if len(notes) else notes
    if not len(notes) or not len(kernels):
        return {}
    runtime = np.flatnonzero(events.of_category(*RUNTIME) & (events.correlation >= 0))
    launch = {int(events.correlation[i]): int(i) for i in runtime}
    found: dict[int, dict[str, Any]] = {}
    for kernel in kernels:
        at = launch.get(int(events.correlation[kernel]))
        if at is None:
            continue
        t, lane = events.start[at], events.lane[at]
        around = notes[(events.lane[notes] == lane) & (events.start[notes] <= t)]
        around = around[events.start[around] + events.dur[around] >= t]
        if len(around):
            found[int(kernel)] = events.args[int(around[-1])]
    return found


def host_calls(events: Events) -> Calls:
    """Collectives among a CPU's operators. One call is recorded by several layers: the lowest is counted."""
    wanted = events.of_category("cpu_op", "user_annotation")
    by_name = [names.collective(name) for name in events.names]
    found: dict[int, names.Collective] = {}
    for i in np.flatnonzero(wanted & np.array([c is not None for c in by_name] or [False])[events.name]):
        found[int(i)] = by_name[events.name[i]]  # type: ignore[assignment]
    for i, args in events.args.items():
        if wanted[i] and events.names[events.name[i]] == names.PARAM_COMMS:
            kind = names.from_argument(str(args.get("Collective name", "")))
            if kind:
                found[i] = names.Collective(kind, layer=2)
    kept = lowest_layer(events, found)
    hints = {int(i): events.args.get(int(i), {}) for i in kept}
    return build(events, kept, found, hints)


def lowest_layer(events: Events, found: dict[int, names.Collective]) -> np.ndarray:
    """The events to count: of each kind the lowest layer, and of higher ones what no lower one stands for."""
    kept: list[int] = []
    for kind in {c.kind for c in found.values()}:
        mine: list[int] = []
        for layer in sorted({c.layer for c in found.values() if c.kind == kind}):
            here = sorted(
                (i for i, c in found.items() if c.kind == kind and c.layer == layer), key=events.start.__getitem__
            )
            if mine and len(here) == len(mine):
                continue  # an asynchronous call ends before the transport below it begins
            mine += [i for i in here if not overlaps(events, i, mine)]
        kept += mine
    return np.array(sorted(kept), np.int64)


def overlaps(events: Events, index: int, others: list[int]) -> bool:
    """Whether an event shares time with any of the others."""
    if not others:
        return False
    start, end = events.start[others], events.start[others] + events.dur[others]
    return bool(((start <= events.start[index] + events.dur[index]) & (end >= events.start[index])).any())


def bytes_of(args: dict[str, Any]) -> int:
    """Bytes of a collective from its arguments: message sizes, else the shapes of its tensors; -1 if unknown."""
    sizes = [args.get(key) for key in ("In msg nelems", "Out msg nelems")]
    whole = [int(size) for size in sizes if str(size).isdecimal() and len(str(size)) < 16]
    item = ITEM_BYTES.get(str(args.get("dtype", "")).lower())
    if whole and item:
        return max(whole) * item
    shapes, kinds = args.get("Input Dims"), args.get("Input type")
    if not isinstance(shapes, list) or not isinstance(kinds, list):
        return -1
    found = [
        math.prod(shape) * ITEM_BYTES.get(kind.removeprefix("c10::").lower(), 0)
        for shape, kind in zip(shapes, kinds, strict=False)
        if isinstance(shape, list) and shape and isinstance(kind, str)
        if all(isinstance(size, int) for size in shape)
    ]
    most = max(found, default=-1) or -1
    return most if most < 1 << 62 else -1
