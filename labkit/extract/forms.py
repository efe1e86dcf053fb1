"""How states lie in a file: as the engine wrote them, losslessly packed, or in FP8 with a scale a state.

All three are safetensors files with `token_ids`. "bf16" is speculators' plain form: `hidden_states` [T, layers, H]
in the target's own type. "fp8" is the form of its FP8 transfer: `hidden_states` in float8_e4m3fn and
`hidden_states_scales`, here one a token and layer. "zstd" is the lab's own; no other reader takes it for states.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from labkit import files
from labkit.errors import LabError

Tensors = dict[str, torch.Tensor]
FORMS = ("bf16", "zstd", "fp8")
SIZE = {"bf16": 1.0, "zstd": 0.75, "fp8": 0.5}  # bytes beside the plain form, about; measured by `sizes`
STATES, TOKENS, SCALES, PACKED = "hidden_states", "token_ids", "hidden_states_scales", "hidden_states_zstd"
FP8 = torch.float8_e4m3fn
LEVEL = 1  # of zstd: higher ones gain less than one per cent on the exponents


class UnknownForm(LabError):
    """Hidden states were asked for in a form that does not exist."""


def check_form(form: str) -> str:
    """The form; raises UnknownForm."""
    if form not in FORMS:
        raise UnknownForm(f"hidden_states={form!r} is no form of states", f"use one of {', '.join(FORMS)}")
    return form


def save_states(path: Path, tensors: Tensors, form: str = "bf16") -> None:
    """Write `hidden_states` [T, layers, H] and `token_ids` [T] in a form, whole or not at all."""
    metadata = None
    if form == "fp8":
        tensors = to_fp8(tensors)
    elif form == "zstd":
        tensors, metadata = packed(tensors)
    with files.atomic(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def load_states(path: Path) -> Tensors:
    """`hidden_states` [T, layers, H] in the engine's type (bfloat16 from FP8) and `token_ids`, whatever the form.

    Raises BrokenFile where the file is missing, cut short or holds no states.
    """
    try:
        tensors = load_file(path)
        if PACKED in tensors:
            return unpacked(tensors, header(path))
        if SCALES in tensors:
            states = tensors[STATES].float() * tensors.pop(SCALES)
            return tensors | {STATES: states.to(torch.bfloat16)}
        return {STATES: tensors[STATES], TOKENS: tensors[TOKENS]}
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise files.BrokenFile(
            f"{path} cannot be read ({type(error).__name__}: {error})", "run again: the extraction makes it anew"
        ) from error


def form_and_shape(path: Path) -> tuple[str, list[int], list[int]]:
    """Form, shape of the states and token ids of a file, without reading the states.

    Raises OSError or SafetensorError where it is missing or cut short, KeyError where it holds no states.
    """
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        ids = file.get_tensor(TOKENS).tolist() if TOKENS in names else []
        if PACKED in names:
            return "zstd", json.loads(file.metadata()["shape"]), ids
        if STATES not in names:
            raise KeyError(STATES)
        return "fp8" if SCALES in names else "bf16", file.get_slice(STATES).get_shape(), ids


def header(path: Path) -> dict[str, str]:
    """The text that a file's header carries beside its tensors."""
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def to_fp8(tensors: Tensors) -> Tensors:
    """States as float8_e4m3fn under one float32 scale a token and layer: its largest number becomes 448."""
    states = tensors[STATES].float()
    scales = (states.abs().amax(-1, keepdim=True) / torch.finfo(FP8).max).clamp(min=1e-12)  # [T, layers, 1]
    return {STATES: (states / scales).to(FP8), SCALES: scales, TOKENS: tensors[TOKENS]}


def packed(tensors: Tensors) -> tuple[Tensors, dict[str, str]]:
    """States with their bytes regrouped: exponents, which repeat, through zstd; signs and mantissas as is."""
    states = tensors[STATES].contiguous()
    planes = to_planes(states)
    sizes, streams = [], []
    for plane in planes:
        small = compress(plane)
        keep = len(small) < plane.numel()
        streams.append(torch.frombuffer(bytearray(small), dtype=torch.uint8) if keep else plane)
        sizes.append(len(small) if keep else -plane.numel())  # below zero: not compressed
    metadata = {
        "shape": json.dumps(list(states.shape)),
        "dtype": str(states.dtype).removeprefix("torch."),
        "streams": json.dumps(sizes),
    }
    return {PACKED: torch.cat(streams), TOKENS: tensors[TOKENS]}, metadata


def unpacked(tensors: Tensors, metadata: dict[str, str]) -> Tensors:
    """The inverse of `packed`, to the bit."""
    shape, dtype = json.loads(metadata["shape"]), getattr(torch, metadata["dtype"])
    count = int(torch.tensor(shape).prod())
    planes, at = [], 0
    for size in json.loads(metadata["streams"]):
        stream = tensors[PACKED][at : at + abs(size)]
        planes.append(stream if size < 0 else decompress(stream, count))
        at += abs(size)
    return {STATES: from_planes(planes, dtype).reshape(shape), TOKENS: tensors[TOKENS]}


def to_planes(states: torch.Tensor) -> list[torch.Tensor]:
    """Byte planes [numel] of each number, the sign moved below the mantissa so that the top byte is exponent."""
    width = states.element_size()
    bits = states.flatten().view({2: torch.int16, 4: torch.int32}[width])
    bits = (bits << 1) | ((bits >> (8 * width - 1)) & 1)  # rotate left by one
    return [plane.contiguous() for plane in bits.view(torch.uint8).reshape(-1, width).unbind(1)]


def from_planes(planes: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `to_planes`: [numel]."""
    width = len(planes)
    bits = torch.stack(list(planes), dim=1).flatten().view({2: torch.int16, 4: torch.int32}[width])
    top = (1 << (8 * width - 1)) - 1
    return (((bits >> 1) & top) | (bits << (8 * width - 1))).view(dtype)


def compress(plane: torch.Tensor) -> bytes:
    """A byte plane through zstd (Arrow carries it)."""
    import pyarrow

    return pyarrow.Codec("zstd", compression_level=LEVEL).compress(plane.numpy(), asbytes=True)


def decompress(stream: torch.Tensor, count: int) -> torch.Tensor:
    """A plane of `count` bytes back from zstd: uint8 [count]."""
    import pyarrow

    data = pyarrow.Codec("zstd").decompress(pyarrow.py_buffer(stream.numpy()), decompressed_size=count)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
