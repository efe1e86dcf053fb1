"""vLLM server variants: start, wait, attach, stop; and the swap of a systemd service for one of them."""

from __future__ import annotations

from labkit.engine.holders import GpuMemoryHeld
from labkit.engine.manager import CommandFailed, NoService
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
from labkit.engine.swapping import GuardDied, NoSwap, SwapBusy, restore, status, swap
from labkit.engine.swapplan import NoPort, NotApplied, SwapPlan, plan
from labkit.engine.swapsteps import NotRestored, PortHeld, ProcessesStay, SwapRefused, VariantFailed
from labkit.engine.units import UnitUnreadable
from labkit.engine.urls import base_url
from labkit.engine.variants import VARIANTS, UnknownVariant, Variant, diff

__all__ = [
    "VARIANTS",
    "BadTensorParallel",
    "CommandFailed",
    "EngineDied",
    "EngineFailed",
    "GpuMemoryHeld",
    "GuardDied",
    "NoPort",
    "NoService",
    "NoSwap",
    "NotApplied",
    "NotRestored",
    "OnDemand",
    "PortHeld",
    "PortInUse",
    "ProcessesStay",
    "Server",
    "ServerUnreachable",
    "SwapBusy",
    "SwapPlan",
    "SwapRefused",
    "UnitUnreadable",
    "UnknownVariant",
    "Variant",
    "VariantFailed",
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
