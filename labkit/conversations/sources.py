"""Prompts to train on: our own templates over topics or anybody's data set; split by topic."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit import files, settings
from labkit.conversations import raw
from labkit.conversations.forms import BadRow, Messages, Report, conversation
from labkit.conversations.raw import BadPromptFile
from labkit.errors import LabError

COLUMNS = ["prompt_id", "category", "topic", "messages", "tools"]


class TooFewPrompts(LabError):
    """There are fewer distinct prompts than asked for."""


def prompts(source: str, most: int = 0, seed: int = 0) -> pd.DataFrame:
    """The lab's own prompts for "templated" and "wide" (`most` of them), else those of `read`."""
    if source == "wide":
        from labkit.conversations import wide

        return wide.prompts(most, seed)
    return templated() if source == "templated" else read(source, most, seed)


def templated() -> pd.DataFrame:
    """Every prompt of data/train_prompts: each form's phrasings over each topic of its pool.

    Columns prompt_id, category (the form), topic, messages (a list of one user message), tools (empty).
    """
    folder = settings.root() / "data" / "train_prompts"
    pools, forms = files.read_json(folder / "topics.json"), files.read_json(folder / "forms.json")
    rows = [
        row(form["name"], topic, [{"role": "user", "content": phrasing.format(topic=topic)}])
        for form in forms
        for phrasing, topic in itertools.product(form["phrasings"], pools[form["pool"]])
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def row(
    category: str, topic: str, messages: Messages, tools: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """One prompt. Its id is a digest of all but the answers: the same questions always have the same id.

    `tools` is kept as JSON text, because schemas of several rows do not fit into one parquet type.
    """
    asked = [message for message in messages if message["role"] != "assistant"]
    identity = [asked, tools] if tools else asked
    text = json.dumps(tools, ensure_ascii=False) if tools else ""
    found = {"prompt_id": files.digest(identity), "category": category, "topic": topic}
    return found | {"messages": messages, "tools": text}


def read(source: str | Path, most: int = 0, seed: int = 0) -> pd.DataFrame:
    """Conversations of a preset, a hub id, a directory or a .jsonl, .json or .parquet file; columns COLUMNS.

    A row is text, or has `prompt` (with or without an answer), `messages` or ShareGPT's `conversations`; answers
    are kept. Rows that cannot be used are left out and counted (`report`); the topic is the first question.
    Raises BadPromptFile when no row can be used, DatasetUnreachable.
    """
    chosen, report = raw.source(str(source)), Report()
    found: dict[str, dict[str, Any]] = {}
    for number, value in enumerate(raw.rows(chosen, most, seed), start=1):
        where = f"row {number}"
        try:
            prompt = understood(value, chosen.columns)
        except BadRow as error:
            report.add(error.kind, f"{where}: {error.what}")
            continue
        if prompt["prompt_id"] in found:
            report.add("duplicate", where)
        found.setdefault(prompt["prompt_id"], prompt)
    if not found:
        raise BadPromptFile(
            f"{source} holds no prompts; the commonest reason: {report.commonest()}",
            'give a conversation a row: {"prompt": "..."}, {"messages": [...]} or {"conversations": [...]}',
        )
    frame = pd.DataFrame(list(found.values()), columns=COLUMNS)
    frame.attrs["report"] = report.rows
    return frame


def understood(value: Any, columns: dict[str, str]) -> dict[str, Any]:
    """A prompt from one raw row; raises BadRow."""
    if isinstance(value, raw.Broken):
        raise BadRow("no JSON", value[:60])
    known = conversation(value, columns)
    question = next(turn["content"] for turn in known.messages if turn["role"] == "user")
    return row(known.category or "file", files.digest(question), known.messages, known.tools)


def report(frame: pd.DataFrame) -> pd.DataFrame:
    """What was left out of a frame of this module, or is worth knowing of it: kind kept rows first."""
    return pd.DataFrame(frame.attrs.get("report", []), columns=["kind", "kept", "rows", "first"])


def split(prompts: pd.DataFrame, num_train: int, num_held_out: int, seed: int) -> pd.DataFrame:
    """`num_train` prompts for training and `num_held_out` others, by seed, with a column `split`.

    Categories take turns, so that each has about the same share; no topic is in both parts. With the same seed
    and `num_held_out`, a smaller training part is a prefix of a larger one. Raises TooFewPrompts.
    """
    shuffled = prompts.iloc[np.random.default_rng(seed).permutation(len(prompts))].reset_index(drop=True)
    turn = shuffled.groupby("category").cumcount()
    ordered = shuffled.iloc[np.lexsort((shuffled.category, turn))].reset_index(drop=True)
    held_out = ordered.drop_duplicates("topic").head(num_held_out)
    train = ordered[~ordered.topic.isin(held_out.topic)].head(num_train)
    if len(held_out) < num_held_out or len(train) < num_train:
        raise TooFewPrompts(
            f"{len(train)} prompts for training and {len(held_out)} held out, of {len(prompts)} distinct ones; "
            f"asked for {num_train} and {num_held_out}",
            "lower num_prompts or held_out, or give a larger file by `prompts`",
        )
    return pd.concat([train.assign(split="train"), held_out.assign(split="held_out")], ignore_index=True)
