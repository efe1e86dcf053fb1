"""Routing that servers return: vLLM's routed experts and SGLang's, in the lab's common form.

Both count all layers of the model; the dense ones, which hold no routing, are dropped by the model's geometry.
Formats as of vLLM 0.32 (code read) and SGLang (its sources and documentation read, not run).
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.experts.routing import BadRouting, Kept, Routing, Writer, narrow

if TYPE_CHECKING:
    from labkit.targets.geometry import Geometry

FORWARD_MODES = {1: "extend", 2: "decode", 3: "mixed", 4: "idle", 5: "target_verify"}  # later ones vary by version
EXTEND, DECODE = ("extend", "mixed"), "decode"


def from_vllm(
    outputs: Iterable[Any],
    geometry: Geometry,
    *,
    tokens: Sequence[int] | None = None,
    categories: Sequence[str] | None = None,
    path: Path | None = None,
) -> Routing:
    """Routing from a vLLM that runs with --enable-return-routed-experts; every sequence is a document.

    outputs: an item each of these kinds: RequestOutput or CompletionOutput of `LLM.generate`; an answer of the
    OpenAI completions or chat endpoint, decoded from JSON (choices[].routed_experts, base64 of a .npy file); or
    the bare array [tokens - 1, all layers, k]. The last token is never run, so it has no row, and rejected draft
    tokens have none either. tokens: prompt and generated tokens of each sequence, to check the rows against.
    categories: of each item. path: as in `record`. Raises BadRouting saying what does not fit.
    """
    return gathered(vllm_arrays(outputs), geometry, "vLLM, returned routed experts", tokens, categories, path)


def from_sglang(
    outputs: Iterable[Any],
    geometry: Geometry,
    *,
    tokens: Sequence[int] | None = None,
    categories: Sequence[str] | None = None,
    path: Path | None = None,
) -> Routing:
    """Routing from SGLang's return_routed_experts (server flag --enable-return-routed-experts).

    outputs: answers of /generate (meta_info.routed_experts) or of the OpenAI endpoints
    (choices[].sgl_ext.routed_experts), decoded from JSON, or the base64 texts: int32, flattened from
    [tokens - 1, all layers, k]. The rest as in from_vllm.
    """
    arrays = ((at, flat_array(text, geometry, at)) for at, text in sglang_texts(outputs))
    return gathered(arrays, geometry, "SGLang, returned routed experts", tokens, categories, path)


def from_sglang_dump(dump: Path | Mapping[str, Any], geometry: Geometry, *, path: Path | None = None) -> Routing:
    """Routing from a per_token dump of SGLang's expert distribution recorder: a .pt file, or its content.

    A forward pass is a document, its category the forward mode, so that `unique_of_documents` of the category
    target_verify is what each verification really read, rejected drafts included. Passes that extend prompts are
    split into their sequences; decode passes of one token go on with the document whose positions they continue.
    Physical expert numbers become logical ones by the map in the dump. The file is read without running code
    from it.
    """
    content = read_dump(dump) if isinstance(dump, Path) else dump
    if not isinstance(content, Mapping) or not all("topk_ids_of_layer" in r for r in content.get("records", [{}])):
        raise BadRouting(
            "the dump has no records with topk_ids_of_layer",
            "start SGLang with --expert-distribution-recorder-mode per_token",
        )
    logical = content.get("last_physical_to_logical_map")
    passes = list(dump_passes(content["records"], geometry, None if logical is None else np.asarray(logical)))
    modes = [mode for mode, _rows in passes]
    arrays = enumerate(rows for _mode, rows in passes)
    return gathered(arrays, geometry, "SGLang, expert distribution recorder (per_token)", None, modes, path)


def gathered(
    arrays: Iterable[tuple[int, np.ndarray]],
    geometry: Geometry,
    source: str,
    tokens: Sequence[int] | None,
    categories: Sequence[str] | None,
    path: Path | None,
) -> Routing:
    """The common form of (item, [rows, all layers, k]) each of which is a document."""
    count, layers = geometry.n_routed_experts, geometry.moe_layers
    if not layers:
        raise BadRouting(
            f"{geometry.name} has no layer that routes", "give the geometry of the model that was served"
        )
    with Writer(path, count, layers, source) if path else Kept(count, layers, source) as kept:
        for number, (item, array) in enumerate(arrays):
            expected = None if tokens is None else tokens[number]
            experts = moe_layers(array, geometry, f"sequence {number}", expected)
            kept.append(experts, np.full(len(experts), number, np.int32))
            kept.categories.append(categories[item] if categories is not None else "")
        if not kept.categories:
            raise BadRouting("there is no output with routing", "give the outputs of at least one request")
    return Routing.load(path) if path else kept.routing()


def moe_layers(array: np.ndarray, geometry: Geometry, name: str, tokens: int | None = None) -> np.ndarray:
    """[rows, MoE layers, k] of [rows, all layers, k], checked; raises BadRouting."""
    shape, wanted = array.shape, (geometry.num_hidden_layers, geometry.num_experts_per_tok)
    if len(shape) != 3 or shape[1:] != wanted or not np.issubdtype(array.dtype, np.integer):
        raise BadRouting(
            f"{name} holds {shape} of {array.dtype}, {geometry.name} routes [tokens, {wanted[0]}, {wanted[1]}]",
            "give the geometry of the model that was served",
        )
    if tokens is not None and len(array) != tokens - 1:
        raise BadRouting(
            f"{name} has {len(array)} rows for {tokens} tokens, not {tokens - 1}",
            "give prompt and generated tokens together, and ask for the whole prompt's routing",
        )
    experts = array[:, list(geometry.moe_layers)]
    if experts.size and experts.min() < 0:
        row = int(np.argwhere(experts < 0)[0, 0])
        raise BadRouting(
            f"{name}, row {row}: expert {experts.min()}, which marks padding",
            "leave padding rows out, or record without padded batches",
        )
    if experts.size and experts.max() >= geometry.n_routed_experts:
        raise BadRouting(
            f"{name} names expert {experts.max()}, {geometry.name} has {geometry.n_routed_experts}",
            "give the geometry of the model that was served; fused shared experts have to be off",
        )
    ordered = np.sort(experts, axis=2)
    twice = np.argwhere((ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2))
    if len(twice):
        row, at = twice[0]
        layer = geometry.moe_layers[at]
        raise BadRouting(
            f"{name}, row {row}: layer {layer} chose an expert twice: {experts[row, at].tolist()}",
            f"a dense layer holds zeros: is {layer} one? Check first_k_dense_replace and moe_layer_freq",
        )
    return experts.astype(narrow(geometry.n_routed_experts))


def vllm_arrays(outputs: Iterable[Any]) -> Iterator[tuple[int, np.ndarray]]:
    """(item, array) of every sequence in vLLM's outputs."""
    for item, output in enumerate(outputs):
        if isinstance(output, np.ndarray):
            found = [output]
        elif isinstance(output, Mapping):
            found = [choice.get("routed_experts") for choice in output.get("choices", [])]
        else:
            found = [getattr(one, "routed_experts", None) for one in getattr(output, "outputs", [output])]
        for field in found or [None]:
            if field is None:
                raise absent(item, "start vLLM with --enable-return-routed-experts and take finished outputs")
            yield item, npy_array(field, item) if isinstance(field, str) else np.asarray(field)


