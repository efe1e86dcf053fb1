"""What SmolLM2 is asked for mini-kimi's corpus: the lab's forms, simple tales, and prompts that it makes up."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator

from labkit import files, settings

# Of each ten prompts: how many come from the lab's templates, are tales or plain questions, are SmolLM2's own.
SHARES = {"templated": 3, "tale": 3, "plain": 1, "own": 3}
SHORTEST_OWN, LONGEST_OWN = 12, 300  # characters of a prompt that SmolLM2 made up
RUN = 13  # words in a row that no text may share with an evaluation prompt
BEGINNING = 3  # words that are looked up first: most places end there
SHORTEST_RUN = 5  # a whole prompt of fewer words ("And why?") says nothing


def pools() -> dict[str, list[str]]:
    """Words and phrasings: data/pretrain/forms.json, and the topics of data/train_prompts."""
    folder = settings.root() / "data"
    topics = files.read_json(folder / "train_prompts" / "topics.json")
    own = files.read_json(folder / "pretrain" / "forms.json")
    return own | {"concept": topics["concepts"], "hero": topics["heroes"]}


def templated() -> list[str]:
    """Every prompt of data/train_prompts."""
    from labkit.conversations import sources

    return [messages[0]["content"] for messages in sources.templated()["messages"]]


def stream(own: Iterable[str], seed: int) -> Iterator[tuple[str, str]]:
    """(kind, prompt) without end, mixed by SHARES; `own` are SmolLM2's prompts, gone through again and again."""
    order, words = random.Random(seed), pools()
    made = {"templated": cycle(templated(), order), "own": cycle(list(own), order)}
    kinds = [kind for kind, share in SHARES.items() for _ in range(share)]
    while True:
        kind = order.choice(kinds)
        if kind in made:
            yield kind, next(made[kind])
        else:
            form = order.choice(words["tales" if kind == "tale" else "plain"])
            yield kind, form.format(**{name: order.choice(words[name]) for name in placeholders(form)})


def placeholders(form: str) -> list[str]:
    """The names in braces."""
    return re.findall(r"{(\w+)}", form)


def cycle(values: list[str], order: random.Random) -> Iterator[str]:
    """The values in a new random order each time round."""
    while True:
        order.shuffle(values)
        yield from values


def usable(prompt: str) -> bool:
    """Whether a prompt that SmolLM2 made up is worth an answer: of fair length, mostly plain letters."""
    if not SHORTEST_OWN <= len(prompt) <= LONGEST_OWN or "<|" in prompt:
        return False
    return sum(c.isascii() and (c.isalpha() or c == " ") for c in prompt) >= 0.8 * len(prompt)


class Evaluation:
    """The evaluation prompts (data/prompts), to keep their text out of the corpus."""

    def __init__(self, contents: Iterable[str] | None = None) -> None:
        """Read them; `contents` stands for the user messages in tests."""
        given = user_messages() if contents is None else contents
        self.runs = {run for content in given for run in runs_of(content)}
        self.lengths = {len(run) for run in self.runs}
        self.beginnings = {run[:BEGINNING] for run in self.runs}

    def leaks_into(self, text: str) -> bool:
        """Whether `text` holds RUN words in a row of an evaluation prompt, or the whole of a shorter one."""
        words = normalised(text)
        return any(
            tuple(words[i : i + BEGINNING]) in self.beginnings
            and any(tuple(words[i : i + length]) in self.runs for length in self.lengths)
            for i in range(len(words))
        )


def user_messages() -> list[str]:
    """What the evaluation prompts' users say."""
    lines = [
        line
        for file in sorted((settings.root() / "data" / "prompts").glob("*.jsonl"))
        for line in file.read_text().splitlines()
        if line.strip()
    ]
    messages = [message for line in lines for message in json.loads(line)["messages"]]
    return [message["content"] for message in messages if message["role"] == "user"]


def normalised(text: str) -> list[str]:
    """Lower-case words without punctuation."""
    return re.findall(r"[^\W_]+", text.lower())


def runs_of(content: str) -> Iterator[tuple[str, ...]]:
    """Every RUN words in a row; all of them where there are fewer."""
    words = normalised(content)
    if len(words) >= SHORTEST_RUN:
        yield from (tuple(words[start : start + RUN]) for start in range(max(1, len(words) - RUN + 1)))
