"""The common form of recorded routing: the experts of every token in every layer that routes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from labkit import files
from labkit.errors import LabError


class BadRouting(LabError):
    """Recorded routing does not fit its shape, its expert count or its documents."""


@dataclass(frozen=True)
class Routing:
    """Experts chosen by T tokens in the L layers that route, k each.

    experts: [T, L, k] whole numbers below num_experts. documents: [T], the same number for tokens that lie in
    one context, in order. layers: the index of each of the L layers in the model. categories: the kind of text
    of each document, by its number. source: what recorded it.
    """

    experts: np.ndarray
    num_experts: int
    documents: np.ndarray
    layers: tuple[int, ...] = ()
    categories: tuple[str, ...] = ()
    source: str = ""
    chosen: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Check that everything fits; raises BadRouting."""
        experts = np.asarray(self.experts)
        if experts.ndim != 3 or not np.issubdtype(experts.dtype, np.integer):
            raise BadRouting(
                f"routing has shape {experts.shape} of {experts.dtype}, not [tokens, layers, k] of whole numbers",
                "give the experts' indices, not their scores",
            )
        if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) < self.num_experts:
            raise BadRouting(
                f"routing names expert {experts.max()} (lowest {experts.min()}) of {self.num_experts}",
                "give the model's n_routed_experts; indices count from 0",
            )
        if self.documents.shape != experts.shape[:1]:
            raise BadRouting(
                f"{self.documents.shape} document numbers for {len(experts)} tokens", "give one a token"
            )
        object.__setattr__(self, "experts", experts)
        object.__setattr__(self, "layers", tuple(self.layers) or tuple(range(experts.shape[1])))
        object.__setattr__(self, "chosen", experts.shape[2])

    @classmethod
    def of(cls, routing: Any, num_experts: int | None = None, documents: Any = None) -> Routing:
        """Routing from a bare array or tensor [T, L, k]; without documents all tokens are one context."""
        if isinstance(routing, Routing):
            return routing
        experts = np.asarray(routing)
        count = int(experts.max()) + 1 if num_experts is None and experts.size else int(num_experts or 0)
        numbers = np.zeros(len(experts), np.int32) if documents is None else np.asarray(documents)
        return cls(experts, count, numbers)

    @property
    def contexts(self) -> np.ndarray:
        """[T] the running number of the context: it rises wherever the document changes, so none comes back."""
        changes = np.flatnonzero(np.diff(self.documents)) + 1
        steps = np.zeros(len(self.documents), np.int32)
        steps[changes] = 1
        return np.cumsum(steps, dtype=np.int32)

    def of_category(self, category: str) -> Routing:
        """The tokens of one kind of text."""
        numbers = [number for number, name in enumerate(self.categories) if name == category]
        kept = np.isin(self.documents, numbers)
        return Routing(
            self.experts[kept],
            self.num_experts,
            self.documents[kept],
            self.layers,
            self.categories,
            self.source,
        )

    def save(self, path: Path) -> None:
        """Write it as safetensors, with everything else in the metadata."""
        from safetensors.numpy import save_file

        rest = {"layers": self.layers, "categories": self.categories}
        text = {"num_experts": str(self.num_experts), "source": self.source, "rest": json.dumps(rest)}
        arrays = {"experts": np.ascontiguousarray(self.experts), "documents": self.documents}
        with files.atomic(path) as temporary:
            save_file(arrays, temporary, metadata=text)

    @classmethod
    def load(cls, path: Path) -> Routing:
        """Read what `save` wrote; raises BrokenFile naming the file."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:
                text = file.metadata()
                rest = json.loads(text["rest"])
                arrays = [file.get_tensor(name) for name in ("experts", "documents")]
        except (SafetensorError, OSError, KeyError, TypeError) as error:
            raise files.BrokenFile(f"{path} holds no routing ({error})", f"delete {path} and run again") from error
        source, layers, categories = text["source"], tuple(rest["layers"]), tuple(rest["categories"])
        return cls(arrays[0], int(text["num_experts"]), arrays[1], layers, categories, source)


def narrow(num_experts: int) -> type[np.unsignedinteger]:
    """The smallest whole-number type that holds every expert's index."""
    return np.uint8 if num_experts <= 256 else np.uint16
