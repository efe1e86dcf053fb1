"""Training on states of random numbers: what a training step costs here does not depend on what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save_file

from labkit import extract, files
from labkit.planner.head import STATES
from labkit.targets import Geometry

HELD_OUT = 1


def write(
    folder: Path, geometry: Geometry, *, conversations: int, length: int, seed: int = 0
) -> tuple[Path, Path]:
    """A data set of random tokens and its hidden states, in the forms that the training reads: both folders.

    One further conversation is held out. Numbers are bf16 of unit size, so that no loss overflows.
    """
    rng, torch_rng = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    data, hidden = folder / "data", folder / "hidden_states"
    hidden.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in range(conversations + HELD_OUT):
        ids = rng.integers(0, geometry.vocab_size, length)
        rows.append(conversation(ids, "train" if row < conversations else "held_out"))
        states = torch.randn(length, STATES, geometry.hidden_size, generator=torch_rng).to(torch.bfloat16)
        tensors = {"hidden_states": states, "token_ids": torch.from_numpy(ids)}
        save_file(tensors, extract.states_path(hidden, row))
    files.write_parquet(data / "dataset.parquet", pd.DataFrame(rows))
    return data, hidden


def conversation(ids: np.ndarray, split: str) -> dict[str, object]:
    """A row of the data set: the first quarter is the prompt."""
    start = max(1, len(ids) // 4)
    return {
        "split": split,
        "input_ids": ids.tolist(),
        "loss_mask": [False] * start + [True] * (len(ids) - start),
        "seq_len": len(ids),
        "prompt_tokens": start,
        "answer_tokens": len(ids) - start,
        "temperature": 0.0,
    }
