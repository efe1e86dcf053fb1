"""Prompts of many kinds from a small grammar: forms over words, numbers and sentences, as many as are wanted.

What the templated prompts lack for a head that is to serve strangers: texts to shorten, sentences to translate,
records to extract, sums, and dialogues of several turns. The words are in data/train_prompts/wide.json.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from labkit import files, settings
from labkit.conversations import sources
from labkit.errors import LabError

PLACE = re.compile(r"\{(?:(\d+)-(\d+)|(\w+))\}")
SYSTEM_SHARE = 0.3  # of the dialogues have a system message
TEXT, HOLE = "{text}", "\0"  # in a form about a text, which comes in last: it may have braces of its own
OPEN = "..."  # stands where the target is to say what comes: an empty turn would be refused as a mistake
TRIES = 20  # draws for each prompt wanted, at most


class UnknownWord(LabError):
    """A form of the grammar names words that nothing lists."""


def prompts(count: int, seed: int = 0) -> pd.DataFrame:
    """`count` different prompts, kinds in turn, columns as `sources.read` has them; a prefix of a longer one.

    The answers of a dialogue's earlier turns are open: the target says them itself. Raises UnknownWord,
    TooFewPrompts.
    """
    grammar = files.read_json(settings.root() / "data" / "train_prompts" / "wide.json")
    topics = files.read_json(settings.root() / "data" / "train_prompts" / "topics.json")
    words, order = topics | grammar["pools"], random.Random(seed)
    kinds = [*grammar["kinds"], "dialogue"]
    rows: dict[str, dict[str, Any]] = {}
    for number in itertools.count():
        if len(rows) == count:
            return pd.DataFrame(list(rows.values()), columns=sources.COLUMNS)
        if number == TRIES * count:
            raise sources.TooFewPrompts(
                f"the grammar gave {len(rows)} different prompts, asked for {count}", "lower num_prompts"
            )
        kind = kinds[number % len(kinds)]
        if kind == "dialogue":
            messages = dialogue(order.choice(grammar["dialogue"]), words, order)
        else:
            messages = [{"role": "user", "content": filled(order.choice(grammar["kinds"][kind]), words, order)}]
        row = sources.row(kind, "", messages)
        rows.setdefault(row["prompt_id"], row | {"topic": row["prompt_id"]})


def about(texts: Sequence[str], count: int, seed: int = 0) -> pd.DataFrame:
    """`count` different prompts to shorten, explain, question or go on with one of `texts`; columns as `prompts`.

    A text takes all its prompts to one side of a split. Raises UnknownWord, TooFewPrompts.
    """
    grammar = files.read_json(settings.root() / "data" / "train_prompts" / "wide.json")
    words, order = grammar["pools"], random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(TRIES * count if texts else 0):
        if len(rows) == count:
            break
        kind, text = order.choice(list(grammar["texts"])), order.choice(texts)
        form = order.choice(grammar["texts"][kind]).replace(TEXT, HOLE)
        content = filled(form, words, order).replace(HOLE, text.strip())
        row = sources.row(kind, "", [{"role": "user", "content": content}])
        rows.setdefault(row["prompt_id"], row | {"topic": files.digest(text)})
    if len(rows) < count:
        raise sources.TooFewPrompts(
            f"{len(texts)} texts gave {len(rows)} different prompts, asked for {count}",
            "ask for fewer, or give more texts",
        )
    return pd.DataFrame(list(rows.values()), columns=sources.COLUMNS)


def dialogue(turns: list[str], words: dict[str, list[str]], order: random.Random) -> list[dict[str, str]]:
    """A conversation whose user's turns are the forms of `turns`, perhaps after a system message."""
    system = [{"role": "system", "content": filled("{system}", words, order)}]
    messages = system if order.random() < SYSTEM_SHARE else []
    for number, form in enumerate(turns):
        messages += [{"role": "assistant", "content": OPEN}] if number else []
        messages += [{"role": "user", "content": filled(form, words, order)}]
    return messages


def filled(form: str, words: dict[str, list[str]], order: random.Random) -> str:
    """A form with every {word} and {low-high} drawn, those in what was drawn too."""

    def drawn(found: re.Match[str]) -> str:
        low, high, name = found.groups()
        if name is None:
            return str(order.randint(int(low), int(high)))
        if name not in words:
            raise UnknownWord(f"{{{name}}} in {form!r} is not among the words", "add it to wide.json")
        return filled(order.choice(words[name]), words, order)

    return PLACE.sub(drawn, form)
