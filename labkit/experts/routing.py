"""The common form of recorded routing: the experts of every token in every layer that routes."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from labkit import files
from labkit.errors import LabError

CHUNK = 65536  # tokens written at a time


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
        if experts.size and experts.shape[2] > self.num_experts:
            raise BadRouting(
                f"routing gives a token {experts.shape[2]} of {self.num_experts} experts",
                "give [tokens, layers, k]",
            )
        documents = np.asarray(self.documents)
        if documents.shape != experts.shape[:1]:
            raise BadRouting(f"{documents.shape} document numbers for {len(experts)} tokens", "give one a token")
        if len(self.layers) not in (0, experts.shape[1]):
            raise BadRouting(
                f"{len(self.layers)} layer numbers for {experts.shape[1]} layers", "name each layer that routes"
            )
        object.__setattr__(self, "experts", experts)
        object.__setattr__(self, "documents", documents)
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
    def bounds(self) -> np.ndarray:
        """[contexts + 1] where each context starts, and the end: one starts wherever the document changes."""
        changes = np.flatnonzero(np.diff(self.documents)) + 1
        ends = [len(self.documents)] if len(self.documents) else []
        return np.concatenate(([0], changes, ends)).astype(np.intp)

    def layer(self, place: int) -> np.ndarray:
        """[T, k] the experts of the place-th layer that routes, in a copy of its own."""
        return np.ascontiguousarray(self.experts[:, place], dtype=np.uint16)

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
        with Writer(path, self.num_experts, self.layers, self.source) as writer:
            for start in range(0, len(self.experts), CHUNK):
                part = slice(start, start + CHUNK)
                writer.append(self.experts[part], self.documents[part])
            writer.categories = list(self.categories)

    @classmethod
    def load(cls, path: Path) -> Routing:
        """Read what `save` or `record` wrote, mapped: layers come into memory as they are read.

        Raises BrokenFile naming the file.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:  # torch's reader maps the file, numpy's copies it
                text = file.metadata()
                rest = json.loads(text["rest"])
                arrays = [file.get_tensor(name).numpy() for name in ("experts", "documents")]
        except (SafetensorError, OSError, KeyError, TypeError) as error:
            raise files.BrokenFile(f"{path} holds no routing ({error})", f"delete {path} and run again") from error
        source, layers, categories = text["source"], tuple(rest["layers"]), tuple(rest["categories"])
        return cls(arrays[0], int(text["num_experts"]), arrays[1], layers, categories, source)


class Kept:
    """Routing gathered part by part in memory; it takes what a Writer takes."""

    def __init__(self, num_experts: int, layers: Sequence[int], source: str) -> None:
        self.num_experts, self.layers, self.source = num_experts, tuple(layers), source
        self.categories: list[str] = []
        self.parts: list[tuple[np.ndarray, np.ndarray]] = []

    def __enter__(self) -> Kept:
        """Nothing to open."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Nothing to close."""

    def append(self, experts: np.ndarray, documents: np.ndarray) -> None:
        """Add tokens [t, L, k] with their document numbers [t]."""
        self.parts.append((experts.astype(narrow(self.num_experts), copy=False), documents))

    def routing(self) -> Routing:
        """All parts in one."""
        experts, documents = (np.concatenate(arrays) for arrays in zip(*self.parts, strict=True))
        return Routing(experts, self.num_experts, documents, self.layers, tuple(self.categories), self.source)


class Writer:
    """Routing written to a safetensors file part by part, so that only a part need be in memory.

    As a context manager; the file appears whole when the block ends without an error, or not at all.
    """

    def __init__(self, path: Path, num_experts: int, layers: Sequence[int], source: str) -> None:
        self.path, self.num_experts, self.layers, self.source = Path(path), num_experts, tuple(layers), source
        self.categories: list[str] = []
        self.shape: tuple[int, ...] = ()
        self.tokens = 0
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> Writer:
        """Open the temporary files beside the one to come."""
        self.target = self.stack.enter_context(files.atomic(self.path))
        names = ("documents", "experts")  # the wider type first: both lie aligned
        self.spools = {n: self.stack.enter_context((self.target.parent / n).open("w+b")) for n in names}
        return self

    def __exit__(self, *error: Any) -> None:
        """Put the file together, unless there was an error."""
        if error[0] is not None:
            self.stack.__exit__(*error)
            return
        with self.stack:
            self.finish()

    def append(self, experts: np.ndarray, documents: np.ndarray) -> None:
        """Add tokens [t, L, k] with their document numbers [t]."""
        self.shape = experts.shape[1:]
        self.tokens += len(experts)
        self.spools["experts"].write(np.ascontiguousarray(experts, narrow(self.num_experts)).tobytes())
        self.spools["documents"].write(np.ascontiguousarray(documents, np.int32).tobytes())

    def finish(self) -> None:
        """The safetensors file: length of the header, header, then the arrays' bytes one after the other."""
        kind = {1: "U8", 2: "U16"}[np.dtype(narrow(self.num_experts)).itemsize]
        ends = np.cumsum([0, *(spool.tell() for spool in self.spools.values())]).tolist()
        shapes = [[self.tokens], [self.tokens, *self.shape]]
        rest = {"layers": self.layers, "categories": self.categories}
        header: dict[str, Any] = {
            "__metadata__": {"num_experts": str(self.num_experts), "source": self.source, "rest": json.dumps(rest)}
        }
        for name, dtype, shape, start, end in zip(
            self.spools, ("I32", kind), shapes, ends[:-1], ends[1:], strict=True
        ):
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with self.target.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for spool in self.spools.values():
                spool.seek(0)
                shutil.copyfileobj(spool, file)


def narrow(num_experts: int) -> type[np.unsignedinteger]:
    """The smallest whole-number type that holds every expert's index."""
    return np.uint8 if num_experts <= 256 else np.uint16
