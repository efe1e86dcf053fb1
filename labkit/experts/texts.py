"""Real text that is on every machine: the benchmark's prompts, Python's source and manual, licences."""

from __future__ import annotations

import importlib.metadata
import json
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from labkit import settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHORTEST, LONGEST = 400, 4000  # characters of a file or topic: more than a window, at most about a context
SHORTEST_CUT = 32  # tokens: still several windows


@dataclass(frozen=True)
class Document:
    """The tokens of a text and what kind of text it is."""

    category: str
    tokens: Sequence[int]


def documents(tokenizer: PreTrainedTokenizerBase, num_tokens: int, seed: int = 0) -> list[Document]:
    """Documents of num_tokens tokens in all, an equal share of each category until its texts are used up.

    A document is cut so short that at least four of each category fit; fewer tokens when all text is used up.
    """
    readers, longest = texts(seed), max(SHORTEST_CUT, num_tokens // (4 * len(SOURCES)))
    given, found = dict.fromkeys(readers, 0), []
    while given and (left := num_tokens - sum(len(document.tokens) for document in found)) > 0:
        category = min(given, key=given.__getitem__)
        text = next(readers[category], None)
        if text is None:
            del given[category]
            continue
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"][: min(left, longest)]
        given[category] += len(tokens)
        if tokens:
            found.append(Document(category, tokens))
    return found


def texts(seed: int = 0) -> dict[str, Iterator[str]]:
    """The texts of each category in an order drawn from seed."""
    order = random.Random(seed)
    return {category: shuffled(source(), order) for category, source in SOURCES.items()}


def shuffled(sources: list[Path | str], order: random.Random) -> Iterator[str]:
    """The texts in random order; files are read only when their turn comes, unreadable ones left out."""
    order.shuffle(sources)
    for source in sources:
        text = source.read_text(errors="ignore") if isinstance(source, Path) else source
        if len(text) >= SHORTEST or isinstance(source, str):
            yield text[:LONGEST]


def prompts() -> list[Path | str]:
    """The messages of the benchmark's prompts, one text a conversation."""
    lines = [
        line
        for file in sorted((settings.root() / "data" / "prompts").glob("*.jsonl"))
        for line in file.read_text().splitlines()
        if line.strip()
    ]
    return ["\n\n".join(message["content"] for message in json.loads(line)["messages"]) for line in lines]


def python_source() -> list[Path | str]:
    """The standard library's modules."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def python_manual() -> list[Path | str]:
    """The topics of Python's manual that come with pydoc."""
    from pydoc_data import topics

    return [text for _name, text in sorted(topics.topics.items()) if len(text) >= SHORTEST]


def licences() -> list[Path | str]:
    """The licence texts of the installed packages, each text once."""
    found = {
        file.locate().read_text(errors="ignore")
        for package in importlib.metadata.distributions()
        for file in package.files or []
        if file.name.upper().startswith("LICENSE") and Path(str(file.locate())).is_file()
    }
    return sorted(text for text in found if len(text) >= SHORTEST)


SOURCES: dict[str, Callable[[], list[Path | str]]] = {
    "prompts": prompts,
    "Python source": python_source,
    "Python manual": python_manual,
    "licences": licences,
}
