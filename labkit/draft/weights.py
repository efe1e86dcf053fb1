"""The target's own tensors that a head needs or starts from, by their exact names.

Names by suffix find another tensor in a multimodal checkpoint (speculators#1038), so the whole path is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from labkit import files
from labkit.errors import LabError
from labkit.targets import Target


class MissingWeights(LabError):
    """The target's checkpoint lacks a tensor that every head needs."""


def gain(target: Target) -> str:
    """How the target's norms apply their weight: "1+w" for Gemma's and Qwen3.5's kind, "w" for all others."""
    from speculators.models.utils import GEMMA_STYLE_FINAL_NORM_MODEL_TYPES

    return "1+w" if target.geometry.model_type in GEMMA_STYLE_FINAL_NORM_MODEL_TYPES else "w"


def names(target: Target) -> dict[str, list[str]]:
    """embed, norm, lm_head: the names that the checkpoint may have for them, best first."""
    path = target.geometry.wrapper or "model"
    outer = path.removesuffix(".model")
    heads = [f"{outer}.lm_head.weight", "lm_head.weight"] if outer != "model" else ["lm_head.weight"]
    embed = f"{path}.embed_tokens.weight"
    return {"embed": [embed], "norm": [f"{path}.norm.weight"], "lm_head": [*heads, embed]}


def places(folder: Path) -> dict[str, Path]:
    """Tensor name: file, for a folder of one or several safetensors files; raises BrokenFile."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        found = {
            name: inside(folder, file)
            for name, file in files.read_record(index, weight_map=dict)["weight_map"].items()
        }
        gone = sorted({path.name for path in found.values() if not path.is_file()})
        if gone:
            raise files.BrokenFile(
                f"{folder} lacks {', '.join(gone)}, which its index names", "fetch it completely"
            )
        return found
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with opened(path) as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def inside(folder: Path, name: Any) -> Path:
    """A file that an index names; raises BrokenFile for one outside of the folder, which a download never has."""
    if not files.is_plain_name(name):
        raise files.BrokenFile(f"the index in {folder} names {name!r:.200}, no plain file name", "do not trust it")
    return folder / name


def opened(path: Path) -> AbstractContextManager[Any]:
    """A safetensors file, its tensors read when asked for; raises BrokenFile for anything else (a pickle)."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise files.BrokenFile(f"{path} cannot be read ({error})", "fetch or export it anew") from error


def read(folder: Path, wanted: Sequence[str]) -> dict[str, torch.Tensor]:
    """Those of the `wanted` tensors that the folder has, as they are stored."""
    there = places(folder)
    found = {}
    for path in {there[name] for name in wanted if name in there}:
        with opened(path) as file:
            found |= {name: file.get_tensor(name) for name in wanted if there.get(name) == path}
    return found


def rows(folder: Path, candidates: Sequence[str], ids: Sequence[int]) -> torch.Tensor | None:
    """Some rows, in fp32, of the first of the `candidates` that the folder has; None where it has none.

    A quantised tensor gives None, too: its rows mean nothing alone.
    """
    there = places(folder)
    name = next((name for name in candidates if name in there), None)
    if name is None:
        return None
    with opened(there[name]) as file:
        part = file.get_slice(name)
        if part.get_dtype() not in ("F64", "F32", "F16", "BF16") or max(ids) >= part.get_shape()[0]:
            return None
        if isinstance(ids, range):
            return part[ids.start : ids.stop].float()
        return torch.cat([part[i : i + 1] for i in ids]).float()


def own(target: Target, part: str) -> torch.Tensor:
    """The target's embed, norm or lm_head (the embedding where it is tied), in fp32; raises MissingWeights."""
    wanted = names(target)[part]
    found = read(target.path, wanted)
    for name in wanted:
        if name in found:
            return found[name].float()
    raise MissingWeights(
        f"{target.path} has none of {', '.join(wanted)}", "fetch the target's checkpoint completely"
    )
