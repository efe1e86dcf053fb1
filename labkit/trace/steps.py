"""Where the steps of a rank begin and end, from its markers."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from labkit.trace.parse import RUNTIME, Events

COUNT = r"(\d{1,15})"
VLLM = re.compile(
    rf"execute_(?:\d+_)?context_{COUNT}\((?:sq)?{COUNT}[^)]*\)_generation_{COUNT}\((?:sq)?{COUNT}[^)]*\)$"
)
SGLANG = re.compile(rf"step\[(\w+)\s+bs={COUNT}(?:\s+toks={COUNT})?")
TORCH = re.compile(r"ProfilerStep#?\d+$")
SGLANG_PHASES = {"decode": "decode", "target_verify": "decode", "extend": "prefill", "prefill": "prefill"}


@dataclass(frozen=True)
class Marker:
    """What a step's annotation tells. Requests and tokens are -1 where it does not."""

    phase: str  # decode, prefill, mixed, empty, or "step" where the marker does not say
    context_requests: int = -1
    context_tokens: int = -1
    generation_requests: int = -1
    generation_tokens: int = -1


def marker(name: str) -> Marker | None:
    """The step that an annotation marks: vLLM's, SGLang's or torch's; None for any other name.

    Speculative decoding verifies several tokens of a request: generation_tokens counts them.
    """
    if match := VLLM.match(name):
        context, context_tokens, generation, generation_tokens = map(int, match.groups())
        phase = ("mixed" if generation else "prefill") if context else ("decode" if generation else "empty")
        return Marker(phase, context, context_tokens, generation, generation_tokens)
    if match := SGLANG.match(name):
        requests, tokens = int(match[2]), int(match[3] or -1)
        phase = SGLANG_PHASES.get(match[1].lower(), match[1].lower())
        if phase == "decode":
            return Marker(phase, 0, 0, requests, tokens if tokens > 0 else requests)
        return Marker(phase, requests, tokens, *((0, 0) if phase == "prefill" else ()))
    return Marker("step") if TORCH.match(name) else None


def rank_of_marker(name: str) -> int:
    """Which kind of marker to believe first where a trace has several; 0 for no marker."""
    return 3 if VLLM.match(name) else 2 if SGLANG.match(name) else 1 if TORCH.match(name) else 0


@dataclass
class Windows:
    """The steps of one rank in the order of their start: ns, and indices into the names."""

    start: np.ndarray
    end: np.ndarray
    name: np.ndarray
    lane: int = -1  # the thread that the markers are on; -1 where there are none

    def __len__(self) -> int:
        """How many."""
        return len(self.start)


def marked(events: Events) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the step markers on the host and of their copies on the device, best kind only."""
    kinds = np.array([rank_of_marker(name) for name in events.names] or [0])[events.name]
    host = events.of_category("user_annotation") & (kinds > 0)
    device = events.of_category("gpu_user_annotation") & (kinds > 0)
    if not (host | device).any():
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    best = kinds[host | device].max()
    in_order = np.argsort(events.start, kind="stable")
    return tuple(in_order[(mask & (kinds == best))[in_order]] for mask in (host, device))  # type: ignore[return-value]


def find(events: Events, device_mask: np.ndarray) -> Windows:
    """The steps from the markers; on a device, the span of what the marked host call made it run.

    Kineto copies an annotation to every stream on which it launched something: one step all the same.
    """
    host, device = marked(events)
    lane = int(events.lane[host[0]]) if len(host) else -1
    if not device_mask.any():
        return windows(events, host, events.start[host], events.start[host] + events.dur[host], lane)
    if len(device):
        return from_device(events, host, device, lane)
    return from_launches(events, host, device_mask, lane)


def windows(events: Events, index: np.ndarray, start: np.ndarray, end: np.ndarray, lane: int) -> Windows:
    """Windows in the order of their start. A step of no time is none: nothing can be a share of it."""
    order = np.argsort(start, kind="stable")
    order = order[end[order] > start[order]]
    return Windows(start[order], end[order], events.name[index][order], lane)


def from_device(events: Events, host: np.ndarray, device: np.ndarray, lane: int) -> Windows:
    """Steps from the device's copies: those of one host annotation, or overlapping ones, are one step."""
    del host  # its times are those of the launching thread, which may run ahead of the device
    start, end = events.start[device], events.start[device] + events.dur[device]
    group = np.zeros(len(device), np.int64)
    by_external: dict[int, int] = {}
    latest_end, count = np.iinfo(np.int64).min, -1
    for i, index in enumerate(device):
        external = int(events.external[index])
        same_name = i > 0 and events.name[device[i - 1]] == events.name[index]
        if external >= 0 and external in by_external:
            group[i] = by_external[external]
        elif external < 0 and same_name and start[i] < latest_end:
            group[i] = count
        else:
            count += 1
            group[i] = count
        if external >= 0:
            by_external[external] = int(group[i])
        latest_end = max(latest_end, int(end[i])) if group[i] == count else latest_end
    first = np.unique(group, return_index=True)[1]
    starts, ends = np.full(count + 1, np.iinfo(np.int64).max), np.full(count + 1, np.iinfo(np.int64).min)
    np.minimum.at(starts, group, start)
    np.maximum.at(ends, group, end)
    return windows(events, device[first], starts, ends, lane)


def from_launches(events: Events, host: np.ndarray, device_mask: np.ndarray, lane: int) -> Windows:
    """Steps from the launches made inside each host annotation; the annotation's own span without launches."""
    start, end = events.start[host].copy(), events.start[host] + events.dur[host]
    launches = np.flatnonzero(events.of_category(*RUNTIME) & (events.correlation >= 0))
    launched = np.flatnonzero(device_mask & (events.correlation >= 0))
    if not len(host) or not len(launches) or not len(launched):
        return windows(events, host, start, end, lane)
    at = {int(c): int(t) for c, t in zip(events.correlation[launches], events.start[launches], strict=True)}
    launch_time = np.array([at.get(int(c), -1) for c in events.correlation[launched]], np.int64)
    step = np.searchsorted(start, launch_time, "right") - 1
    inside = (step >= 0) & (launch_time >= 0) & (launch_time < end[step])
    for k in range(len(host)):
        mine = launched[inside & (step == k)]
        if len(mine):
            start[k], end[k] = events.start[mine].min(), (events.start[mine] + events.dur[mine]).max()
    return windows(events, host, start, end, lane)
