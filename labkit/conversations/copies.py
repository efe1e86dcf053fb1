"""Prompts that are in the training data and in what a head is judged on, word for word or nearly."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any

import pandas as pd

# A word, or one character where words are not set apart (Chinese, Japanese, Thai).
WORD = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]|[^\W_]+")
COLUMNS = ["prompt_id", "train_prompt_id", "overlap", "text", "train_text"]
Grams = set[tuple[str, ...]]


def asked(messages: Any) -> str:
    """What the user says in a conversation."""
    said = [turn["content"] for turn in messages if turn["role"] == "user"]
    return "\n".join(text if isinstance(text, str) else str(text) for text in said)


def grams(text: str, n: int) -> Grams:
    """The distinct runs of `n` words (all words as one run where there are fewer), in lower case."""
    words = WORD.findall(text.lower())
    return {tuple(words[i : i + n]) for i in range(max(1, len(words) - n + 1))} if words else set()


def near_copies(train: pd.DataFrame, evaluation: pd.DataFrame, n: int = 5, share: float = 0.5) -> pd.DataFrame:
    """Pairs of an evaluation prompt and a training prompt that holds `share` of its `n`-word runs or more.

    Both frames: prompt_id, messages. Only what users say is compared, without case and punctuation. Columns
    prompt_id train_prompt_id overlap (0..1) text train_text, the worst first; empty when all is well.
    """
    texts = [asked(messages) for messages in evaluation.messages]
    sets = [grams(text, n) for text in texts]
    sizes = [sorted({len(gram) for gram in found}) for found in sets]
    holders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, found in enumerate(sets):
        for gram in found:
            holders[gram].append(number)
    lengths = {size for found in sizes for size in found}
    rows = []
    for train_id, messages in zip(train.prompt_id, train.messages, strict=True):
        said = asked(messages)
        own = set().union(*(grams(said, length) for length in lengths)) if lengths else set()
        hits = Counter(number for gram in own if gram in holders for number in holders[gram])
        for number, count in hits.items():
            overlap = count / len(sets[number])
            if overlap >= share:
                rows.append([evaluation.prompt_id.iloc[number], train_id, overlap, texts[number], said])
    frame = pd.DataFrame(rows, columns=COLUMNS)
    return frame.sort_values(["overlap", "prompt_id"], ascending=[False, True], ignore_index=True)


def without_copies(train: pd.DataFrame, evaluation: pd.DataFrame, n: int = 5, share: float = 0.5) -> pd.DataFrame:
    """`train` without what `near_copies` finds in it; how many were taken out stands in its `report`."""
    found = near_copies(train, evaluation, n, share)
    left = train[~train.prompt_id.isin(found.train_prompt_id)].reset_index(drop=True)
    left.attrs = dict(train.attrs)
    if len(found):
        entry = {
            "kind": "near copy of an evaluation prompt",
            "kept": False,
            "rows": int(found.train_prompt_id.nunique()),
            "first": f"{found.train_text[0][:80]!r} holds {found.overlap[0]:.0%} of {found.text[0][:60]!r}",
        }
        left.attrs["report"] = [*train.attrs.get("report", []), entry]
    return left
