"""States from Transformers: for targets that the engine cannot serve, and as the second opinion on its states.

Hooks take the residual as it enters a layer (vLLM's id k) and as it leaves the last one (id n). Transformers' own
`output_hidden_states` gives the last one after the final norm, so it is not used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from labkit import targets
from labkit.errors import LabError
from labkit.extract import flow, forms
from labkit.targets.quiet import no_progress_bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from labkit.extract.states import Order

BATCH_TOKENS = 4096  # padded tokens of a forward pass
NAMES_OF_LAYERS = ("layers", "h", "blocks", "block")


class NoReference(LabError):
    """Transformers cannot run the target, or its decoder layers cannot be told."""


class Reference:
    """A target in Transformers, under any wrapper; `states` runs it."""

    def __init__(self, target: targets.Target) -> None:
        """Load it in the type of its checkpoint; raises NoReference where weights are missing."""
        self.target = target
        self.model = load(target)
        self.layers = decoder_layers(self.model, target.geometry.num_hidden_layers)

    def states(self, rows: Sequence[Sequence[int]], layers: Sequence[int]) -> list[torch.Tensor]:
        """[T, len(layers), H] for each row, run as one batch: padded on the right, where no token looks."""
        longest = max(len(ids) for ids in rows)
        ids, mask = np.zeros((2, len(rows), longest), dtype=np.int64)
        for at, row in enumerate(rows):
            ids[at, : len(row)], mask[at, : len(row)] = row, 1
        device = self.model.get_input_embeddings().weight.device
        inputs = {
            "input_ids": torch.from_numpy(ids).to(device),
            "attention_mask": torch.from_numpy(mask).to(device),
        }
        with listening(self.layers, layers) as seen, torch.inference_mode():
            self.model(**inputs, use_cache=False)
        stacked = torch.stack([seen[layer].cpu() for layer in layers], dim=2)  # [rows, longest, layers, H]
        return [stacked[at, : len(row)].clone() for at, row in enumerate(rows)]


def load(target: targets.Target) -> PreTrainedModel:
    """The target's model, in the type of its checkpoint; on a GPU where there is one, over several if it needs."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    loader = AutoModelForImageTextToText if target.geometry.wrapper else AutoModelForCausalLM
    where = {"device_map": "auto"} if torch.cuda.is_available() else {}
    with no_progress_bars(), quietly():
        try:
            model, info = loader.from_pretrained(
                target.path, dtype="auto", output_loading_info=True, trust_remote_code=False, **where
            )
        except (ValueError, KeyError, OSError, ImportError) as error:
            reason = " ".join(str(error).split())[:300]
            raise NoReference(
                f"Transformers cannot load {target.name}: {reason}",
                "use the vllm backend, or a Transformers version that has this architecture",
            ) from error
    missing = sorted(name for name in info["missing_keys"] if not name.endswith("lm_head.weight"))
    if missing:
        raise NoReference(
            f"{target.path} lacks weights that {type(model).__name__} has: {', '.join(missing[:3])}",
            "give the whole checkpoint; weights made up at loading would give states of another model",
        )
    return model.eval()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without Transformers' report of missing weights: they are an error here, not a remark."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def decoder_layers(model: torch.nn.Module, count: int) -> torch.nn.ModuleList:
    """The text model's decoder layers, whatever wraps them; raises NoReference unless there is one such list."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) == count
        and name.rpartition(".")[2] in NAMES_OF_LAYERS
    ]
    decoder = getattr(model, "get_decoder", lambda: None)()
    inside = set(decoder.modules()) if decoder is not None else set()
    found = [entry for entry in found if entry[1] in inside] or found
    if len(found) != 1:
        raise NoReference(
            f"{type(model).__name__} has {len(found)} lists of {count} layers: {[name for name, _ in found]}",
            "report this model; its states come from the vllm backend",
        )
    return found[0][1]


@contextlib.contextmanager
def listening(layers: torch.nn.ModuleList, wanted: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Hooks that keep the residual entering each wanted layer, and leaving the last where its count is wanted."""
    seen: dict[int, torch.Tensor] = {}

    def entering(at: int) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[at] = args[0] if args else kwargs["hidden_states"]

        return hook

    def leaving(_module: Any, _args: Any, output: Any) -> None:
        seen[len(layers)] = output if isinstance(output, torch.Tensor) else output[0]

    hooks = [
        layers[at].register_forward_pre_hook(entering(at), with_kwargs=True)
        if at < len(layers)
        else layers[-1].register_forward_hook(leaving)
        for at in wanted
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def batches(lengths: dict[int, int], tokens: int) -> list[list[int]]:
    """Rows in batches of like length: at most `tokens` with padding; a longer row goes alone."""
    groups: list[list[int]] = []
    for row in sorted(lengths, key=lambda row: (lengths[row], row)):
        if not groups or (len(groups[-1]) + 1) * lengths[row] > tokens:
            groups.append([])
        groups[-1].append(row)
    return groups


def extract(order: Order, target: targets.Target, tokens: int = BATCH_TOKENS) -> Iterator[int]:
    """Write the missing rows, a batch at a time; yields each row as it is done. Raises DiskFull, BrokenStates."""
    model = Reference(target)
    room = flow.Room([order.out_dir], order.needs())
    for batch in batches({row: len(order.tokens[row]) for row in order.rows}, tokens):
        found = model.states([order.tokens[row] for row in batch], order.record["layers"])
        keep = partial(keep_row, order, dict(zip(batch, found, strict=True)))
        yield from flow.side_by_side(batch, keep, 1, room)


def keep_row(order: Order, states: dict[int, torch.Tensor], row: int) -> None:
    """Check and write one row of a batch."""
    order.keep(row, {forms.STATES: states[row], forms.TOKENS: torch.from_numpy(order.tokens[row])})


def fits(path: Path, share: float = 0.3) -> bool:
    """Whether a checkpoint is small enough to be run here for a check: at most this share of the free memory."""
    import psutil

    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return size <= share * psutil.virtual_memory().available
