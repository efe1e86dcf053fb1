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
GREEDY_AGREEMENT, SAMPLED_AGREEMENT = 0.9, 0.3  # another layer's states agree in a few per cent
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
    min_agreement: float | None = None,
    sample: int = 32,
) -> pd.DataFrame:
    """The problems of an extraction, a row each (columns row check value limit remedy); empty when all is well.

    Every file is read: shape, token ids, finite, non-zero. For `sample` files spread over the set, final norm and
    lm_head are applied to the last state on answer positions; for greedy answers its top token is the real next
    token in nearly all of them. `min_agreement` is the smallest share accepted: by default 0.9, and 0.3 for
    answers that were sampled.
    """
    record = files.read_json(out_dir / RECORD)
    dataset = conversations.load(dataset_dir or out_dir / record["dataset"])
    if min_agreement is None:
        sampled = "temperature" in dataset and (dataset.temperature > 0).any()
        min_agreement = SAMPLED_AGREEMENT if sampled else GREEDY_AGREEMENT
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
    hits = {row: agreement(head, dataset.iloc[row], states_path(out_dir, row)) for row in chosen}
    rows += [
        [row, "agreement", f"{found.mean():.3f}", f"{min_agreement}", REMEDY["agreement"]]
        for row, found in too_low(hits, min_agreement).items()
    ]
    frame = pd.DataFrame(rows, columns=COLUMNS)
    frame.attrs["agreement"] = float(np.concatenate(list(hits.values())).mean()) if hits else float("nan")
    return frame


def too_low(hits: dict[int, np.ndarray], limit: float) -> dict[int, np.ndarray]:
    """The files that agree too little; two near-ties more than the limit allows say nothing of a short answer."""
    low = {row: found for row, found in hits.items() if found.mean() < limit}
    if low and np.concatenate(list(hits.values())).mean() < limit:
        return low
    return {row: found for row, found in low.items() if found.sum() < limit * len(found) - 2}


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


def agreement(head: FinalHead, conversation: pd.Series, path: Path) -> np.ndarray:
    """For each answer token whether it is the top token of the state before it: bool [answer tokens]."""
    ids = torch.tensor(np.array(conversation.input_ids), dtype=torch.long)
    start = max(1, int(conversation.prompt_tokens))
    states = load_file(path)["hidden_states"][start - 1 : len(ids) - 1, -1]
    return (head.top1(states) == ids[start:]).numpy()
