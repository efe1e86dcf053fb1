"""Checks on extracted states; predicting the real next token from them catches a wrong layer or norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from labkit import conversations, files
from labkit.extract.states import RECORD, problems, states_path

COLUMNS = ["row", "check", "value", "limit", "remedy"]
REMEDY = {
    "file": "run the extraction again: only this file is made anew",
    "agreement": "the last state is not the last layer's output before the final norm, or norm or head are "
    "another model's: check the layer ids (the last one is the number of layers) and the target",
}


def verify(
    out_dir: Path,
    *,
    dataset_dir: Path | None = None,
    target_path: Path | None = None,
    min_agreement: float = 0.9,
    sample: int = 32,
) -> pd.DataFrame:
    """The problems of an extraction, a row each (columns row check value limit remedy); empty when all is well.

    Every file is read: shape, token ids, finite, non-zero. For `sample` files spread over the set, final norm and
    lm_head are applied to the last state on answer positions; for greedy answers its top token is the real next
    token in nearly all of them. `min_agreement` is the smallest share accepted (lower it for sampled answers).
    """
    record = files.read_json(out_dir / RECORD)
    dataset = conversations.load(dataset_dir or out_dir / record["dataset"])
    rows: list[list[Any]] = []
    for row, ids in enumerate(dataset.input_ids):
        try:
            found = problems(load_file(states_path(out_dir, row)), ids, record)
        except (OSError, SafetensorError) as error:
            found = {"readable": f"{type(error).__name__}: {error}"}
        rows += [[row, name, value, "", REMEDY["file"]] for name, value in found.items()]
    broken = {row[0] for row in rows}
    sound = [row for row in range(len(dataset)) if row not in broken]
    chosen = sorted({sound[int(i)] for i in np.linspace(0, len(sound) - 1, min(sample, len(sound)))})
    head = FinalHead(target_path or Path(record["target"])) if chosen else None
    shares = {row: agreement(head, dataset.iloc[row], states_path(out_dir, row)) for row in chosen}
    low = {row: share for row, share in shares.items() if share < min_agreement}
    rows += [
        [row, "agreement", f"{share:.3f}", f"{min_agreement}", REMEDY["agreement"]] for row, share in low.items()
    ]
    frame = pd.DataFrame(rows, columns=COLUMNS)
    frame.attrs["agreement"] = float(np.mean(list(shares.values()))) if shares else float("nan")
    return frame


class FinalHead:
    """A target's final norm and lm_head, from its weights."""

    def __init__(self, path: Path) -> None:
        """Read the two tensors (the embedding where they are tied)."""
        from loguru import logger
        from speculators.models.utils import GEMMA_STYLE_FINAL_NORM_MODEL_TYPES, get_verifier_config
        from speculators.utils.loading import load_model_layers

        logger.disable("speculators")  # it warns of every tied embedding
        config = get_verifier_config(str(path))
        weights = load_model_layers(["model.norm.weight", "lm_head.weight", "embed_tokens.weight"], str(path))
        self.eps = config.rms_norm_eps
        self.gain = weights["model.norm.weight"].float()
        if config.model_type in GEMMA_STYLE_FINAL_NORM_MODEL_TYPES:
            self.gain = 1 + self.gain
        self.weight = weights.get("lm_head.weight", weights["embed_tokens.weight"])

    def top1(self, states: torch.Tensor) -> torch.Tensor:
        """The most likely next token after each pre-norm state: [T, H] -> [T]."""
        states = states.float()
        normed = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps) * self.gain
        return (normed.to(self.weight.dtype) @ self.weight.T).argmax(-1)


def agreement(head: FinalHead, conversation: pd.Series, path: Path) -> float:
    """Share of answer tokens that are the top token of the state before them."""
    ids = torch.tensor(np.array(conversation.input_ids), dtype=torch.long)
    start = max(1, int(conversation.prompt_tokens))
    states = load_file(path)["hidden_states"][start - 1 : len(ids) - 1, -1]
    return float((head.top1(states) == ids[start:]).float().mean())
