"""What the head is before its first step: warm from the target's last layer, random, or a head that exists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from labkit import draft, files
from labkit.errors import LabError
from labkit.settings import Eagle3Pipeline
from labkit.targets import Target
from labkit.vocab import VocabMap

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

WARM, SCRATCH = "warm", "scratch"


class BadStart(LabError):
    """A head cannot be trained on with these states or this vocabulary."""


def identity(start: str) -> str:
    """What decides a training's beginning: the word, or a digest of the head's weights."""
    if start in (WARM, SCRATCH):
        return start
    file = Path(start) / "model.safetensors"
    if not file.is_file():
        raise BadStart(
            f"start={start!r} is neither {WARM}, {SCRATCH} nor a head directory", f"{file} would have to be there"
        )
    return files.digest_file(file)


def refuse(start: str, layers: tuple[int, ...]) -> None:
    """Raise BadStart or BadHead for a start that training would refuse: no head, damaged, over other layers."""
    identity(start)
    if start not in (WARM, SCRATCH):
        own = draft.read(Path(start)).speculator_config().eagle_aux_hidden_state_layer_ids
        refuse_layers(Path(start), own or layers, layers)


def refuse_layers(head_dir: Path, own: Sequence[int], layers: tuple[int, ...]) -> None:
    """Raise BadStart where the head reads other layers than the states are of."""
    if tuple(own) != tuple(layers):
        raise BadStart(
            f"{head_dir} reads layers {list(own)}, the states are of {list(layers)}",
            f"extract with aux_layers={','.join(map(str, own))!r}",
        )


def head(settings: Eagle3Pipeline, target: Target, vocab: VocabMap, layers: tuple[int, ...]) -> Eagle3DraftModel:
    """The head to train, fp32, as `settings.start` says. Raises BadStart and draft's errors."""
    if settings.start not in (WARM, SCRATCH):
        model = existing(Path(settings.start), target, vocab, layers)
        model.lm_head.weight.requires_grad_(settings.lm_head == "trained")
        return model
    shape = {"ttt_steps": settings.ttt_steps, "num_layers": settings.draft_layers}
    trained = settings.lm_head == "trained"
    model = draft.build(target, vocab, layers, **shape, train_lm_head=trained, seed=settings.seed)
    if settings.start == WARM:
        draft.warm_start(model, target)
    return model


def existing(head_dir: Path, target: Target, vocab: VocabMap, layers: tuple[int, ...]) -> Eagle3DraftModel:
    """A head that was trained before, over the same layers.

    Its vocabulary may differ from `vocab` where its lm_head is the target's: then the new rows are the target's.
    """
    model = draft.load(head_dir, target)
    refuse_layers(head_dir, model.target_layer_ids, layers)
    if model.d2t is None or torch.equal(model.d2t, vocab.d2t):
        return model
    if not torch.equal(model.lm_head.weight.bfloat16(), model.verifier_lm_head.weight.bfloat16()):
        raise BadStart(
            f"{head_dir} has its own lm_head over {len(model.d2t)} tokens, other ones than this run's vocabulary",
            "use the vocabulary it was trained with (its d2t)",
        )
    flags = {name: getattr(model.config, name) for name in draft.FLAGS}
    again = draft.build(target, vocab, layers, **flags)
    kept = {name: value for name, value in model.state_dict().items() if name in trainable(model)}
    try:
        again.load_state_dict(kept, strict=False)
    except RuntimeError as error:
        raise BadStart(
            f"{head_dir} has another shape than a head made for {target.name}: {error}",
            "use the vocabulary it was trained with (its d2t)",
        ) from error
    return again


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}
