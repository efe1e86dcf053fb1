"""Which fixes there are, and which of them make sense for a model on a machine."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.costmodel import expert_bytes, weights
from labkit.engine import VARIANTS, launch
from labkit.errors import LabError
from labkit.runs import provenance
from labkit.targets import Geometry

if TYPE_CHECKING:
    from labkit.settings import Profiling

FUSING = ("9.0", "10.0")  # compute capabilities for which FlashInfer has fused AllReduce kernels
ROOM = 0.8  # share of a GPU's memory that weights may take; the rest is cache and activations
MIB = 1 << 20
AUTO, NONE = "auto", "none"


class UnknownFix(LabError):
    """A fix was asked for that the lab does not know."""


@dataclass(frozen=True)
class Fix:
    """A serving variant that changes how ranks share the model, and what asks for it in vLLM."""

    variant: str
    flags: str
    gpu_only: bool = False
    experts_only: bool = False

    @property
    def what(self) -> str:
        """What it changes."""
        return VARIANTS[self.variant].what


FUSED = '--compilation-config \'{"pass_config": {"fuse_allreduce_rms": true}}\''
FIXES = {
    fix.variant: fix
    for fix in (
        Fix("single-rank", "--tensor-parallel-size 1"),
        Fix("nccl-allreduce", "--disable-custom-all-reduce", gpu_only=True),
        Fix("fused-allreduce", FUSED, gpu_only=True),
        Fix("expert-parallel", "--enable-expert-parallel", experts_only=True),
    )
}


def applicable(geometry: Geometry, ranks: int, *, on_gpu: bool) -> list[str]:
    """The fixes that mean something for a model on `ranks` ranks of that kind, wherever it is served."""
    fitting = [f for f in FIXES.values() if (on_gpu or not f.gpu_only) and (geometry.is_moe or not f.experts_only)]
    return [fix.variant for fix in fitting] if ranks > 1 else []


def choose(settings: Profiling, geometry: Geometry) -> dict[str, str]:
    """The fixes to measure, by name, with the address of a server that already runs one ("" to start it here).

    `settings.fixes`: "auto" (those that this machine can serve, where the base is served here), "none", or names
    with commas, each with =URL where a server with that fix runs. Raises UnknownFix.
    """
    asked = settings.fixes.strip()
    if asked in ("", NONE) or (asked == AUTO and (settings.trace_dir or settings.server)):
        return {}
    if asked == AUTO:
        return dict.fromkeys(possible_here(geometry, settings.tensor_parallel_size), "")
    chosen = {}
    for entry in asked.split(","):
        name, _, url = (part.strip() for part in entry.partition("="))
        if name not in FIXES:
            raise UnknownFix(
                f"fixes={asked!r}: there is no fix {name!r}", f"use auto, none, or some of {', '.join(FIXES)}"
            )
        chosen[name] = url
    return chosen


def possible_here(geometry: Geometry, ranks: int) -> list[str]:
    """The applicable fixes that this machine can serve."""
    gpus = provenance.gpus()
    impossible = {
        "single-rank": bool(gpus) and not fits_one(geometry, gpus[0]),
        "fused-allreduce": not fuses(),
    }
    return [name for name in applicable(geometry, ranks, on_gpu=bool(gpus)) if not impossible.get(name)]


def fits_one(geometry: Geometry, gpu: dict[str, str]) -> bool:
    """Whether all weights, unread experts and the embedding too, fit one GPU with room for the cache."""
    unread = geometry.n_routed_experts - geometry.num_experts_per_tok
    resident_gb = weights(geometry)["gb_per_rank"].sum() + 2 * geometry.hidden_size * geometry.vocab_size / 1e9
    if geometry.is_moe:
        resident_gb += unread * geometry.num_moe_layers * expert_bytes(geometry) / 1e9
    return resident_gb < ROOM * float(gpu["memory.total"].split()[0]) * MIB / 1e9


def fuses() -> bool:
    """Whether FlashInfer and a GPU that it has fused kernels for are here."""
    words = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    capable = provenance.command_output(words).splitlines()
    found = importlib.util.find_spec("flashinfer") is not None
    return found and not launch.on_cpu() and bool(capable) and capable[0].strip() in FUSING
