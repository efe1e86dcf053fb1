"""Answers to a data set: exact tokens and a mask of what the target said, a row a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit import files
from labkit.conversations.answers import generate

FILE = "dataset.parquet"


def collect(
    prompts: pd.DataFrame,
    server: Any,
    out_dir: Path,
    *,
    max_length: int,
    model_key: str = "",
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    concurrency: int = 32,
) -> pd.DataFrame:
    """Answer the prompts (`split`'s frame) and write `out_dir`/dataset.parquet; resumes where it was cut off.

    Columns: prompt_id category topic split messages prompt text input_ids loss_mask seq_len prompt_tokens
    answer_tokens finish_reason temperature. `input_ids` are the server's own prompt and answer ids (end token
    included), cut to `max_length` tokens; `loss_mask` is True on the answer's. Errors: those of
    `answers.generate`.
    """
    answers = generate(
        prompts,
        server,
        out_dir / "answers.jsonl",
        model_key=model_key,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        concurrency=concurrency,
    )
    rows = [
        {**prompt, **tokenised(answer, max_length), "temperature": temperature}
        for prompt, answer in zip(prompts.to_dict("records"), answers, strict=True)
        if answer.get("token_ids")
    ]
    frame = pd.DataFrame(rows)
    frame = frame[frame.answer_tokens >= 2].reset_index(drop=True)  # one token: nothing for a draft to guess
    frame["prompt"] = [messages[-1]["content"] for messages in frame.messages]
    files.write_parquet(out_dir / FILE, frame)
    return frame


def tokenised(answer: dict[str, Any], max_length: int) -> dict[str, Any]:
    """Token columns of one row from the server's ids."""
    start = len(answer["prompt_token_ids"])
    ids = (answer["prompt_token_ids"] + answer["token_ids"])[:max_length]
    return {
        "text": answer["text"],
        "input_ids": ids,
        "loss_mask": [False] * min(start, len(ids)) + [True] * (len(ids) - start),
        "seq_len": len(ids),
        "prompt_tokens": min(start, len(ids)),
        "answer_tokens": max(0, len(ids) - start),
        "finish_reason": answer["finish_reason"] if start + len(answer["token_ids"]) <= max_length else "length",
    }


def load(dataset_dir: Path) -> pd.DataFrame:
    """The data set that `collect` wrote; raises BrokenFile."""
    return files.read_parquet(dataset_dir / FILE)


def token_counts(dataset: pd.DataFrame, vocab_size: int, split: str = "train") -> np.ndarray:
    """How often each token id stands in the answers of one split: int64 [vocab_size]."""
    chosen = dataset[dataset.split == split]
    counts = np.zeros(vocab_size, dtype=np.int64)
    for ids, mask in zip(chosen.input_ids, chosen.loss_mask, strict=True):
        counts += np.bincount(np.asarray(ids)[np.asarray(mask, dtype=bool)], minlength=vocab_size)
    return counts
