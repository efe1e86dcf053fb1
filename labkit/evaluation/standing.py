"""Whether all servers can stand side by side: does the memory reach, and what share does each get on a GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from labkit import targets
from labkit.engine import holders, launch
from labkit.settings import Evaluation

CPU_SERVER_GB = 4.0  # a vLLM server's own memory on the CPU besides weights, its cache of 2 GiB included (LOG.md)
FEW_CORES = 4  # below that many, a pair stands side by side at most, unless all are asked for
CPU_SPARE_GB = 2.0  # left to everything else
GPU_SERVER_GB = 6.0  # CUDA context, graphs, activations and a small cache
GPU_SHARE = 0.85  # of what is free, dealt out to all servers: graphs and contexts lie beside their shares
ALL, PAIR, NONE = "all", "pair", "none"
SAID = {
    ALL: "all side by side, measured by turns, prompt by prompt",
    PAIR: "the baseline beside the head, measured by turns, prompt by prompt; others one after the other",
    NONE: "one after the other",
}


@dataclass(frozen=True)
class Standing:
    """`servers` that stand side by side: all, a pair (baseline and head) or none; why.

    `gpu_share`: each one's share of a GPU's memory; 0 on the CPU, and where each has the GPU to itself.
    `cache_gb`: how much of that is for its cache; 0 where the engine is to find out.
    """

    servers: str
    gpu_share: float
    why: str
    cache_gb: float = 0.0

    @property
    def flags(self) -> dict[str, float]:
        """vLLM's options for a server that shares a GPU. With the cache's size given, nothing is profiled.

        Profiling would take other servers' memory for its own (gpu_worker.py, vLLM 0.24 and 0.32).
        """
        share = {"gpu-memory-utilization": round(self.gpu_share, 4)} if self.gpu_share else {}
        return share | ({"kv-cache-memory-bytes": int(self.cache_gb * 1e9)} if self.cache_gb else {})

    @property
    def sentence(self) -> str:
        """How the servers were measured, and why so."""
        return f"{SAID[self.servers]} ({self.why})"


def standing(settings: Evaluation, target: targets.Target | None, count: int, also: Sequence[Path]) -> Standing:
    """Which of `count` servers are to stand side by side: as `side_by_side` says; "auto" looks at the memory.

    "yes" means at least the pair, whatever the memory; without `target` (servers are attached) they stand anyway.
    "auto" also says no at smoke scale and where notebook 02 measured some of them in this run: its rows are used.
    On a CPU of few cores it means the pair at most: the host's speed drifts by more than an idle server costs
    (LOG.md, 2026-12-01), which was measured with one.
    """
    if settings.side_by_side == "no" or count < 2:
        return Standing(NONE, 0.0, "as side_by_side says" if count > 1 else "there is one server")
    if target is None:
        return Standing(ALL, 0.0, "the servers are attached")
    if settings.side_by_side == "auto" and settings.scale == "smoke":
        return Standing(NONE, 0.0, "smoke scale starts as few servers as it can")
    if settings.side_by_side == "auto" and any((path / "run.json").exists() for path in also):
        return Standing(NONE, 0.0, "notebook 02's rows of this run are used")
    gpu = not launch.on_cpu()
    each, free, total = on_gpu(target) if gpu else on_cpu(target)
    fits = int(free // each)
    asked = settings.side_by_side == "yes"
    few = not asked and not gpu and cores() < FEW_CORES
    fits = min(fits, 2) if few and count > 2 else fits
    servers = ALL if fits >= count else PAIR if fits >= 2 or asked else NONE
    number = {ALL: count, PAIR: 2, NONE: 1}[servers]
    share = (free / total if total else GPU_SHARE) / number if gpu and number > 1 else 0.0
    why = f"a server needs about {each:.1f} GB, {free:.1f} GB are free, {count} servers"
    why += f", {cores()} cores" if few else ""
    return Standing(servers, share, why, max(1.0, share * total - each) if share and total else 0.0)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def weights_gb(target: targets.Target) -> float:
    """GB of the target's weight files."""
    return sum(path.stat().st_size for path in target.path.glob("*.safetensors")) / 1e9


def on_cpu(target: targets.Target) -> tuple[float, float, float]:
    """(GB a server needs, GB free, GB in all) on the CPU."""
    memory = psutil.virtual_memory()
    return weights_gb(target) + CPU_SERVER_GB, memory.available / 1e9 - CPU_SPARE_GB, memory.total / 1e9


def on_gpu(target: targets.Target) -> tuple[float, float, float]:
    """(GB a server needs, GB free to be dealt out, GB in all) on the GPU that has least free memory."""
    rows = holders.ask("--query-gpu=memory.free,memory.total")
    known = [[int(cell) * 2**20 / 1e9 for cell in row] for row in rows if all(cell.isdigit() for cell in row)]
    free, total = min(known) if known else (0.0, 0.0)
    return 1.15 * weights_gb(target) + GPU_SERVER_GB, GPU_SHARE * free, total
