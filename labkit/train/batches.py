"""Conversations to training batches: aligned, several of them packed in a row, rows of about one length.

A batch is laid out by tokens [rows, length]: slot t of a document holds token t and the states of token t. The
head's row t reads token t + 1 and the aux states of token t, and its target is the last state of token t + 1
(speculators' alignment), so alignment is a matter of indices and no state is copied for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from labkit import conversations, extract, files
from labkit.errors import LabError

ROW_TOKENS = 512  # a row is this long unless a document is longer: dense masks grow with its square
ALIGNED = 8  # attention kernels on GPUs read masks in pieces of so many
Batch = dict[str, Any]


class NoTrainingData(LabError):
    """A split of the data set has no row with an answer."""


class LeakedSplit(LabError):
    """A conversation stands both in the training and in the held-out split."""


@dataclass(frozen=True)
class Sample:
    """One conversation: its file of states, its T tokens, which are trained, where the first answer starts."""

    path: Path
    input_ids: np.ndarray
    loss_mask: np.ndarray
    prompt_tokens: int

    @property
    def tokens(self) -> int:
        """Its length T."""
        return len(self.input_ids)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The answers as token ranges [first, end); a first token of the text has no state before it."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], self.loss_mask, [False]]).astype(np.int8)))
        found = edges.reshape(-1, 2).tolist()
        return [(max(first, 1), end) for first, end in found if end > 1]

    @property
    def trained_rows(self) -> np.ndarray:
        """Rows t whose loss counts, those with token t + 1 in an answer: ascending, of 0..T-2."""
        return np.flatnonzero(self.loss_mask[1:])

    def trained(self, ttt_steps: int) -> np.ndarray:
        """Number of losses at each TTT step: step i foresees a trained row's target from i rows before it."""
        return np.array([(self.trained_rows >= step).sum() for step in range(ttt_steps)])

    def cut(self, length: int) -> Sample:
        """The same conversation, its first `length` tokens."""
        return dataclasses.replace(self, input_ids=self.input_ids[:length], loss_mask=self.loss_mask[:length])


def load_samples(dataset_dir: Path, hidden_dir: Path, split: str) -> list[Sample]:
    """The conversations of a split ("train", "held_out") in order.

    Rows without a trained token are left out; raises NoTrainingData when nothing else is there, LeakedSplit when
    a prompt of it is in the other split, too.
    """
    dataset = conversations.load(dataset_dir)
    refuse_leak(dataset)
    chosen = dataset[dataset.split == split]
    samples = [
        Sample(
            path=extract.states_path(hidden_dir, row.Index),
            input_ids=np.array(row.input_ids, dtype=np.int32),  # half the memory of int64
            loss_mask=np.array(row.loss_mask, dtype=bool),
            prompt_tokens=row.prompt_tokens,
        )
        for row in chosen.itertuples()
        if np.any(row.loss_mask[1:])
    ]
    if not samples and len(chosen):
        raise NoTrainingData(
            f"the loss mask of all {len(chosen)} {split} conversations of {dataset_dir} is empty: nothing would "
            "be trained, loss and accuracy would stay 0",
            "either the answers were cut off (raise max_model_len; prompts fill it), or the assistant's turns "
            "were not found in the chat template (look at one conversation's loss_mask)",
        )
    if not samples:
        raise NoTrainingData(
            f"{dataset_dir} has no {split} conversation with an answer",
            "raise num_prompts, held_out or max_tokens",
        )
    return samples


def refuse_leak(dataset: pd.DataFrame) -> None:
    """Raise LeakedSplit where a prompt is in both splits: its held-out figures would be of known text."""
    if "prompt_id" not in dataset:
        return
    both = set(dataset.prompt_id[dataset.split == "train"]) & set(dataset.prompt_id[dataset.split == "held_out"])
    if both:
        raise LeakedSplit(
            f"{len(both)} prompts are in training and held-out data, such as {min(map(str, both))}",
            "split by conversation: give all rows of one prompt_id the same split",
        )


