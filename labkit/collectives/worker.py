"""One rank of the collective benchmark: started by torchrun with a JSON plan, writes a JSON of times.

Every sample times `calls` collectives in a row on each rank; a sample's time is that of the slowest rank. On GPUs
the calls run as one CUDA graph where asked for, as decode steps do, so that launching is not measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

Call = Callable[[], Any]


def make_call(kind: str, size: int, device: torch.device) -> Call:
    """The collective over a message of `size` bytes a rank (bf16), as a call without arguments."""
    ranks = dist.get_world_size()
    count = max(ranks, size // 2 // ranks * ranks)  # elements, dealt out evenly
    whole = torch.ones(count, dtype=torch.bfloat16, device=device)
    part = whole[: count // ranks].clone()
    other = torch.empty_like(whole)
    calls: dict[str, Call] = {
        "AllReduce": lambda: dist.all_reduce(whole),
        "AllGather": lambda: dist.all_gather_into_tensor(other, part),
        "ReduceScatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "AllToAll": lambda: dist.all_to_all_single(other, whole),
    }
    return calls[kind]


def repeated(call: Call, calls: int, device: torch.device, graph: bool) -> Call:
    """`calls` collectives in a row, captured as a CUDA graph where asked for."""

    def loop() -> None:
        for _ in range(calls):
            call()

    loop()
    if not graph or device.type != "cuda":
        return loop
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        loop()
    return captured.replay


def sample_us(run: Call, calls: int, device: torch.device) -> float:
    """Microseconds a call on the slowest rank."""
    dist.barrier()
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        own = start.elapsed_time(end) * 1e3
    else:
        before = time.perf_counter()
        run()
        own = (time.perf_counter() - before) * 1e6
    slowest = torch.tensor([own / calls], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def times_us(plan: dict[str, Any], kind: str, size: int, mode: str, device: torch.device) -> list[float]:
    """The samples of one collective and size, warm-up left out.

    A captured graph ends with this function: NCCL does not let go of a communicator while one is alive, and the
    process would hang at its end (seen on two H200s with torch 2.11).
    """
    run = repeated(make_call(kind, size, device), plan["calls"], device, graph=mode == "graph")
    times = [sample_us(run, plan["calls"], device) for _ in range(plan["warmup"] + plan["samples"])]
    return times[plan["warmup"] :]


@record  # torchrun then shows the exception, not only the exit code
def main(plan_path: str) -> None:
    """Run the plan and let rank 0 write what was found."""
    plan = json.loads(Path(plan_path).read_text())
    rank = int(os.environ["RANK"])
    on_gpu = plan["backend"] == "nccl"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(plan["backend"])
    rows = [
        {"collective": kind, "bytes": size, "mode": mode, "sample": number, "time_us": value}
        for kind, size in plan["work"]
        for mode in plan["modes"]
        for number, value in enumerate(times_us(plan, kind, size, mode, device))
    ]
    if rank == 0:
        Path(plan["out"]).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
