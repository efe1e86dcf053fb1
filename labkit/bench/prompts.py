"""Benchmark prompts: the lab's own in data/prompts, a file of one's own, or plain strings and messages."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import pandas as pd

from labkit import files, settings
from labkit.errors import LabError

COLUMNS = ["prompt_id", "category", "messages", "source"]
MANIFEST = "manifest.json"  # of data/prompts: version, licence, and of each file its digest and count
BLANKED = re.compile(r"placeholder|to be (filled|fetched|downloaded)|should be fetched from", re.IGNORECASE)
ROLES = ("system", "user", "assistant", "tool", "developer")
Messages = list[dict[str, Any]]


class BadPrompts(LabError):
    """A prompt file is missing, empty or malformed, or a prompt has no text."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: messages for chat, or a string or token ids for plain completions."""

    id: str
    category: str
    content: Messages | str | list[int]
    source: str = ""


def prompts(source: str | Path = "benchmark", per_category: int | None = None, seed: int = 0) -> pd.DataFrame:
    """Prompts, a row each: prompt_id, category, messages, source (the file, with its version or digest).

    `source` is "benchmark" (all of data/prompts), a category of it, a .jsonl file or a folder of such files.
    With `per_category` that many of each category in a seeded random order, all of them where it is 0: a larger
    number keeps the smaller selection. Raises BadPrompts naming file and line.
    """
    rows = [row for path in prompt_files(source) for row in read(path)]
    refuse_placeholders(rows, source)
    refuse_doubled(rows, source)
    chosen = []
    for category in dict.fromkeys(row["category"] for row in rows):
        members = [row for row in rows if row["category"] == category]
        random.Random(f"{seed} {category}").shuffle(members)
        chosen += sorted(members[: per_category or None], key=lambda row: row["prompt_id"])
    return pd.DataFrame(chosen, columns=COLUMNS)


def selection(source: str | Path, chosen: pd.DataFrame) -> str:
    """How many of the prompts of `source` were chosen, in Markdown: all, or how many of how many by category."""
    there = prompts(source)["category"].value_counts(sort=False)
    if len(chosen) == there.sum():
        return f"All {len(chosen)} prompts are sent."
    sent = chosen["category"].value_counts()
    told = ", ".join(f"{name} {sent.get(name, 0)} of {count}" for name, count in there.items())
    return f"**{len(chosen)} of {there.sum()} prompts** are sent ({told}); `prompts_per_category` says how many."


def refuse_doubled(rows: list[dict[str, Any]], source: str | Path) -> None:
    """Raise BadPrompts for an id that two prompts of a folder's files share: variants are paired by it."""
    counts = Counter(row["prompt_id"] for row in rows)
    doubled = [name for name, count in counts.items() if count > 1]
    if doubled:
        raise BadPrompts(
            f"{source}: {len(doubled)} ids belong to more than one prompt, the first is {doubled[0]!r}",
            "give every prompt of all files an id of its own",
        )


def prompt_files(source: str | Path) -> list[Path]:
    """The files that a name or path stands for; raises BadPrompts when there is none."""
    own = settings.root() / "data" / "prompts"
    path = own if str(source) == "benchmark" else Path(source).expanduser()
    if not path.exists() and (own / f"{source}.jsonl").exists():
        path = own / f"{source}.jsonl"
    found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not path.exists() or not found:
        known = ", ".join(sorted(file.stem for file in own.glob("*.jsonl")))
        named = path.suffix or len(path.parts) > 1  # else it may be a misspelt category
        what = f"there is no file {path}" if named else f"there are no prompts {str(source)!r}"
        raise BadPrompts(
            f"{path} holds no .jsonl file" if path.is_dir() else what,
            f"use benchmark, a category ({known}), a .jsonl file or a folder of them",
        )
    return found


def origin(path: Path) -> str:
    """Which text a file holds: "benchmark VERSION" for one of the lab's own as published, else name and digest."""
    manifest = settings.root() / "data" / "prompts" / MANIFEST
    if path.resolve().parent == manifest.resolve().parent and manifest.exists():
        published = files.read_json(manifest)
        known = published["files"].get(path.name, {}).get("sha256", "")
        if known.startswith(files.digest_file(path)):
            return f"{published['name']} {published['version']}"
    return f"{path.name} {files.digest_file(path)}"


