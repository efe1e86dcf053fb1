"""Prompts of many kinds from a small grammar: forms over words, numbers and sentences, as many as are wanted.

What the templated prompts lack for a head that is to serve strangers: texts to shorten, sentences to translate,
records to extract, sums, and dialogues of several turns. The words are in data/train_prompts/wide.json.
"""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pandas as pd

from labkit import files, settings
from labkit.conversations import sources
from labkit.errors import LabError

PLACE = re.compile(r"\{(?:(\d+)-(\d+)|(\w+))\}")
SYSTEM_SHARE = 0.3  # of the dialogues have a system message
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
