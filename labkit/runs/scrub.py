"""Secrets, host names and this machine's paths are taken out of what a run stored, so that it can be sent.

Paths become relative to the lab's folder ("outputs/r/...", ".cache/..."), the home directory "~": whoever gets the
run reads them as well, and here `settings.place` finds them again.
"""

from __future__ import annotations

import gzip
import html
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlsplit

import psutil

from labkit import files, settings

SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|KEY|APIKEY|CREDENTIALS?|AUTH)(?:_|$)", re.I)
# Keys as hubs and providers give them out, a password in an address, a bearer header; other people's homes.
SHAPES = (
    (rb"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16})\b", b"***"),
    (rb"(?i)(?<=\bBearer )[A-Za-z0-9._~+/=-]{16,}", b"***"),
    (rb"(?<=://)[^/\s:@\"'\\]+:[^/\s@\"'\\]+@", b""),
    (rb"(?<![\w.~-])/root(?=/)", b"~"),
    (rb"(?<=/home/)(?!user\b)[A-Za-z_][\w.-]*", b"user"),
    (rb"(?<=/Users/)(?!user\b)[A-Za-z_][\w.-]*", b"user"),
)
TEXT = {".json", ".jsonl", ".md", ".log", ".txt", ".yaml", ".yml", ".csv", ".py", ".sh", ".gz"}
PLAIN = re.compile(r"\d+|[a-z_-]{1,15}|/.*")  # a number, a word of a configuration (AUTH_MODE), a path
ESCAPE = re.compile(rb"(?:\\[nrt]|\[\d{1,2}m|-[A-Z])$")
LOOPBACK = {"localhost", "127.0.0.1", "::1", "0.0.0.0"}
TEMPORARY = "TMP"
CHUNK = 16 << 20


