"""Training prompts: our own templates over topics, or a file; split into training and held-out by topic."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit import files, settings
from labkit.errors import LabError

COLUMNS = ["prompt_id", "category", "topic", "messages"]
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


class BadPromptFile(LabError):
    """A prompt file is missing, empty, unreadable, or has a row without a prompt."""


class TooFewPrompts(LabError):
    """There are fewer distinct prompts than asked for."""


def prompts(source: str) -> pd.DataFrame:
    """The lab's own prompts for "templated", else those of a file (`read`)."""
    return templated() if source == "templated" else read(source)


def templated() -> pd.DataFrame:
    """Every prompt of data/train_prompts: each form's phrasings over each topic of its pool.

    Columns prompt_id, category (the form), topic, messages (a list of one user message).
    """
    folder = settings.root() / "data" / "train_prompts"
    pools, forms = files.read_json(folder / "topics.json"), files.read_json(folder / "forms.json")
    rows = [
        row(form["name"], topic, [{"role": "user", "content": phrasing.format(topic=topic)}])
        for form in forms
        for phrasing, topic in itertools.product(form["phrasings"], pools[form["pool"]])
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def row(category: str, topic: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    """One prompt; its id is a digest of the messages, so the same prompt always has the same id."""
    return {"prompt_id": files.digest(messages), "category": category, "topic": topic, "messages": messages}


def read(path: str | Path) -> pd.DataFrame:
    """Prompts of a .jsonl, .json (a list) or .parquet file, one a row, duplicates dropped.

    A row is a string, or has `prompt` (a string), `messages` (role, content) or `conversations` (from, value);
    answers at the end of a conversation are dropped, because the target answers itself. `category` is kept.
    Raises BadPromptFile naming the file and the row.
    """
    path = Path(path)
    values = raw_rows(path)
    rows = [row_of(value, f"{path}, row {number}") for number, value in enumerate(values, start=1)]
    if not rows:
        raise BadPromptFile(f"{path} holds no prompts", 'give one prompt a line: {"prompt": "..."}')
    return pd.DataFrame(rows, columns=COLUMNS).drop_duplicates("prompt_id", ignore_index=True)


def raw_rows(path: Path) -> list[Any]:
    """What the file holds, a value a row, not yet understood."""
    remedy = "give a .jsonl, .json or .parquet file with a prompt a row, or prompts=templated"
    if not path.is_file():
        raise BadPromptFile(f"there is no prompt file {path}", remedy)
    try:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        if path.suffix == ".json":
            value = json.loads(path.read_text())
            return value if isinstance(value, list) else [value]
        if path.suffix == ".parquet":
            return pd.read_parquet(path).to_dict("records")
    except (OSError, ValueError) as error:
        raise BadPromptFile(f"{path} cannot be read: {error}", remedy) from error
    raise BadPromptFile(f"{path} has the unknown ending {path.suffix!r}", remedy)


def row_of(value: Any, where: str) -> dict[str, Any]:
    """A prompt from one value of a file; raises BadPromptFile with `where` when it holds none."""
    fields = {"prompt": value} if isinstance(value, str) else value if isinstance(value, dict) else {}
    turns = next((list(fields[k]) for k in ("messages", "conversations") if fields.get(k) is not None), None)
    if turns is None:
        turns = [{"role": "user", "content": fields.get("prompt")}]
    messages = [message_of(turn) for turn in turns]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] != "user" or not all(message["content"] for message in messages):
        raise BadPromptFile(
            f"{where} has no prompt: {str(value)[:80]}", "give it `prompt` or `messages` with text"
        )
    return row(str(fields.get("category") or "file"), files.digest(messages), messages)


def message_of(turn: Any) -> dict[str, str]:
    """A message as the chat API takes it; unknown roles and non-text content become empty, which is refused."""
    turn = turn if isinstance(turn, dict) else {}
    role = ROLES.get(str(turn.get("role", turn.get("from"))), "")
    content = turn.get("content", turn.get("value"))
    return {"role": role, "content": content if role and isinstance(content, str) else ""}


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
