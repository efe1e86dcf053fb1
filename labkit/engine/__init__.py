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
from labkit.engine.variants import VARIANTS, UnknownVariant, Variant, diff

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
    "Variant",
    "attach",
    "base_url",
    "diff",
    "on_demand",
    "serve",
]
