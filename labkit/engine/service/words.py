"""Words of a command line as systemd (or a shell) splits it, each kept as it was typed beside what it means."""

from __future__ import annotations

from dataclasses import dataclass

ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "s": " ", "\\": "\\", '"': '"', "'": "'"}


@dataclass(frozen=True)
class Word:
    """A word: `raw` as typed, `value` without its quotes; specifiers and variables are not touched."""

    raw: str
    value: str


def split(text: str, *, shell: bool = False) -> list[Word]:
    """The words of a line. systemd knows \\n, \\t, \\s outside and inside of both quotes; a shell (`shell`) takes
    backslashes literally, but for the next character outside of quotes and for \\" and \\\\ in double ones.
    """
    words: list[Word] = []
    raw, value, quote, started, index = "", "", "", False, 0
    while index < len(text):
        char = text[index]
        index += 1
        if not quote and char.isspace():
            if started:
                words.append(Word(raw, value))
            raw, value, started = "", "", False
            continue
        raw, started = raw + char, True
        if char == "\\" and index < len(text) and not (shell and quote == "'"):
            following = text[index]
            index += 1
            raw += following
            value += escaped(following, quote, shell)
        elif char == quote:
            quote = ""
        elif not quote and char in "\"'":
            quote = char
        else:
            value += char
    return [*words, Word(raw, value)] if started else words


def escaped(char: str, quote: str, shell: bool) -> str:
    """What a backslash and `char` stand for."""
    if shell:
        return char if not quote or char in '"\\$`' else f"\\{char}"
    return ESCAPES.get(char, f"\\{char}")


def quoted(value: str, *, literal: bool = True) -> str:
    """A word as a unit file has it; with `literal`, % and $ mean themselves (doubled), else systemd expands."""
    if literal:
        value = value.replace("%", "%%").replace("$", "$$")
    if value and not any(char.isspace() or char in "\"'\\;" for char in value):
        return value
    if "'" not in value and "\\" not in value and "\n" not in value:
        return f"'{value}'"
    for plain, written in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t")):
        value = value.replace(plain, written)
    return f'"{value}"'