def npy_array(text: str, item: int) -> np.ndarray:
    """The array of a base64 .npy file."""
    try:
        return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError) as error:
        raise BadRouting(
            f"output {item}: routed_experts is no base64 .npy file ({error})",
            "SGLang's field is another format: experts.from_sglang reads it",
        ) from error


def sglang_texts(outputs: Iterable[Any]) -> Iterator[tuple[int, str]]:
    """(item, base64 text) of every sequence in SGLang's answers."""
    for item, output in enumerate(outputs):
        if isinstance(output, str):
            found = [output]
        elif "meta_info" in output:
            found = [output["meta_info"].get("routed_experts")]
        else:
            found = [(choice.get("sgl_ext") or {}).get("routed_experts") for choice in output.get("choices", [])]
        for text in found or [None]:
            if text is None:
                raise absent(
                    item, "start SGLang with --enable-return-routed-experts, ask for return_routed_experts"
                )
            yield item, text


def absent(item: int, remedy: str) -> BadRouting:
    """The error for an output without routing."""
    return BadRouting(f"output {item} has no routed_experts", remedy)


def flat_array(text: str, geometry: Geometry, item: int) -> np.ndarray:
    """[rows, all layers, k] of base64 int32."""
    layers, chosen = geometry.num_hidden_layers, geometry.num_experts_per_tok
    try:
        content = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise BadRouting(f"output {item}: routed_experts is not base64 ({error})", "give it as it came") from error
    if len(content) % (4 * layers * chosen):
        raise BadRouting(
            f"output {item}: {len(content)} bytes are no whole rows of {layers} layers x {chosen} int32",
            "give the geometry of the model that was served; vLLM's field: experts.from_vllm reads it",
        )
    return np.frombuffer(content, "<i4").reshape(-1, layers, chosen)


def read_dump(path: Path) -> Any:
    """The content of a .pt file, tensors and plain values only; raises BadRouting."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the classes of what is in a broken file vary by version
        raise BadRouting(f"{path} cannot be read as a dump of tensors ({error})", "record it again") from error


def dump_passes(
    records: Sequence[Mapping[str, Any]], geometry: Geometry, logical: np.ndarray | None
) -> Iterator[tuple[str, np.ndarray]]:
    """(forward mode, [rows, all layers, k]) of each document of a dump."""
    going: list[np.ndarray] = []
    position = -1
    for record in sorted(records, key=lambda r: r.get("forward_pass_id", 0)):
        mode = FORWARD_MODES.get(int(record["forward_mode"]), f"forward mode {int(record['forward_mode'])}")
        rows = dump_rows(record["topk_ids_of_layer"], geometry, logical)
        one = mode == DECODE and len(rows) == 1
        here = int(np.ravel(record.get("positions", [-1]))[0]) if one else -1
        if going and not (one and here == position + 1):
            yield DECODE, np.concatenate(going)
            going = []
        if one:
            going, position = [*going, rows], here
        elif len(rows):
            lengths = record.get("extend_seq_lens") if mode in EXTEND else None
            yield from (
                (mode, part) for part in np.split(rows, np.cumsum(lengths or [])[:-1].astype(int)) if len(part)
            )
    if going:
        yield DECODE, np.concatenate(going)


def dump_rows(ids: Any, geometry: Geometry, logical: np.ndarray | None) -> np.ndarray:
    """[rows, all layers, k] logical experts of a pass's topk_ids_of_layer [all layers, rows, slots]."""
    array = np.asarray(ids)
    if array.ndim != 3 or array.shape[0] != geometry.num_hidden_layers:
        raise BadRouting(
            f"topk_ids_of_layer has shape {array.shape}, not [{geometry.num_hidden_layers}, tokens, k]",
            "give the geometry of the model that was served",
        )
    if logical is not None:
        layers = np.arange(len(array))[:, None, None]
        array = np.where(
            (array < 0) | (array >= logical.shape[1]), array, logical[layers, array % logical.shape[1]]
        )
    # SGLang's buffer has 8 slots whatever k is; the rest stays -1, as do layers that do not route.
    return array[:, :, : geometry.num_experts_per_tok].transpose(1, 0, 2)
