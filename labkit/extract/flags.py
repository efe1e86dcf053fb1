"""Options of a server that would spoil its hidden states, refused before a load that may take an hour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit import targets
from labkit.errors import LabError


class UnfitServer(LabError):
    """A server with these options gives no usable hidden states."""


def refuse_flags(target: targets.Target, options: Mapping[str, Any]) -> None:
    """Raise UnfitServer for the options of a variant `extract` (its `flags` are vLLM's) that cannot work."""
    flags = options.get("flags") or {}
    stages = int(flags.get("pipeline-parallel-size") or 1)
    if stages > 1 and target.geometry.is_mla:
        raise UnfitServer(
            f"pipeline-parallel-size={stages}: vLLM takes no states from stages of {target.name}'s family",
            "use tensor_parallel_size, with enable-expert-parallel for a mixture of experts, for the extraction",
        )
    if flags.get("enable-prefix-caching"):
        raise UnfitServer(
            "enable-prefix-caching: states of cached tokens would be missing (vllm#44486)",
            "leave it out: the lab turns prefix caching off for the extraction",
        )
    if str(flags.get("kv-cache-dtype") or "").startswith("fp8"):
        raise UnfitServer(
            f"kv-cache-dtype={flags['kv-cache-dtype']}: the connector keeps states in the KV cache (vllm#39160)",
            "leave it out here; to save disk, use the fp8 form of the files",
        )
