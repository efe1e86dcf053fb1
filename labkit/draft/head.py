"""A fresh EAGLE-3 head over a target, or one that exists, as a model to train or to run.

The head is speculators' Eagle3DraftModel: fc over three target states, one decoder layer over [embedding, state],
norm and lm_head. The embedding is the target's and stays frozen; lm_head's rows do unless they are to learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from labkit.draft import weights
from labkit.draft.config import FLAGS, configure
from labkit.draft.forms import BadHead, read
from labkit.targets import Target
from labkit.vocab import VocabMap

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

NOT_SHIPPED = ("embed_tokens.", "verifier_norm.", "verifier_lm_head.")  # engines share the target's embedding


def build(
    target: Target,
    vocab: VocabMap,
    layers: Sequence[int],
    *,
    ttt_steps: int = 3,
    num_layers: int = 1,
    train_lm_head: bool = False,
    seed: int = 0,
    **flags: bool,
) -> Eagle3DraftModel:
    """A fresh head of `num_layers` over `layers` of the target (vLLM's ids, without the last output), fp32.

    `train_lm_head`: its lm_head begins as the target's rows and learns; else it stays them. Raises
    UnknownArchitecture for flags that no engine takes, MissingWeights.
    """
    torch.manual_seed(seed)
    size = vocab.draft_vocab_size
    shape = {"ttt_steps": ttt_steps, "num_layers": num_layers}
    config = configure(target, draft_vocab_size=size, layers=layers, **shape, **FLAGS | flags)
    model = new(config)
    model.load_vocab_mappings(vocab.t2d, vocab.d2t)
    take_from(target, model, lm_head=True)
    model.lm_head.weight.requires_grad_(train_lm_head)
    return model.float()


def new(config: Eagle3SpeculatorConfig) -> Eagle3DraftModel:
    """speculators' model of a configuration, its own parameters random."""
    from loguru import logger
    from speculators.models.eagle3 import Eagle3DraftModel

    logger.disable("speculators")
    return Eagle3DraftModel(config)


def take_from(target: Target, model: Eagle3DraftModel, *, lm_head: bool) -> None:
    """Copy the target's embedding, final norm and lm_head rows into the frozen parts that the head trains against.

    `lm_head`: the head's own, too. An embedding that came with the head stays. A norm of the `1 + w` kind is
    stored as its gain, since the head's norm is the plain one (speculators#1090).
    """
    embedding, rows = weights.own(target, "embed"), weights.own(target, "lm_head")
    vocabulary = model.embed_tokens.num_embeddings
    rows = rows[:vocabulary] if model.t2d is None else rows[: len(model.t2d)][model.t2d]
    norm = weights.own(target, "norm") + (1.0 if weights.gain(target) == "1+w" else 0.0)
    if model.embed_tokens.weight.isnan().any():
        model.embed_tokens.load_state_dict({"weight": embedding[:vocabulary]})
    model.verifier_norm.load_state_dict({"weight": norm})
    model.verifier_lm_head.load_state_dict({"weight": rows})
    if lm_head:
        model.lm_head.load_state_dict({"weight": rows.clone()})
    for part in (model.embed_tokens, model.lm_head, model.verifier_lm_head, model.verifier_norm):
        part.weight.requires_grad_(False)


def load(head_dir: Path, target: Target) -> Eagle3DraftModel:
    """A head directory of either form as a model in fp32, embedding and verifier weights taken from `target`.

    What a training that starts from an existing head begins with. Raises BadHead naming what is missing.
    """
    head = read(head_dir)
    config = head.speculator_config()
    config.speculators_config.verifier.name_or_path = str(target.path)
    config.transformer_layer_config._attn_implementation = "sdpa"
    try:
        model = new(config)
        missing, unexpected = model.load_state_dict(head.tensors(), strict=False)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BadHead(f"{head_dir} is no EAGLE-3 head: {reason}", "run draft.preflight on it") from error
    missing = [name for name in missing if not name.startswith(NOT_SHIPPED)]
    if missing or unexpected:
        raise BadHead(
            f"{head_dir} lacks {missing} and has unknown {list(unexpected)}", "run draft.preflight on it"
        )
    sizes = (model.verifier_vocab_size, model.hidden_size)
    theirs = (target.geometry.vocab_size, target.geometry.hidden_size)
    if sizes != theirs:
        raise BadHead(
            f"{head_dir} is over {sizes[0]} tokens of width {sizes[1]}, the target has {theirs[0]} of {theirs[1]}",
            "give the target that the head was made for",
        )
    take_from(target, model, lm_head=False)
    return model.float()