class Scrubber:
    """Replaces what must not leave this machine; `extra` are more needles with what stands for them."""

    def __init__(self, extra: Mapping[str, str] | None = None) -> None:
        """Collect the needles of this process's environment."""
        needles = {**paths(), **(extra or {})}
        words = {form: told for needle, told in needles.items() for form in spellings(needle)}
        self.told = {needle.encode(): told.encode() for needle, told in words.items()}
        longest = sorted(self.told, key=len, reverse=True)
        # a path ends where no further word follows: /root is none in /rooted
        self.pattern = re.compile(b"(" + b"|".join(re.escape(n) for n in longest) + rb")(/|(?![\w-]))")
        hidden = {form.encode() for value in secrets() for form in spellings(value)}
        self.hidden = sorted(hidden, key=len, reverse=True)  # the longer first: one may be part of another
        self.shapes = [(re.compile(shape), told) for shape, told in SHAPES]
        self.shapes += [(re.compile(host), told) for host, told in hosts()]

    def bytes(self, content: bytes) -> bytes:
        """The content without what must not leave."""
        for value in self.hidden:
            content = content.replace(value, b"***")
        if any(needle in content for needle in self.told):  # a search for bytes is a hundred times as fast
            content = self.pattern.sub(self.replaced, content)
        for shape, told in self.shapes:
            content = shape.sub(told, content)
        return content

    def replaced(self, match: re.Match[bytes]) -> bytes:
        """What stands for one needle; the lab's own folder is no part of a relative path."""
        needle, slash = match.groups()
        told = self.told[needle]
        if not begins(needle, match.string[max(0, match.start() - 5) : match.start()]):
            return match.group()
        return (b"" if slash else told) if told == b"." else told + slash

    def text(self, content: str) -> str:
        """The same for text."""
        return self.bytes(content.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")

    def value(self, content: Any) -> Any:
        """The same for every text in nested lists and dictionaries; pictures and keys stay as they are."""
        if isinstance(content, str):
            return self.text(content)
        if isinstance(content, dict):
            return {k: v if str(k).startswith("image/") else self.value(v) for k, v in content.items()}
        return [self.value(item) for item in content] if isinstance(content, list) else content

    def file(self, path: Path) -> bool:
        """Rewrite one file where something in it must not leave; whether it was. Binary tensors are not read."""
        if path.suffix == ".ipynb":
            return self.notebook(path)
        if path.suffix == ".parquet":
            return self.parquet(path)
        return self.stream(path) if path.suffix in TEXT else False

    def notebook(self, path: Path) -> bool:
        """An executed notebook: cells, outputs and papermill's metadata."""
        try:
            before = files.read_json(path)
        except files.BrokenFile:
            return False  # half a notebook of a killed run: what failed is told by whoever ran it
        after = self.value(before)
        if after != before:
            with files.atomic(path) as temporary:
                temporary.write_text(json.dumps(after, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return after != before

    def parquet(self, path: Path) -> bool:
        """The text columns of a frame, lists of text too."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            schema = pq.read_schema(path)
            texts = [field.name for field in schema if "string" in str(field.type)]
            before = pq.read_table(path, columns=texts).to_pydict() if texts else {}
        except (OSError, pa.ArrowException):
            return False  # half a file of an interrupted step: whoever reads it says so
        after = {name: self.value(column) for name, column in before.items()}
        changed = [name for name in texts if after[name] != before[name]]
        if changed:
            table = pq.read_table(path)
            for name in changed:
                place = schema.get_field_index(name)
                table = table.set_column(place, schema.field(name), pa.array(after[name], schema.field(name).type))
            with files.atomic(path) as temporary:
                pq.write_table(table, temporary)
        return bool(changed)

    def stream(self, path: Path) -> bool:
        """A text file, also a compressed one, some lines at a time."""
        opened: Callable[..., IO[bytes]] = gzip.open if path.suffix == ".gz" else open  # type: ignore[assignment]
        try:
            with opened(path, "rb") as file:
                if not any(self.bytes(block) != block for block in blocks(file)):
                    return False
            with files.atomic(path) as temporary, opened(path, "rb") as file, opened(temporary, "wb") as out:
                out.writelines(self.bytes(block) for block in blocks(file))
        except (gzip.BadGzipFile, EOFError):
            return False
        return True


def blocks(file: IO[bytes]) -> Iterable[bytes]:
    """Whole lines, about CHUNK bytes at once."""
    while lines := file.readlines(CHUNK):
        yield b"".join(lines)


def begins(needle: bytes, before: bytes) -> bool:
    """Whether a path begins after these bytes, rather than being the end of a longer one.

    No relative path that was made of an absolute one is cut (../../models), and /tmp is none in outputs/tmp:
    before a path of one part stands no word, but for an escape sequence or a compiler's flag.
    """
    if before.endswith((b".", b"~")):
        return False
    return needle.count(b"/") != 1 or not re.search(rb"[\w-]$", before) or bool(ESCAPE.search(before))


def secrets() -> list[str]:
    """The values of environment variables whose name says that they are secret."""
    named = [value for name, value in os.environ.items() if SECRET_NAME.search(name)]
    return [value for value in named if len(value) >= 8 and not PLAIN.fullmatch(value)]


def paths() -> dict[str, str]:
    """This machine's folders and what stands for each."""
    found = {str(Path.home()): "~", tempfile.gettempdir(): TEMPORARY, sys.prefix: ".venv"}
    named = {
        Path(__file__).parents[2]: ".",
        settings.root(): ".",
        settings.outputs(): "outputs",
        settings.cache(): ".cache",
    }
    for folder, told in named.items():
        found |= {str(folder.absolute()): told, str(folder.resolve()): told}
    found[str(Path(sys.prefix).resolve())] = ".venv"
    return {folder: told for folder, told in found.items() if folder.strip("/")}


def spellings(needle: str) -> set[str]:
    """A text as it stands in files: plain, in JSON, in HTML, in an address."""
    in_json = {json.dumps(needle)[1:-1], json.dumps(needle, ensure_ascii=False)[1:-1]}
    return {needle, html.escape(needle), quote(needle), quote(needle, safe=""), *in_json} - {""}


def hosts() -> list[tuple[bytes, bytes]]:
    """Patterns of this machine's names and addresses. A short name is only taken for one where a host stands."""
    found = []
    for name in {socket.gethostname(), socket.gethostname().partition(".")[0]} - LOOPBACK - {""}:
        telling = len(name) >= 6 and re.search(r"[\d.-]", name)
        before = b"" if telling else rb"(?:(?<=://)|(?<=@)|(?<=hostname[\"']: [\"']))"
        found.append((before + re.escape(name.encode()) + rb"(?![\w-])", b"HOST"))
    for address in addresses():
        found.append((rb"(?<![\d.:])" + re.escape(address.encode()) + rb"(?![\d.])", b"HOST"))
    return sorted(found, key=lambda pair: len(pair[0]), reverse=True)  # the full name before its first part


def addresses() -> list[str]:
    """This machine's own addresses, those of the loopback left out: engines log them."""
    every = (entry for entries in psutil.net_if_addrs().values() for entry in entries)
    known = [
        entry.address.partition("%")[0] for entry in every if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [address for address in known if address not in LOOPBACK]


def of_settings(values: Mapping[str, Any]) -> dict[str, str]:
    """What a run's own parameters tell of machines: addresses of servers, and paths outside the lab.

    `values` are the settings as a mapping. A path becomes relative to the lab's folder.
    """
    known = [folder for folder, told in paths().items() if told != TEMPORARY]  # those are found again as they are
    found = {}
    for value in (str(v) for v in values.values() if isinstance(v, str)):
        for address in re.findall(r"\bhttps?://[^\s,;]+", value):
            found |= of_address(address)
        if bare := re.fullmatch(r"([\w.-]+)(:\d+)(/.*)?", value):  # host:port, as people type a server
            found |= of_address(f"http://{value}")
            found |= {bare[1] + bare[2]: "SERVER" + bare[2]} if bare[1].lower() not in LOOPBACK else {}
        if value.startswith("/") and value.strip("/") and not any(value.startswith(f"{p}/") for p in known):
            found[value.rstrip("/")] = os.path.relpath(value, settings.root())
    return found


def of_address(address: str) -> dict[str, str]:
    """What stands for the host of one address; nothing for this machine's own loopback, or for no address."""
    try:
        host = urlsplit(address).hostname or ""
    except ValueError:
        return {}
    shown = f"[{host}]" if ":" in host else host
    return {f"://{shown}": "://SERVER", f"@{shown}": "@SERVER"} if host and host not in LOOPBACK else {}


def scrub(folder: Path, values: Mapping[str, Any] | None = None) -> list[Path]:
    """Scrub every file under `folder` and what lies beside it in the run folder; the files that were rewritten.

    `values` are the settings of the stage.
    """
    scrubber = Scrubber(of_settings(values or {}))
    beside = [path for path in folder.parent.glob("*") if path.is_file()]
    every = [path for path in [*sorted(folder.rglob("*")), *beside] if path.is_file() and not path.is_symlink()]
    changed = [path for path in every if scrubber.file(path)]
    return changed + [path for path in every if renamed(path)]


def renamed(path: Path) -> bool:
    """Take the host out of the name of TensorBoard's event files and of the profiler's traces."""
    name = socket.gethostname()
    parts = path.name.split(f".{name}.") if ".tfevents." in path.name else path.name.split(f"{name}_")
    if len(parts) < 2 or not (".tfevents." in path.name or ".pt.trace." in path.name):
        return False
    path.rename(path.with_name((".host." if ".tfevents." in path.name else "host_").join(parts)))
    return True
