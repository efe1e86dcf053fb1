"""vLLM server variants: start, wait, attach, stop; and the swap of a systemd service for one of them."""

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
from labkit.engine.swapping import restore, status, swap
from labkit.engine.swapplan import SwapPlan, plan
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
    "SwapPlan",
    "UnknownVariant",
    "Variant",
    "attach",
    "base_url",
    "diff",
    "on_demand",
    "plan",
    "restore",
    "serve",
    "status",
    "swap",
]