def read(path: Path) -> list[dict[str, Any]]:
    """The prompts of one .jsonl file, {"id", "category", "messages"} a line; blank lines are skipped."""
    try:
        # A byte-order mark is what Windows adds; splitlines would also cut at characters that JSON may contain.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadPrompts(f"{path} cannot be read: {error}", "give a UTF-8 text file") from error
    rows = [row_of(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise BadPrompts(
            f"{path} holds no prompts",
            'write one a line: {"id": "a-1", "category": "a", "messages": [{"role": "user", "content": "..."}]}',
        )
    seen: dict[str, int] = {}
    for number, row in enumerate(rows, start=1):
        if row["prompt_id"] in seen:
            where = f"prompts {seen[row['prompt_id']]} and {number}"
            raise BadPrompts(
                f"{path}: {where} have the same id {row['prompt_id']!r}",
                "results are paired by id, so give each prompt its own",
            )
        seen[row["prompt_id"]] = number
    source = origin(path)
    return [row | {"source": source} for row in rows]


def row_of(line: str, path: Path, number: int) -> dict[str, Any]:
    """One line of a prompt file; raises BadPrompts naming file and line."""
    where = f"{path}, line {number}"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadPrompts(f"{where} is no JSON: {error}", "write one JSON object a line") from error
    missing = [key for key in ("id", "category", "messages") if not isinstance(value, dict) or key not in value]
    if missing:
        raise BadPrompts(f"{where} lacks {', '.join(missing)}", "each line needs id, category and messages")
    check_messages(value["messages"], where)
    return {"prompt_id": str(value["id"]), "category": str(value["category"]), "messages": value["messages"]}


def check_messages(messages: Any, where: str) -> None:
    """Raise BadPrompts unless these are chat messages with a known role and text."""
    if not isinstance(messages, list) or not messages:
        raise BadPrompts(f"{where}: messages is {messages!r}", "give a list of role and content")
    for message in messages:
        role, content = (message.get(key) if isinstance(message, dict) else None for key in ("role", "content"))
        if role not in ROLES or not content or not isinstance(content, (str, list)):
            raise BadPrompts(
                f"{where}: message {message!r} has no known role or no content",
                f"each message needs a role ({', '.join(ROLES)}) and content that is not empty",
            )


def refuse_placeholders(rows: list[dict[str, Any]], source: str | Path) -> None:
    """Raise BadPrompts where a category's texts are mostly one, or say so: data sets come with texts blanked out.

    Numbers are not told apart: a placeholder that carries its row's number is one.
    """
    for category in dict.fromkeys(row["category"] for row in rows):
        texts = [json.dumps(row["messages"]) for row in rows if row["category"] == category]
        different = {re.sub(r"[0-9]+", "0", text) for text in texts}
        blanked = sum(bool(BLANKED.search(text)) for text in texts)
        if (len(texts) > 2 and len(different) <= len(texts) // 2) or blanked > len(texts) // 2:
            raise BadPrompts(
                f"{source}: {len(texts)} prompts of category {category!r}, but {len(different)} different texts, "
                f"{blanked} of which speak of placeholders",
                "these look like placeholders; fetch the data set's own texts first",
            )


def as_prompts(values: pd.DataFrame | Iterable[Any]) -> list[Prompt]:
    """Prompts from rows (a frame or dicts), message lists, strings or token ids, each with an id of its own.

    Raises BadPrompts where there are none, or two have one id.
    """
    if isinstance(values, pd.DataFrame):
        values = values.to_dict("records")
    found = [
        as_prompt(value, number) for number, value in enumerate([values] if isinstance(values, str) else values)
    ]
    if not found:
        raise BadPrompts("there are no prompts to send", "give at least one")
    doubled = [name for name, count in Counter(prompt.id for prompt in found).items() if count > 1]
    if doubled:
        raise BadPrompts(
            f"{len(doubled)} ids belong to more than one prompt, the first is {doubled[0]!r}",
            "results are paired by id, so give each prompt its own; repeats=... sends one several times",
        )
    return found


def as_prompt(value: Any, number: int) -> Prompt:
    """One prompt: a string or messages for chat, `prompt` of a row or token ids for plain completions."""
    if isinstance(value, Prompt):
        return value
    name, category, source = f"prompt-{number:03d}", "", ""
    if isinstance(value, dict):
        source = value["source"] if isinstance(value.get("source"), str) else ""  # NaN after a concat
        name, category = str(value.get("prompt_id", value.get("id", name))), str(value.get("category", ""))
        if "messages" not in value:
            return Prompt(name, category, plain_prompt(value.get("prompt"), name), source)
        value = value["messages"]
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    value = list(value) if isinstance(value, Iterable) else []
    if value and all(isinstance(token, Integral) for token in value):
        return Prompt(name, category, plain_prompt(value, name))
    check_messages(value, f"prompt {name}")
    return Prompt(name, category, [dict(message) for message in value], source)


def plain_prompt(value: Any, name: str) -> str | list[int]:
    """Text or token ids of a plain completion; raises BadPrompts when there are none."""
    if not isinstance(value, Sized) or len(value) == 0:
        raise BadPrompts(f"prompt {name} is empty", "give messages, or a prompt of text or token ids")
    return value if isinstance(value, str) else [int(token) for token in value]
