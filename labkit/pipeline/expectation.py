"""The most that a run of notebook 04 can need, before anything is spent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from labkit import extract, train, vocab
from labkit.planner import here
from labkit.planner.work import Work
from labkit.settings import Eagle3Pipeline
from labkit.targets import Geometry, Target

PROMPT_TOKENS = 45  # of a templated prompt with its chat template, about


@dataclass(frozen=True)
class Estimate:
    """What a run will need at most: tokens of all conversations, tokens trained on, bytes of states."""

    tokens: int
    trained_tokens: int
    disk_bytes: int


def estimate(settings: Eagle3Pipeline, target: Target) -> Estimate:
    """The most that the settings can ask for: every answer as long as allowed.

    Raises `refuse_choices`' errors, and DoesNotFit where disk or memory will not do, with what would: before
    anything is spent.
    """
    refuse_choices(settings, target.geometry)
    work, memory = work_of(settings), here.free_memory_gb()
    here.refuse(here.obstacles_here(target.geometry, work, settings.folder, free_memory=memory))
    stored = work.tokens if work.stored else settings.held_out * work.length  # always stored
    disk = extract.bytes_needed([stored], 4, target.geometry.hidden_size, form=settings.hidden_states)
    return Estimate(work.tokens, settings.num_prompts * work.length * settings.epochs, disk)


def refuse_choices(settings: Eagle3Pipeline, geometry: Geometry) -> None:
    """Refuse now what a stage of hours or days would refuse after the ones before it.

    Raises BadLayers, BadVocabulary, UnknownForm, UnknownBackend, BadShard, BadLoss, BadStart or BadHead.
    """
    ids = extract.layers_of(settings.aux_layers, geometry.num_hidden_layers)
    extract.check_choices(settings.hidden_states, settings.states_backend, settings.shard)
    vocab.refuse_impossible(np.ones(geometry.vocab_size), settings.draft_vocab_size, [])
    train.loss_config(settings.loss)
    train.refuse_start(settings.start, ids)


def work_of(settings: Eagle3Pipeline) -> Work:
    """The most that the settings can ask for, as the planner counts it."""
    return Work(
        conversations=settings.num_prompts + settings.held_out,
        prompt_tokens=PROMPT_TOKENS,
        answer_tokens=max(1, min(settings.max_tokens, settings.max_model_len - 1 - PROMPT_TOKENS)),
        epochs=settings.epochs,
        ttt_steps=settings.ttt_steps,
        draft_vocab_size=settings.draft_vocab_size,
        batch_tokens=settings.batch_tokens,
        streams=settings.concurrency,
        item_bytes=1 if settings.hidden_states == "fp8" else 2,
        stored=settings.states_from == "files",
    )


def describe(expected: Estimate) -> str:
    """The estimate in words."""
    return (
        f"At most {expected.tokens:,} tokens to generate and extract, {expected.disk_bytes / 1e9:.2f} GB of "
        f"hidden states on disk, {expected.trained_tokens:,} tokens to train on over all epochs. Heads trained on "
        "a few hundred conversations reach acceptance lengths of about 1.5 to 1.8 on prompts of their own kind, "
        "published heads with a thousand times the data 2.3 to 3.3: expect the former here."
    )
