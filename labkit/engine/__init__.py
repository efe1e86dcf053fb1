"""vLLM server variants: start, wait, attach, stop."""

from __future__ import annotations

from labkit.engine.server import (
    BadTensorParallel,
    EngineDied,
    EngineFailed,
    OnDemand,
    PortInUse,
    Server,
    ServerUnreachable,
    attach,
    on_demand,
    serve,
)
from labkit.engine.urls import base_url
from labkit.engine.variants import VARIANTS, UnknownVariant

__all__ = [
    "VARIANTS",
    "BadTensorParallel",
    "EngineDied",
    "EngineFailed",
    "OnDemand",
    "PortInUse",
    "Server",
    "ServerUnreachable",
    "UnknownVariant",
    "attach",
    "base_url",
    "on_demand",
    "serve",
]
