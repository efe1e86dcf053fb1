"""Extracted states to training batches: aligned, packed several conversations a step, in a seeded order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from labkit import conversations, extract
from labkit.errors import LabError

Batch = dict[str, torch.Tensor]


class NoTrainingData(LabError):
    """A split of the data set has no row with an answer."""


@dataclass(frozen=True)
class Sample:
    """One conversation: its file of states, its length T and where its answer starts."""

    path: Path
    input_ids: np.ndarray
    loss_mask: np.ndarray
    prompt_tokens: int

    @property
    def rows(self) -> int:
        """Rows that it gives to a batch: T - 1, since a row pairs a state with the token after it."""
        return len(self.input_ids) - 1

    def cut(self, length: int) -> Sample:
        """The same conversation, its first `length` tokens."""
        return dataclasses.replace(self, input_ids=self.input_ids[:length], loss_mask=self.loss_mask[:length])


def load_samples(dataset_dir: Path, hidden_dir: Path, split: str) -> list[Sample]:
    """The conversations of a split ("train", "held_out") in order; raises NoTrainingData when there is none."""
    dataset = conversations.load(dataset_dir)
    chosen = dataset[dataset.split == split]
    samples = [
        Sample(
            path=extract.states_path(hidden_dir, row.Index),
            input_ids=np.array(row.input_ids, dtype=np.int64),
            loss_mask=np.array(row.loss_mask, dtype=bool),
            prompt_tokens=row.prompt_tokens,
        )
        for row in chosen.itertuples()
        if np.any(row.loss_mask)
    ]
    if not samples:
        raise NoTrainingData(
            f"{dataset_dir} has no {split} conversation with an answer",
            "raise num_prompts, held_out or max_tokens",
        )
    return samples


def rows_of(sample: Sample) -> Batch:
    """Aligned rows [T-1, ...]: row t pairs token t+1 with the aux states of token t; its target is state t+1.

    speculators' own alignment; raises BrokenFile when the file of states cannot be read.
    """
    from speculators.models.eagle3.data import shift_batch

    states = extract.load_states(sample.path)["hidden_states"][: len(sample.input_ids)]  # [T, layers + 1, H]
    length = len(sample.input_ids)
    rows = shift_batch(
        {
            "input_ids": torch.from_numpy(sample.input_ids),
            "hidden_states": states[:, :-1].flatten(1),
            "verifier_last_hidden_states": states[:, -1],
            "loss_mask": torch.from_numpy(sample.loss_mask),
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }
    )
    rows.pop("lengths")
    return rows


def pack(samples: Sequence[Sample]) -> Batch:
    """Several conversations in one row [1, sum of T-1, ...]; document ids keep their attention apart."""
    parts = [rows_of(sample) for sample in samples]
    batch = {name: torch.cat([part[name] for part in parts])[None] for name in parts[0]}
    lengths = torch.tensor([sample.rows for sample in samples])
    batch["document_ids"] = torch.repeat_interleave(torch.arange(len(samples)), lengths)[None]
    return batch


def plan(samples: Sequence[Sample], batch_tokens: int, *, seed: int | None) -> list[list[Sample]]:
    """Groups of conversations of at most `batch_tokens` rows (a longer one goes alone), shuffled by `seed`."""
    order = np.arange(len(samples)) if seed is None else np.random.default_rng(seed).permutation(len(samples))
    groups: list[list[Sample]] = []
    room = 0
    for index in order:
        sample = samples[int(index)]
        if not groups or sample.rows > room:
            groups.append([])
            room = batch_tokens
        groups[-1].append(sample)
        room -= sample.rows
    return groups
