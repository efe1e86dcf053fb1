"""How the ranks' devices are joined: NVLink, PCIe, NUMA, from NVML and the system."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pandas as pd

# NVML's levels of the common ancestor of two devices, nearest first.
LEVELS = {
    0: "same board",
    10: "PCIe, one switch",
    20: "PCIe, several switches",
    30: "PCIe host bridge",
    40: "NUMA node",
    50: "between NUMA nodes",
}


def gpu_links() -> pd.DataFrame:
    """A row a pair of GPUs: first second link nvlinks numa_first numa_second; empty without NVIDIA's library."""
    columns = ["first", "second", "link", "nvlinks", "numa_first", "numa_second"]
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver: the machine has no GPU
        return pd.DataFrame(columns=columns)
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        pairs = itertools.combinations(range(len(handles)), 2)
        return pd.DataFrame([pair(pynvml, handles, *numbers) for numbers in pairs], columns=columns)
    finally:
        pynvml.nvmlShutdown()


def pair(nvml: Any, handles: list[Any], first: int, second: int) -> dict[str, Any]:
    """One row of `gpu_links`. Through a switch NVLink has no peer to name, so any active link counts."""
    level = int(nvml.nvmlDeviceGetTopologyCommonAncestor(handles[first], handles[second]))
    links = min(active_nvlinks(nvml, handles[number]) for number in (first, second))
    buses = [nvml.nvmlDeviceGetPciInfo(handles[number]).busId for number in (first, second)]
    return {
        "first": first,
        "second": second,
        "link": f"NVLink ({links} links)" if links else LEVELS.get(level, f"level {level}"),
        "nvlinks": links,
        "numa_first": numa_node(buses[0]),
        "numa_second": numa_node(buses[1]),
    }


def active_nvlinks(nvml: Any, handle: Any) -> int:
    """How many of a GPU's NVLinks are up."""
    count = 0
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        try:
            count += nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED
        except nvml.NVMLError:
            break
    return count


def numa_node(bus_id: bytes | str) -> int:
    """The NUMA node of a PCI device, -1 where the system does not say."""
    text = (bus_id.decode() if isinstance(bus_id, bytes) else bus_id).lower()
    path = Path("/sys/bus/pci/devices") / text.removeprefix("0000") / "numa_node"
    return int(path.read_text()) if path.exists() else -1


def cores() -> pd.DataFrame:
    """A row a NUMA node of this machine: node cores memory_gb."""
    rows = []
    for folder in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        memory = next(
            (line for line in (folder / "meminfo").read_text().splitlines() if "MemTotal" in line), "0 0 kB"
        )
        rows.append(
            {
                "node": int(folder.name.removeprefix("node")),
                "cores": (folder / "cpulist").read_text().strip(),
                "memory_gb": round(int(memory.split()[-2]) / 1e6, 1),
            }
        )
    return pd.DataFrame(rows, columns=["node", "cores", "memory_gb"])
