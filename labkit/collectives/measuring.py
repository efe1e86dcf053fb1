"""Collectives by message size through torch.distributed: NCCL on GPUs, gloo on CPUs, launched with torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from labkit import files
from labkit.collectives import worker
from labkit.collectives.fitting import dispatch_bytes
from labkit.errors import LabError
from labkit.runs import provenance
from labkit.targets import Geometry

KINDS = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll")
SIZES = tuple(2**power for power in range(10, 25, 2))  # 1 KiB to 16 MiB
LIMIT_S = 600.0


class TooManyRanks(LabError):
    """More ranks than GPUs."""


class LaunchFailed(LabError):
    """torchrun did not come to an end."""


def measure(
    ranks: int = 2,
    *,
    kinds: Sequence[str] = KINDS,
    sizes: Sequence[int] = SIZES,
    samples: int = 20,
    calls: int = 20,
    on_gpu: bool | None = None,
) -> pd.DataFrame:
    """Time collectives over `sizes` bytes a rank; a row a sample.

    Columns collective bytes mode sample time_us ranks backend. `time_us` is a call's on the slowest rank, the
    mean of `calls` in a row. On GPUs each size is timed launched one by one ("eager") and as a CUDA
    graph ("graph").
    Raises TooManyRanks and LaunchFailed.
    """
    gpus = len(provenance.gpus())
    on_gpu = gpus > 0 if on_gpu is None else on_gpu
    if on_gpu and ranks > gpus:
        raise TooManyRanks(f"{ranks} ranks on {gpus} GPUs", f"use at most {gpus}")
    work = [(kind, int(size)) for kind in kinds for size in sizes]
    backend = "nccl" if on_gpu else "gloo"
    plan = {"backend": backend, "work": work, "samples": samples, "calls": calls, "warmup": 3}
    rows = launch(plan | {"modes": ["eager", "graph"] if on_gpu else ["eager"]}, ranks)
    return pd.DataFrame(rows).assign(ranks=ranks, backend=backend)


def measure_all_to_all(
    geometry: Geometry, ranks: int = 2, *, tokens: Sequence[int] = (1, 2, 4, 8, 16), **options: Any
) -> pd.DataFrame:
    """AllToAll as expert parallelism would send it, at 1 to 16 tokens a GPU: `measure`'s rows with `tokens`."""
    sizes = {dispatch_bytes(geometry, number): number for number in tokens}
    rows = measure(ranks, kinds=["AllToAll"], sizes=list(sizes), **options)
    return rows.assign(tokens=rows["bytes"].map(sizes))


def launch(plan: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Run the plan on `ranks` processes of this machine under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        out, plan_path = Path(folder) / "times.json", Path(folder) / "plan.json"
        files.write_json(plan_path, plan | {"out": str(out)})
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        quiet = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        try:
            done = subprocess.run(
                [*words, worker.__file__, str(plan_path)],
                env=quiet,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise LaunchFailed(f"torchrun was not done after {LIMIT_S:.0f} s", "measure fewer sizes") from error
        if done.returncode or not out.exists():
            last = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
            raise LaunchFailed(f"torchrun ended with code {done.returncode}:\n{last}", "see the lines above")
        return files.read_json(out)
