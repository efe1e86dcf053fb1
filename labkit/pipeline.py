"""What notebook 04 says of its own steps: the estimate before, the vocabulary, the costs and the answer after."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit import conversations, engine, extract, train, vocab
from labkit.acceptance import Acceptance
from labkit.errors import LabError
from labkit.settings import Eagle3Pipeline
from labkit.targets import Target
from labkit.vocab import VocabMap

PROMPT_TOKENS = 45  # of a templated prompt with its chat template, about


class UnusableStates(LabError):
    """Extracted states do not belong to their tokens, so a head trained on them would be useless."""


@dataclass(frozen=True)
class Estimate:
    """What a run will need at most: tokens of all conversations, tokens trained on, bytes of states."""

    tokens: int
    trained_tokens: int
    disk_bytes: int


def estimate(settings: Eagle3Pipeline, target: Target) -> Estimate:
    """The most that the settings can ask for: every answer as long as allowed.

    Raises BadLayers or BadVocabulary where the settings do not fit the target, before anything is spent.
    """
    layers(settings, target)
    vocab.refuse_impossible(np.ones(target.geometry.vocab_size), settings.draft_vocab_size, [])
    length = min(settings.max_model_len - 1, PROMPT_TOKENS + settings.max_tokens)
    tokens = (settings.num_prompts + settings.held_out) * length
    disk = extract.bytes_needed([tokens], 4, target.geometry.hidden_size)
    return Estimate(tokens, settings.num_prompts * length * settings.epochs, disk)


def describe(expected: Estimate) -> str:
    """The estimate in words."""
    return (
        f"At most {expected.tokens:,} tokens to generate and extract, {expected.disk_bytes / 1e9:.2f} GB of "
        f"hidden states on disk, {expected.trained_tokens:,} tokens to train on over all epochs. Heads trained on "
        "a few hundred conversations reach acceptance lengths of about 1.5 to 1.8 on prompts of their own kind, "
        "published heads with a thousand times the data 2.3 to 3.3: expect the former here."
    )


def serve(settings: Eagle3Pipeline, target: Target, variant: str, **options: Any) -> Any:
    """A server of the pipeline's: its log lies in the stage's folder."""
    return engine.serve(
        target,
        variant,
        log_dir=settings.folder,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.concurrency,
        **options,
    )


def answers(settings: Eagle3Pipeline, target: Target, prompts: pd.DataFrame) -> pd.DataFrame:
    """The answers to `prompts` as a data set (conversations.collect); a server starts if any is missing."""
    return conversations.collect(
        prompts,
        partial(serve, settings, target, "baseline"),
        settings.folder / "data",
        model_key=target.revision,
        max_length=settings.max_model_len - 1,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        seed=settings.seed,
        concurrency=settings.concurrency,
    )


def states(settings: Eagle3Pipeline, target: Target) -> Path:
    """Hidden states of the data set (extract.run); a server starts if any file is missing."""
    ids = layers(settings, target)
    options = {
        "layers": [*ids, target.geometry.num_hidden_layers],
        "storage": settings.folder / "staging",
    }
    server = partial(serve, settings, target, "extract", **options)
    return extract.run(
        settings.folder / "data", server, settings.folder / "hidden_states", target=target, layers=ids
    )


def layers(settings: Eagle3Pipeline, target: Target) -> tuple[int, ...]:
    """The layers that the head reads."""
    return extract.layers_of(settings.aux_layers, target.geometry.num_hidden_layers)


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
    """The commands that train the same head on a machine with GPUs: the lab's loop and speculators' trainer."""
    folder = settings.folder
    places = {"dataset_dir": folder / "data", "hidden_dir": folder / "hidden_states", "out_dir": folder}
    ids = layers(settings, target)
    return {
        "labkit": train.launch_command(folder / "training.json", processes),
        "speculators": train.speculators_command(
            settings, target=target, vocab=mapping, layers=ids, processes=processes, **places
        ),
    }


def refuse(problems: pd.DataFrame) -> None:
    """Raise UnusableStates with the first of extract.verify's problems."""
    if len(problems):
        first = problems.iloc[0]
        raise UnusableStates(
            f"{len(problems)} problems with the hidden states; row {first['row']}: {first['check']} is "
            f"{first['value']} (limit {first['limit']})",
            str(first["remedy"]),
        )