def read_states(sample: Sample) -> torch.Tensor:
    """The states of a conversation from its file [T, layers + 1, H]; raises BrokenFile."""
    states = extract.load_states(sample.path)["hidden_states"][: sample.tokens]
    if len(states) != sample.tokens:
        raise files.BrokenFile(
            f"{sample.path} cannot be used: {len(states)} states for {sample.tokens} tokens",
            "run again: the extraction makes it anew",
        )
    return states


def reading(samples: Sequence[Sample], readers: Executor) -> Callable[[Sample], torch.Tensor]:
    """A reader whose files are all being read at once: one thread does not keep a fast disk busy."""
    started = {id(sample): readers.submit(read_states, sample) for sample in samples}
    return lambda sample: started[id(sample)].result()


def rows_of(samples: Sequence[Sample]) -> list[list[int]]:
    """Which samples share a row: first fit, longest first, in rows of ROW_TOKENS or the longest sample."""
    longest, total = max(s.tokens for s in samples), sum(s.tokens for s in samples)
    length = max(longest, min(total, ROW_TOKENS))
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(samples)), key=lambda i: -samples[i].tokens):
        size = samples[index].tokens
        place = next((row for row, left in enumerate(room) if left >= size), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(length)
        rows[place].append(index)
        room[place] -= size
    return [sorted(row) for row in rows]


def pack(
    samples: Sequence[Sample], ttt_steps: int, read: Callable[[Sample], torch.Tensor] | None = read_states
) -> Batch:
    """Conversations in rows [B, L]; document ids keep their attention apart (-1 is padding).

    Keys: token_ids, document_ids (the sample's index), position_ids [B, L]; states [B, L, layers + 1, H] where
    `read` gives them; trained [N], flat slots of the rows whose loss counts; reach, for each TTT step the indices
    of `trained` that have so many rows before them; places, each sample's (row, first slot).
    """
    rows = rows_of(samples)
    length = max(sum(samples[i].tokens for i in row) for row in rows)
    length = -(-length // ALIGNED) * ALIGNED
    shape = (len(rows), length)
    batch: Batch = {
        "token_ids": torch.zeros(shape, dtype=torch.long),
        "document_ids": torch.full(shape, -1),
        "position_ids": torch.zeros(shape, dtype=torch.long),
        "places": [(0, 0)] * len(samples),
    }
    for number, row in enumerate(rows):
        start = 0
        for index in row:
            place(batch, samples[index], index, number, start, read)
            start += samples[index].tokens
    own = [sample.trained_rows for sample in samples]
    first = [number * length + start for number, start in batch["places"]]
    inside = np.concatenate(own)
    batch["trained"] = torch.from_numpy(np.concatenate([a + b for a, b in zip(own, first, strict=True)]))
    batch["reach"] = [torch.from_numpy(np.flatnonzero(inside >= step)) for step in range(ttt_steps)]
    return batch


def place(
    batch: Batch,
    sample: Sample,
    index: int,
    row: int,
    start: int,
    read: Callable[[Sample], torch.Tensor] | None,
) -> None:
    """Put a sample into its slots."""
    slots = (row, slice(start, start + sample.tokens))
    batch["places"][index] = (row, start)
    batch["token_ids"][slots] = torch.from_numpy(sample.input_ids)
    batch["document_ids"][slots] = index
    batch["position_ids"][slots] = torch.arange(sample.tokens)
    if read is None:
        return
    states = read(sample)
    if "states" not in batch:
        batch["states"] = states.new_zeros((*batch["token_ids"].shape, *states.shape[1:]))
    batch["states"][slots] = states


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch's tensors on a device; copies from pinned memory do not wait."""
    if device.type == "cpu":
        return batch

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device, non_blocking=True)
        return [move(item) for item in value] if isinstance(value, list) else value

    return {name: move(value) for name, value in batch.items()}


def pinned(batch: Batch) -> Batch:
    """The batch in pinned memory, from which a GPU copies by itself."""
    return {name: v.pin_memory() if isinstance(v, torch.Tensor) else v for name, v in batch.items()}
