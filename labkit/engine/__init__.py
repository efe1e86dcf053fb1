"""vLLM server variants: start, wait, attach, stop."""

from __future__ import annotations

from labkit.engine.server import (
    BadTensorParallel,
    EngineDied,
    EngineFailed,
    PortInUse,
    Server,
    ServerUnreachable,
    attach,
    serve,
)
from labkit.engine.urls import base_url
from labkit.engine.variants import VARIANTS, UnknownVariant

__all__ = [
    "VARIANTS",
    "BadTensorParallel",
    "EngineDied",
    "EngineFailed",
    "PortInUse",
    "Server",
    "ServerUnreachable",
    "UnknownVariant",
    "attach",
    "base_url",
    "serve",
]
