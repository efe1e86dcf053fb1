"""What the links between the ranks can do: topology, collectives by message size, latency and bandwidth."""

from __future__ import annotations

from labkit.collectives.fitting import Link, bus_factor, decode_bytes, dispatch_bytes, fit, summary
from labkit.collectives.measuring import KINDS, LaunchFailed, TooManyRanks, measure, measure_all_to_all
from labkit.collectives.topology import cores, gpu_links

__all__ = [
    "KINDS",
    "LaunchFailed",
    "Link",
    "TooManyRanks",
    "bus_factor",
    "cores",
    "decode_bytes",
    "dispatch_bytes",
    "fit",
    "gpu_links",
    "measure",
    "measure_all_to_all",
    "summary",
]
