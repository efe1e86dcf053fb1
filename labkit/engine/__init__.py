"""vLLM server variants: start, wait, attach, stop; and the swap of a systemd service for one of them."""

from __future__ import annotations

from labkit.engine import sampling
from labkit.engine.holders import GpuMemoryHeld
from labkit.engine.sampling import SampledSpeculation
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
from labkit.engine.service.plan import NoPort, NotApplied, SwapPlan, plan
from labkit.engine.service.steps import NotRestored, PortHeld, ProcessesStay, SwapRefused, VariantFailed
from labkit.engine.service.swap import GuardDied, NoSwap, SwapBusy, SwapEnded, restore, status, swap
from labkit.engine.service.systemd import CommandFailed, NoService
from labkit.engine.service.units import UnitUnreadable
from labkit.engine.urls import base_url
from labkit.engine.variants import VARIANTS, UnknownVariant, Variant, changes, diff

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
    "SampledSpeculation",
    "Server",
    "ServerUnreachable",
    "SwapBusy",
    "SwapEnded",
    "SwapPlan",
    "SwapRefused",
    "UnitUnreadable",
    "UnknownVariant",
    "Variant",
    "VariantFailed",
    "attach",
    "base_url",
    "changes",
    "diff",
    "on_demand",
    "plan",
    "restore",
    "sampling",
    "serve",
    "status",
    "swap",
]
