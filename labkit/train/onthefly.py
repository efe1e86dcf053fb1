"""Hidden states computed while training, by the frozen target in the same process: no files, no disk.

The same states as the files': the residual entering each layer that the head reads, and the last layer's output
before the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from labkit import targets
from labkit.errors import LabError
from labkit.targets import Target
from labkit.train.batches import Batch


class NoTransformersTarget(LabError):
    """Transformers cannot run this target."""


class OnTheFly:
    """The target's layers on one device; calling it with a packed batch gives its states."""

    def __init__(
        self, target: Target, layers: Sequence[int], device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """Load the target's text model; raises NoTransformersTarget."""
        from transformers import AutoModel

        bare = targets.text_model(target)
        try:
            model = AutoModel.from_pretrained(
                bare.path, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
            )
        except (ValueError, OSError, KeyError) as error:
            raise NoTransformersTarget(
                f"Transformers cannot load {target.name}: {error}",
                "take states_from='files', which an engine makes",
            ) from error
        self.model = model.to(device).eval().requires_grad_(False)
        self.seen: dict[int, torch.Tensor] = {}
        count = target.geometry.num_hidden_layers
        self.wanted = [*layers, count]
        for index in self.wanted:
            if index < count:
                self.model.layers[index].register_forward_pre_hook(self.entering(index), with_kwargs=True)
        self.model.layers[count - 1].register_forward_hook(self.leaving(count))

    def entering(self, index: int) -> Any:
        """A hook that keeps what enters a layer."""

        def hook(_module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.seen[index] = given[0] if given else named["hidden_states"]

        return hook

    def leaving(self, index: int) -> Any:
        """A hook that keeps what leaves the last layer."""

        def hook(_module: Any, _given: Any, output: Any) -> None:
            self.seen[index] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.no_grad()
    def __call__(self, batch: Batch) -> torch.Tensor:
        """States of every slot [B, L, layers + 1, H]; documents of a row do not see each other."""
        documents = batch["document_ids"]
        place = torch.arange(documents.shape[1], device=documents.device)
        mask = (documents[:, :, None] == documents[:, None, :]) & (place[:, None] >= place)
        with torch.autocast(documents.device.type, enabled=False):
            self.model(
                input_ids=batch["token_ids"],
                attention_mask=mask[:, None],
                position_ids=batch["position_ids"],
                use_cache=False,
            )
        states = torch.stack([self.seen[index] for index in self.wanted], dim=2)
        self.seen.clear()
        return states