def counts(dataset: pd.DataFrame, target: Target, split: str) -> np.ndarray:
    """Answer tokens of one split by id: int64 [target vocabulary]."""
    return conversations.token_counts(dataset, target.geometry.vocab_size, split)


def vocabulary(settings: Eagle3Pipeline, dataset: pd.DataFrame, target: Target) -> VocabMap:
    """The draft vocabulary of the training answers; special tokens of the target are always in it."""
    required = target.tokenizer().all_special_ids
    return vocab.build(counts(dataset, target, "train"), settings.draft_vocab_size, required)


def coverage(dataset: pd.DataFrame, target: Target, chosen_size: int) -> pd.DataFrame:
    """Share of answer tokens that a draft vocabulary of each size holds: draft_vocab_size split coverage."""
    full = target.geometry.vocab_size
    sizes = sorted({size for size in (1024, 2048, 4096, 8192, 16384, 32768, chosen_size, full) if size <= full})
    by_split = {split: counts(dataset, target, split) for split in ("train", "held_out")}
    maps = {size: vocab.build(by_split["train"], size) for size in sizes}
    rows = [
        {"draft_vocab_size": size, "split": split, "coverage": maps[size].coverage(tokens)}
        for size in sizes
        for split, tokens in by_split.items()
    ]
    return pd.DataFrame(rows)


def costs(dataset: pd.DataFrame, metrics: pd.DataFrame, laps: dict[str, float]) -> pd.DataFrame:
    """Seconds, tokens and tokens a second of each step in this run; a step that was taken up has few seconds."""
    tokens = {
        "answers": int(dataset.answer_tokens.sum()),
        "states": int(dataset.seq_len.sum()),
        "training": int(metrics.tokens.sum()),
    }
    rows = [{"step": name, "seconds": seconds, "tokens": tokens.get(name, 0)} for name, seconds in laps.items()]
    table = pd.DataFrame(rows)
    return table.assign(tokens_per_s=table.tokens / table.seconds)


def headline(
    dataset: pd.DataFrame, simulated: Acceptance, metrics: pd.DataFrame, mapping: VocabMap
) -> dict[str, Any]:
    """The scalars of run.json."""
    return {
        "acceptance_length_simulated": simulated.mean_length,
        "samples": int((dataset.split == "train").sum()),
        "answer_tokens": int(dataset.answer_tokens.sum()),
        "draft_vocab_size": mapping.draft_vocab_size,
        "final_loss": float(metrics.loss.tail(20).mean()),
        "training_seconds": float(metrics.seconds.max()),
    }


def conclusion(dataset: pd.DataFrame, simulated: Acceptance, metrics: pd.DataFrame, k: int) -> str:
    """The answer in words, with its limits."""
    best = metrics.acceptance_length.max()
    trained = int(metrics.tokens.sum())
    answer = "Yes" if simulated.mean_length >= 1.3 else "Not yet"
    return (
        f"{answer}: after {trained:,} tokens of training in {metrics.seconds.max():.0f} s its drafts are worth "
        f"**{simulated.mean_length:.2f}** tokens a step at k={k} on held-out prompts of the training kind (best "
        f"epoch {best:.2f}). That is simulated; the engine's own figure, and whether it pays, is the question of "
        f"notebook 05.\n\nLimits: {int((dataset.split == 'train').sum())} conversations of a few forms, "
        "greedy answers, one layer. More data helps before anything else does: where the held-out length falls "
        "while the loss still does, the head has begun to learn its data by heart."
    )
