"""A target's final norm and lm_head by their exact names: what turns a last state into the next token."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open

from labkit import files
from labkit.errors import LabError
from labkit.targets.configs import unwrap
from labkit.targets.geometry import geometry


class NoFinalHead(LabError):
    """A checkpoint has no final norm or no lm_head where its architecture keeps them."""


@dataclass(frozen=True)
class FinalHead:
    """RMS norm with gain `gain` [H], then `weight` [V, H]; `shift` 1 is the Gemma form, whose gain is 1 + gain."""

    norm_name: str
    gain: torch.Tensor
    weight: torch.Tensor
    eps: float
    shift: float = 0.0
    normed: bool = False  # the states come with the norm applied

    def norm(self, states: torch.Tensor) -> torch.Tensor:
        """The final norm in fp32: [T, H] -> [T, H]."""
        states = states.float()
        if self.normed:
            return states
        return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps) * (self.gain + self.shift)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Next-token logits after each pre-norm state, in the head's own type: [T, H] -> [T, V]."""
        return self.norm(states).to(self.weight.dtype) @ self.weight.T

    def top1(self, states: torch.Tensor) -> torch.Tensor:
        """The most likely next token after each pre-norm state: [T, H] -> [T]."""
        return self.logits(states).argmax(-1)

    def other_form(self) -> FinalHead:
        """The same norm, read in the other convention (1 + w against w)."""
        return replace(self, shift=1.0 - self.shift)


class Checkpoint:
    """The tensors of a model directory, by name, read one at a time."""

    def __init__(self, path: Path) -> None:
        """Read the headers."""
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.at: dict[str, Path] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    self.at[name], self.shapes[name] = file, tuple(tensors.get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""
        with safe_open(self.at[name], framework="pt") as tensors:
            return tensors.get_tensor(name)

    def first(self, names: list[str], what: str) -> str:
        """The first of these names that is there; raises NoFinalHead."""
        found = next((name for name in names if name in self.shapes), None)
        if found is None:
            raise NoFinalHead(
                f"{self.path} has no {what}: neither {' nor '.join(names)}",
                "point the target at the whole checkpoint",
            )
        return found


def final_head(path: Path) -> FinalHead:
    """Final norm and lm_head (the embedding where they are tied) of a model directory, any wrapper taken off.

    By exact names: a search by suffix finds a vision or audio tower's norm as well (speculators#1038).
    Raises NoFinalHead.
    """
    from speculators.models.utils import GEMMA_STYLE_FINAL_NORM_MODEL_TYPES as ONE_PLUS

    config, _ = unwrap(files.read_json(path / "config.json"))
    base, tensors = geometry(path).wrapper or "model", Checkpoint(path)
    outer = base.rpartition(".")[0]
    norm = tensors.first([f"{base}.norm.weight", f"{base}.final_layernorm.weight", "norm.weight"], "final norm")
    heads = ["lm_head.weight", f"{outer}.lm_head.weight", f"{base}.lm_head.weight", f"{base}.embed_tokens.weight"]
    head = tensors.first(heads, "lm_head")
    shift = 1.0 if config.get("model_type") in ONE_PLUS else 0.0
    eps = float(config.get("rms_norm_eps") or 1e-6)
    return FinalHead(norm, tensors.read(norm).float(), tensors.read(head), eps, shift)


def other_norms(path: Path, head: FinalHead) -> list[FinalHead]:
    """The same head behind every other norm of the checkpoint that is no layer's, and behind other lm_heads."""
    tensors = Checkpoint(path)
    width, outside = head.gain.numel(), re.compile(r"\.(layers|blocks|h)\.\d+\.")
    free = [name for name in tensors.shapes if not outside.search(name)]
    norms = [name for name in free if tensors.shapes[name] == (width,) and name.endswith("weight")]
    tables = [name for name in free if tensors.shapes[name][1:] == (width,) and name.endswith("weight")]
    found = [replace(head, norm_name=name, gain=tensors.read(name).float()) for name in norms]
    bases = {name.rpartition(".norm.")[0]: name for name in norms}
    for table in tables:  # a wrong tower has its own table too
        for base, norm in bases.items():
            if table.startswith((f"{base}.", f"{base.rpartition('.')[0]}.lm_head")) or table == "lm_head.weight":
                gain, weight = tensors.read(norm).float(), tensors.read(table)
                found.append(replace(head, norm_name=norm, gain=gain, weight=weight))
    return [one for one in found if one.norm_name != head.norm_name]
