"""systemd unit files: read as systemd reads them, and a second unit made from the first with other flags.

What is not changed stays as it was typed: specifiers (%h), variables (${PORT}), quotes, comments and order. The
rules are those of systemd.syntax(7) and systemd.service(5), as of version 252.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from labkit.engine.service import flags
from labkit.engine.service.words import Word, quoted, split
from labkit.errors import LabError

# A variant must not start again behind the lab's back, nor take the machine or an alert with it when it fails.
DROPPED = ("Restart", "OnFailure", "OnSuccess", "FailureAction", "SuccessAction", "StartLimitAction", "PIDFile")
COMMAND_PREFIXES = "-@:+!"
SHELLS = ("sh", "bash", "dash", "zsh")


class UnitUnreadable(LabError):
    """A unit file from which no second unit can be made."""


@dataclass(frozen=True)
class Line:
    """One logical line: physical lines `first` to `last` (inclusive) of the text, continuation lines joined."""

    first: int
    last: int
    section: str
    key: str
    value: str


def lines_of(text: str) -> list[Line]:
    """The assignments of a unit file, in order; a backslash at a line's end goes on, over comments in between."""
    found: list[Line] = []
    section, physical, index = "", text.splitlines(), 0
    while index < len(physical):
        first, joined = index, physical[index].strip()
        index += 1
        if not joined or joined[0] in "#;":
            continue
        while joined.endswith("\\") and index < len(physical):
            following = physical[index].strip()
            index += 1
            if following[:1] not in ("#", ";"):
                joined = f"{joined[:-1].rstrip()} {following}"
        joined = joined.removesuffix("\\")
        if joined.startswith("["):
            section = joined.strip("[]")
        elif "=" in joined:
            key, _, value = joined.partition("=")
            found.append(Line(first, index - 1, section, key.strip(), value.strip()))
    return found


def effective(lines: list[Line], section: str, key: str) -> list[Line]:
    """The assignments of a list setting that count: an empty one takes back those before it."""
    kept: list[Line] = []
    for line in lines:
        if (line.section, line.key) == (section, key):
            kept = [*kept, line] if line.value else []
    return kept


def setting(lines: list[Line], section: str, key: str) -> str:
    """A single setting's value: the last one counts."""
    kept = effective(lines, section, key)
    return kept[-1].value if kept else ""


def environment(text: str) -> dict[str, str]:
    """Variables of Environment= lines, then of readable EnvironmentFile= ones, which override as in systemd."""
    lines, found = lines_of(text), {}
    for line in effective(lines, "Service", "Environment"):
        found |= dict(word.value.partition("=")[::2] for word in split(line.value) if "=" in word.value)
    for line in effective(lines, "Service", "EnvironmentFile"):
        path = Path(line.value.removeprefix("-"))
        if path.is_file():
            found |= environment_file(path)
    return found


def environment_file(path: Path) -> dict[str, str]:
    """name: value of an EnvironmentFile; quotes around a value are dropped. Empty where we may not read it."""
    try:
        rows = [row.strip() for row in path.read_text().splitlines()]
    except OSError:
        return {}
    pairs = (row.partition("=") for row in rows if "=" in row and row[0] not in "#;")
    return {name.strip(): "".join(word.value for word in split(value)) for name, _, value in pairs}


@dataclass(frozen=True)
class Command:
    """A unit's ExecStart: its line, its words as typed, and where vLLM's arguments lie among them.

    `script` is the index of the word that holds a shell's script (`bash -c '...'`), -1 without one.
    """

    line: Line
    words: list[Word]
    script: int = -1

    def vllm(self) -> list[Word]:
        """vLLM's command: the words, or those of the script from where it names vLLM."""
        if self.script < 0:
            return self.words
        text = self.words[self.script].value
        return split(text[start_of_vllm(text) :], shell=True)


def command(text: str) -> Command:
    """The unit's one ExecStart; raises UnitUnreadable where there is none, several, or none that runs vLLM."""
    starts = effective(lines_of(text), "Service", "ExecStart")
    if len(starts) != 1:
        raise UnitUnreadable(f"the unit has {len(starts)} ExecStart commands", "it has to have exactly one")
    words = split(starts[0].value)
    if not words:
        raise UnitUnreadable("the unit's ExecStart is empty", "give it the command that starts vLLM")
    shell = Path(words[0].value.lstrip(COMMAND_PREFIXES)).name in SHELLS
    options = [i for i, word in enumerate(words[:-1]) if re.fullmatch(r"-\w*c", word.value)] if shell else []
    script = options[0] + 1 if options else -1
    searched = words[script].value if script >= 0 else " ".join(word.value for word in words)
    if start_of_vllm(searched) < 0:
        raise UnitUnreadable(
            f"no vLLM command is to be seen in ExecStart={starts[0].value}",
            "put `vllm serve ...` itself into the unit (a script hides its flags), or start both servers yourself",
        )
    return Command(starts[0], words, script)


