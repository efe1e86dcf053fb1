"""Hidden states of the target to disk, through vLLM, a checked file a conversation."""

from __future__ import annotations

from labkit.extract.checks import verify
from labkit.extract.layers import BadLayers, default_layers, layers_of
from labkit.extract.states import BrokenStates, NoStates, bytes_needed, run, states_path

__all__ = [
    "BadLayers",
    "BrokenStates",
    "NoStates",
    "bytes_needed",
    "default_layers",
    "layers_of",
    "run",
    "states_path",
    "verify",
]
