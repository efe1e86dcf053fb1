"""A head that starts from what the target already knows, instead of from noise.

The draft layer has the shape of one of the target's own layers, so the last one's weights fit: the head then
begins as "one more step of the target" over its high state, and has only to learn the rest. With minutes of
training that decides how far it gets (LOG.md, 2026-11-30).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from labkit.draft import weights
from labkit.targets import Target

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

REST = 0.1  # what stays of fc's random weights beside the identity on the highest state


def warm_start(model: Eagle3DraftModel, target: Target) -> list[str]:
    """Copy the target's last layers and final norm into the head, in place; returns the head's parameters set.

    A parameter that the target has not, or has in another shape (MoE, MLA), keeps its random start. fc begins as
    the identity on the highest of the states, plus a tenth of its random weights.
    """
    hidden = target.geometry.hidden_size
    wanted = sources(target, len(model.layers))
    found = load(target, list(wanted.values()))
    parameters = dict(model.named_parameters())
    done = []
    with torch.no_grad():
        for name, source in wanted.items():
            weight, parameter = found.get(source), parameters[name]
            place = (
                parameter[:, hidden:]
                if name.startswith("layers.0.")
                and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
                else parameter
            )
            if weight is not None and weight.shape == place.shape:
                place.copy_(weight)
                done.append(name)
        model.fc.weight.mul_(REST)
        model.fc.weight[:, -hidden:] += torch.eye(hidden)
    return [*done, "fc.weight"]


def sources(target: Target, count: int = 1) -> dict[str, str]:
    """Parameter of the head of `count` layers: the target's tensor that it starts from.

    The first layer's q, k and v read [embedding, state]; only their half over the state has a counterpart.
    """
    same = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
    same += [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")] + ["post_attention_layernorm.weight"]
    first, wanted = target.geometry.num_hidden_layers - count, {"norm.weight": "norm.weight"}
    for number in range(count):
        layer = f"layers.{first + number}"
        wanted |= {f"layers.{number}.{name}": f"{layer}.{name}" for name in same}
        norm = "hidden_norm" if number == 0 else "input_layernorm"  # the norm that the state passes
        wanted[f"layers.{number}.{norm}.weight"] = f"{layer}.input_layernorm.weight"
    return wanted


def load(target: Target, names: list[str]) -> dict[str, torch.Tensor]:
    """The target's tensors of these names, in fp32, whatever prefix its wrapper puts before them.

    Norms of the `1 + w` kind come as their gain: the head's norms are plain ones.
    """
    prefix = target.geometry.wrapper or "model"
    shift = 1.0 if weights.gain(target) == "1+w" else 0.0
    found = weights.read(target.path, [f"{prefix}.{name}" for name in names])
    return {
        name.removeprefix(f"{prefix}."): tensor.float() + (shift if "norm" in name else 0.0)
        for name, tensor in found.items()
    }