def start_of_vllm(text: str) -> int:
    """Where the command that runs vLLM begins in a command line or shell script, -1 where none does.

    `vllm serve`, vLLM's module, or its container image; a virtual environment called vllm does not count.
    """
    found = re.search(r"\S*vllm\s+serve\b|\S*vllm\.entrypoints\.\S+|\S*vllm/vllm-\S+|\S*api_server\S*", text)
    return found.start() if found else -1


def expanded(value: str, variables: dict[str, str]) -> str:
    """A word with ${NAME} and $NAME replaced by the unit's own variables; unknown ones stay as they are."""

    def known(match: re.Match[str]) -> str:
        return variables.get(match.group(1) or match.group(2), match.group(0))

    return re.sub(r"\$\{(\w+)\}|\$(\w+)", known, value).replace("%%", "%")


def arguments(text: str) -> dict[str, str]:
    """vLLM's flags of a unit (name without dashes: value, "" for a bare one), variables expanded."""
    variables = environment(text)
    return {
        flag.name: expanded(flag.value or "", variables)
        for flag in flags.read([word.value for word in command(text).vllm()])
    }


def with_flags(text: str, changes: dict[str, object], dropped: tuple[str, ...] = ()) -> str:
    """The unit with vLLM's flags in ExecStart replaced or added, the flags `dropped` left out."""
    found = command(text)
    if found.script < 0:
        words = flags.edit(found.words, changes, dropped, quote=quoted)
    else:
        script = found.words[found.script].value
        at = start_of_vllm(script)
        tail = flags.edit(split(script[at:], shell=True), changes, dropped, quote=in_shell)
        if any(word.raw in ("|", ";", "&&", "||", "&", ">", ">>", "2>&1") for word in tail):
            raise UnitUnreadable(
                f"vLLM's command in the script of ExecStart is followed by another one: {script}",
                "let the script end with vLLM's own command",
            )
        inner = script[:at] + " ".join(word.raw for word in tail)
        words = [*found.words]
        words[found.script] = Word(quoted(inner, literal=False), inner)
    physical = text.splitlines()
    physical[found.line.first : found.line.last + 1] = [f"ExecStart={joined(words, found.line)}"]
    return "\n".join(physical) + "\n"


def joined(words: list[Word], line: Line) -> str:
    """The words as a line; a flag a line where the original had several."""
    text = words[0].raw
    for word in words[1:]:
        text += f" \\\n    {word.raw}" if line.last > line.first and word.raw.startswith("-") else f" {word.raw}"
    return text


def in_shell(value: str) -> str:
    """A word for a shell's script inside a unit: quoted for the shell, % and $ doubled for systemd."""
    return shlex.quote(value).replace("%", "%%").replace("$", "$$")


def second(text: str, name: str, variant: str, environment_: dict[str, str]) -> str:
    """A unit beside `name` made of its text: what would start it by itself is left out, the rest is kept.

    It conflicts with the original, so that systemd itself never runs both; `environment_` comes last and counts.
    """
    dropped = {
        index
        for line in lines_of(text)
        if line.key in DROPPED or line.section == "Install"
        for index in range(line.first, line.last + 1)
    }
    kept = [
        line
        for index, line in enumerate(text.splitlines())
        if index not in dropped and line.strip() != "[Install]"
    ]
    while kept and not kept[-1].strip():
        kept.pop()
    added = ["", "# what the lab adds", "[Unit]", f"Description={name}, variant {variant}"]
    added += [f"Conflicts={name}", f"After={name}", "[Service]", "Restart=no"]
    added += [f"Environment={quoted(f'{key}={value}')}" for key, value in environment_.items()]
    return "\n".join([*kept, *added]) + "\n"


def instantiated(text: str, instance: str) -> str:
    """A template's text for one instance: %i and %I stand for it, as the second unit has another name."""
    return re.sub(r"(?<!%)((?:%%)*)%[iI]", lambda match: match.group(1) + instance, text)
