"""Draft vocabulary and head of notebook 04, here and on other machines; the calibration before them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit import conversations, draft, engine, files, train, vocab
from labkit.pipeline.data import answers
from labkit.pipeline.expectation import work_of
from labkit.pipeline.servers import layers
from labkit.planner import calibration, trial
from labkit.settings import Eagle3Pipeline, root
from labkit.targets import Target
from labkit.vocab import VocabMap


def calibrate(
    settings: Eagle3Pipeline, target: Target, prompts: pd.DataFrame, server: engine.OnDemand
) -> pd.DataFrame:
    """Measure generation, prefill and training here on a few conversations, and forecast this run by it.

    A row a step (calibration.forecast). What was measured is kept in the stage's folder; with the same settings
    nothing is measured again and no server starts. Empty where the data set brings its answers (nothing is
    generated then) and where `calibrate` says no.
    """
    if settings.answers == "dataset" or not settings.calibrate:
        return pd.DataFrame(columns=["step", "predicted_s_low", "predicted_s", "predicted_s_high"])
    few = prompts.head(min(settings.concurrency, settings.num_prompts))
    decides = ("max_tokens", "temperature", "concurrency", "draft_vocab_size", "ttt_steps", "batch_tokens")
    values = {name: getattr(settings, name) for name in (*decides, "max_model_len", "tensor_parallel_size")}
    found = calibration.kept(
        settings.folder / "calibration.json",
        files.digest([values, len(few), target.revision]),
        lambda: calibration.measure(
            lambda folder, limit: answers(settings, target, few, server, folder=folder, max_tokens=limit),
            server.get,
            partial(trial_training, settings, target),
            scratch=settings.folder / "calibration",
            max_tokens=settings.max_tokens,
            prompts=len(few),
        ),
    )
    return calibration.forecast(
        found,
        train=settings.num_prompts,
        held_out=settings.held_out,
        epochs=settings.epochs,
        max_length=settings.max_model_len - 1,
    )


def trial_training(settings: Eagle3Pipeline, target: Target, folder: Path) -> pd.DataFrame:
    """The metrics of a short training on states of random numbers, as the calibration wants them."""
    length = min(work_of(settings).length, 512)
    count = calibration.TRAINED_CONVERSATIONS
    data, hidden = trial.write(folder, target.geometry, conversations=count, length=length, seed=settings.seed)
    train.run(
        dataclasses.replace(settings, epochs=1),
        target=target,
        dataset_dir=data,
        hidden_dir=hidden,
        vocab=vocab.build(np.ones(target.geometry.vocab_size, dtype=np.int64), settings.draft_vocab_size),
        out_dir=folder,
        layers=layers(settings, target),
    )
    return train.read_metrics(folder / "metrics.parquet")


def head(
    settings: Eagle3Pipeline,
    target: Target,
    mapping: VocabMap,
    watch: train.Watcher | None = None,
    stop: train.Flag | None = None,
) -> Path:
    """The trained head's directory (train.run), the vocabulary saved beside it.

    training.json beside the data says the same to `accelerate launch -m labkit.train`, for more devices than one.
    """
    folder, ids = settings.folder, layers(settings, target)
    places = {"dataset_dir": folder / "data", "hidden_dir": folder / "hidden_states", "out_dir": folder}
    mapping.save(folder / "vocab")
    train.write_job(folder / "training.json", settings, vocab_dir=folder / "vocab", layers=ids, **places)
    return train.run(settings, target=target, vocab=mapping, layers=ids, watch=watch, stop=stop, **places)


def elsewhere(settings: Eagle3Pipeline, target: Target, mapping: VocabMap, processes: int = 1) -> dict[str, str]:
    """The commands that train the same head on a machine with GPUs: the lab's loop and speculators' trainer.

    The latter only where it can read the states: not where none are stored, or in the lab's lossless form.
    """
    folder = settings.folder
    commands = {"labkit": train.launch_command(folder / "training.json", processes)}
    if settings.states_from == "on-the-fly" or settings.hidden_states == "zstd":
        return commands
    places = {"dataset_dir": folder / "data", "hidden_dir": folder / "hidden_states", "out_dir": folder}
    ids = layers(settings, target)
    return commands | {
        "speculators": train.speculators_command(
            settings, target=target, vocab=mapping, layers=ids, processes=processes, **places
        )
    }


def elsewhere_told(settings: Eagle3Pipeline, target: Target, mapping: VocabMap, processes: int = 8) -> str:
    """`elsewhere` as Markdown."""
    inside = f"{root()}/"  # run from the lab's folder
    commands = elsewhere(settings, target, mapping, processes).items()
    told = [(name, text.replace(inside, "")) for name, text in commands]
    return "\n\n".join(f"{name}, {processes} GPUs:\n\n```\n{text}\n```" for name, text in told)


def counts(dataset: pd.DataFrame, target: Target, split: str) -> np.ndarray:
    """Answer tokens of one split by id: int64 [target vocabulary]."""
    chosen = dataset[dataset.split == split]
    return vocab.count(chosen.input_ids, chosen.loss_mask, target.geometry.vocab_size)


def vocabulary(settings: Eagle3Pipeline, dataset: pd.DataFrame, target: Target) -> tuple[VocabMap, pd.DataFrame]:
    """The draft vocabulary of the training answers, with all specials and the chat template's own tokens.

    And what each size of it would cover: a row a size and split, draft_vocab_size split coverage filled.
    """
    tokenizer, size = target.tokenizer(), settings.draft_vocab_size
    required = vocab.required_ids(tokenizer)
    by_split = {split: counts(dataset, target, split) for split in ("train", "held_out")}
    sizes = {*vocab.SIZES, size, target.geometry.vocab_size}
    curves = [
        vocab.coverage_curve(by_split["train"], required, sizes=sizes, measured=measured).assign(split=split)
        for split, measured in by_split.items()
    ]
    mapping = vocab.build(by_split["train"], size, required, tokens=len(tokenizer))
    return mapping, pd.concat(curves, ignore_index=True)


def vocabulary_of(head: draft.Head, data: Sequence[Path], target: Target) -> VocabMap:
    """A vocabulary of a head's size counted on several data sets' training answers; the head's own without any."""
    if not data:
        return vocab.VocabMap.of_targets(head.target_ids(), target.geometry.vocab_size)
    tokenizer = target.tokenizer()
    seen = sum(counts(conversations.load(folder), target, "train") for folder in data)
    size, required = len(head.target_ids()), vocab.required_ids(tokenizer)
    return vocab.build(seen, size, required, tokens=len(tokenizer))


def vocabulary_told(mapping: VocabMap, dataset: pd.DataFrame, target: Target) -> dict[str, Any]:
    """What to say of the vocabulary (vocab.summary), on the training answers."""
    return vocab.summary(mapping, counts(dataset, target, "train"))
