"""What the links between the ranks can do: topology, collectives by message size, latency and bandwidth."""

from __future__ import annotations

from labkit.collectives.fitting import Link, as_decoded, bus_factor, decode_bytes, dispatch_bytes, fit, summary
from labkit.collectives.links import NoLinks, all_to_all_sentence, decode_sentence, fits, obtain
from labkit.collectives.measuring import KINDS, LaunchFailed, TooManyRanks, measure, measure_all_to_all
from labkit.collectives.topology import cores, gpu_links

__all__ = [
    "KINDS",
    "LaunchFailed",
    "Link",
    "NoLinks",
    "TooManyRanks",
    "all_to_all_sentence",
    "as_decoded",
    "bus_factor",
    "cores",
    "decode_bytes",
    "decode_sentence",
    "dispatch_bytes",
    "fit",
    "fits",
    "gpu_links",
    "measure",
    "measure_all_to_all",
    "obtain",
    "summary",
]
