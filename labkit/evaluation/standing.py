"""Whether all servers can stand side by side: does the memory reach, and what share does each get on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from labkit import targets
from labkit.engine import holders, launch
from labkit.settings import Evaluation

CPU_SERVER_GB = 2.5  # a vLLM server's own memory on the CPU besides weights (LOG.md)
CPU_SPARE_GB = 2.0  # left to everything else
GPU_SERVER_GB = 6.0  # CUDA context, graphs, activations and a small cache
GPU_SHARE = 0.85  # of what is free, dealt out to all servers: graphs and contexts lie beside their shares


@dataclass(frozen=True)
class Standing:
    """`together`: all servers at once, by turns. `gpu_share`: each one's share of a GPU's memory, 0 on the CPU."""

    together: bool
    gpu_share: float
    why: str


def standing(settings: Evaluation, target: targets.Target | None, count: int, also: Sequence[Path]) -> Standing:
    """Whether `count` servers are to stand side by side: as `side_by_side` says; "auto" looks at the memory.

    "auto" also says no at smoke scale, and where notebook 02 measured some of them in this run: its rows are used.
    """
    if target is None:
        return Standing(settings.side_by_side != "no", 0.0, "the servers are attached")
    gpu = not launch.on_cpu()
    share, need, free = on_gpu(target, count) if gpu else on_cpu(target, count)
    told = f"{count} servers need about {need:.1f} GB, {free:.1f} GB are free"
    if settings.side_by_side != "auto":
        return Standing(settings.side_by_side == "yes", share, f"side_by_side={settings.side_by_side}; {told}")
    if settings.scale == "smoke":
        return Standing(False, 0.0, "smoke scale starts as few servers as it can")
    if any((path / "run.json").exists() for path in also):
        return Standing(False, 0.0, "notebook 02's rows of this run are used")
    return Standing(need <= free, share, told)


def weights_gb(target: targets.Target) -> float:
    """GB of the target's weight files."""
    return sum(path.stat().st_size for path in target.path.glob("*.safetensors")) / 1e9


def on_cpu(target: targets.Target, count: int) -> tuple[float, float, float]:
    """(no share, GB needed, GB free) on the CPU."""
    free = psutil.virtual_memory().available / 1e9 - CPU_SPARE_GB
    return 0.0, count * (weights_gb(target) + CPU_SERVER_GB), free


def on_gpu(target: targets.Target, count: int) -> tuple[float, float, float]:
    """(share of a GPU for each server, GB needed, GB free) on the GPU that has least free memory."""
    rows = holders.ask("--query-gpu=memory.free,memory.total")
    known = [[int(cell) for cell in row] for row in rows if all(cell.isdigit() for cell in row)]
    if not known:
        return 0.0, weights_gb(target), 0.0
    free, total = min(known)
    share = GPU_SHARE * free / total / count
    need = count * (1.15 * weights_gb(target) + GPU_SERVER_GB)
    return share, need, GPU_SHARE * free * 2**20 / 1e9
