"""vLLM's command-line flags in somebody else's command: found in each form that vLLM takes, replaced, added."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.engine.service.words import Word

SHORT = {"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size"}
SHORT |= {"-q": "quantization", "-sc": "speculative-config", "-cc": "compilation-config"}
# All that turns speculation on, in this vLLM and in older ones: a variant brings its own, or none.
SPECULATION = ("speculative-config", "speculative-model", "num-speculative-tokens", "ngram-prompt-lookup-max")
SPECULATION += ("ngram-prompt-lookup-min", "speculative-draft-tensor-parallel-size")


@dataclass(frozen=True)
class Flag:
    """A flag among words `first` to `last` (inclusive); `value` None for a bare one; `name` without dashes."""

    name: str
    value: str | None
    first: int
    last: int


def read(words: list[str]) -> list[Flag]:
    """The flags of a command line. vLLM takes --a-b V, --a_b V, --a-b=V, short names, and --a.b V for JSON."""
    return list(found(words))


def found(words: list[str]) -> Iterator[Flag]:
    """One flag after the other."""
    index = 0
    while index < len(words):
        word, first = words[index], index
        index += 1
        head, equals, value = word.partition("=")
        if not (head.startswith("--") and len(head) > 2) and head not in SHORT:
            continue
        name = SHORT.get(head) or head[2:].replace("_", "-").partition(".")[0]
        if equals:
            yield Flag(name, value, first, first)
        elif index < len(words) and not re.match(r"-+[A-Za-z]", words[index]):
            yield Flag(name, words[index], first, index)
            index += 1
        else:
            yield Flag(name, None, first, first)


def edit(
    words: list[Word], changes: Mapping[str, Any], dropped: tuple[str, ...], *, quote: Callable[[str], str]
) -> list[Word]:
    """The words with flags changed: a new value replaces all old ones in the first one's place, or comes last.

    `changes`: name: value as in variants.Flags (True bare, None removed). A bare flag takes the place of its
    opposite (--x, --no-x). JSON objects are merged into what is there, speculation apart, which is replaced.
    """
    present = read([word.value for word in words])
    places: dict[int, list[Word]] = {}
    gone: set[int] = set()
    last: list[Word] = []
    for flag in present:
        if flag.name in dropped and flag.name not in changes:
            gone |= span(flag, None)
    for name, value in changes.items():
        names = {name, opposite(name)} if value is True or value is None else {name}
        old = [flag for flag in present if flag.name in names]
        new = [] if value is None else written(name, merged(name, old, value), quote)
        for flag in old:
            gone |= span(flag, value)
        if old:
            places[old[0].first] = new
        else:
            last += new
    kept = [each for i, word in enumerate(words) for each in (*places.get(i, []), *([] if i in gone else [word]))]
    return [*kept, *last]


def span(flag: Flag, new: Any) -> set[int]:
    """The places of a flag's words; a bare flag's next word is no value of it, but a positional one."""
    return {flag.first} if new is True else set(range(flag.first, flag.last + 1))


def opposite(name: str) -> str:
    """The flag that says the contrary of a bare one."""
    return name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"


def merged(name: str, old: list[Flag], value: Any) -> Any:
    """The value with what the command already sets of the same JSON object."""
    if not isinstance(value, dict) or name in SPECULATION or len(old) != 1:
        return value
    try:
        before = json.loads(old[0].value or "")
    except json.JSONDecodeError:
        return value
    return deep(before, value) if isinstance(before, dict) else value


def deep(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Both objects in one; where both have a value, the later one counts."""
    nested = {
        key: deep(before[key], value)
        for key, value in after.items()
        if isinstance(value, dict) and isinstance(before.get(key), dict)
    }
    return before | after | nested


def written(name: str, value: Any, quote: Callable[[str], str]) -> list[Word]:
    """A flag's words."""
    words = [Word(f"--{name}", f"--{name}")]
    if value is not True:
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        words.append(Word(quote(text), text))
    return words
