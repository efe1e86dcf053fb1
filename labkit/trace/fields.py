"""Values of a trace's events and of its header, as exactly as the file gives them."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

import numpy as np

# torch < 1.13 called categories otherwise
OLD = {"operator": "cpu_op", "runtime": "cuda_runtime", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
NUMBERS = {key: re.compile(rb'"' + key.encode() + rb'":\s*"?(\d+)') for key in ("correlation", "External id")}
LARGEST = 1 << 61  # ns: the year 2043
IMPOSSIBLE = -(1 << 62)
WIDEST = 64  # characters of a number: one longer one would make the table of all as wide


def nanoseconds(texts: tuple[bytes, ...]) -> np.ndarray:
    """Decimal microseconds as integer nanoseconds, exactly; Kineto's three decimals all at once, others singly."""
    table = np.array([text if len(text) <= WIDEST else b"" for text in texts], dtype=np.bytes_)
    chars = table.view(np.uint8).reshape(len(table), -1)
    length = (chars != 0).sum(1)
    found = np.zeros(len(table), np.int64)
    for size in np.unique(length):
        rows = np.flatnonzero(length == size)
        mine = chars[rows, :size]
        digits = np.delete(mine, -4, axis=1).astype(np.int64) - 48 if 5 <= size <= 20 else np.full((1, 1), -1)
        if digits.min() < 0 or digits.max() > 9 or (mine[:, -4] != ord(".")).any():
            found[rows] = [one_nanoseconds(text) for text in table[rows].tolist()]
        else:
            found[rows] = digits @ 10 ** np.arange(size - 2, -1, -1, dtype=np.int64)
    return found


def one_nanoseconds(text: bytes) -> int:
    """One decimal number of microseconds as nanoseconds; IMPOSSIBLE for what is no number or too large."""
    try:
        value = Decimal(text.decode())
        if not value.is_finite() or value.adjusted() > 18:  # whose digits could take hours to write out
            return IMPOSSIBLE
        found = int((value * 1000).to_integral_value())
    except (ArithmeticError, ValueError):
        return IMPOSSIBLE
    return found if abs(found) < LARGEST else IMPOSSIBLE


def numbers(args: tuple[Any, ...], rows: np.ndarray, key: str) -> np.ndarray:
    """A whole number among the arguments of the given rows; -1 where there is none."""
    found = np.full(len(args), -1, np.int64)
    index = np.flatnonzero(rows)
    texts = [args[i] for i in index]
    if not any(isinstance(text, dict) or text is None for text in texts):
        every = NUMBERS[key].findall(b"\n".join(texts))
        if len(every) == len(texts) and max(map(len, every), default=0) < 19:
            found[index] = [int(text) for text in every]
            return found
    found[index] = [number(text, key) for text in texts]
    return found


def number(args: Any, key: str) -> int:
    """A whole number among one event's arguments; -1 where there is none."""
    if isinstance(args, dict):
        value = str(args.get(key, ""))
        return int(value) if value.isdecimal() and len(value) < 19 else -1
    match = NUMBERS[key].search(args or b"")
    return int(match[1]) if match and len(match[1]) < 19 else -1


def with_key(args: tuple[Any, ...], rows: np.ndarray, key: bytes) -> list[int]:
    """Which of the given rows have a key among their arguments."""
    index = [int(i) for i in np.flatnonzero(rows) if args[i]]
    return [i for i in index if (key.decode() in args[i] if isinstance(args[i], dict) else key in args[i])]


def as_object(args: Any) -> dict[str, Any]:
    """An event's arguments as a mapping; empty when they cannot be read."""
    if isinstance(args, dict):
        return args
    try:
        return json.loads(b"{" + args + b"}", strict=False)
    except (ValueError, RecursionError):
        return {}


def plain_text(escaped: bytes) -> str:
    """The content of a JSON string; halves of characters, which nothing can print or store, as question marks."""
    text = escaped.decode("utf-8", errors="replace")
    if "\\" not in text:
        return text
    try:
        return json.loads(f'"{text}"', strict=False).encode(errors="replace").decode()
    except json.JSONDecodeError:
        return text


def category(cat: bytes) -> str:
    """A category under its present name."""
    text = cat.decode(errors="replace").lower()
    return OLD.get(text, text)


def metadata(text: bytes) -> dict[str, Any]:
    """What the lab uses of a trace's own description: rank, world size, time base, versions; sound values only."""
    found: dict[str, Any] = {}
    content = text.decode("utf-8", errors="replace")
    for key in ("distributedInfo", "baseTimeNanoseconds", "deviceProperties", "vllm_version"):
        match = re.search(rf'"{key}"\s*:\s*', content)
        if match:
            try:
                found[key] = json.JSONDecoder(strict=False).raw_decode(content, match.end())[0]
            except (ValueError, RecursionError):
                continue
    if not whole(found.get("baseTimeNanoseconds", 0), LARGEST):
        del found["baseTimeNanoseconds"]
    if "distributedInfo" in found:
        group = found["distributedInfo"]
        found["distributedInfo"] = {k: v for k, v in group.items() if small(v)} if isinstance(group, dict) else {}
    return found


def whole(value: Any, limit: int) -> bool:
    """Whether this is a whole number from 0 to below `limit`."""
    return type(value) is int and 0 <= value < limit


def small(value: Any) -> bool:
    """Whether this is text, or a number that ranks can have."""
    return isinstance(value, str) or whole(value, 1 << 20)


def as_row(event: dict[str, Any]) -> tuple[Any, ...]:
    """A decoded event in the form that EVENT gives: JSON's own bytes, so that both ways find the same names."""
    args = event.get("args")
    cat, name = (
        json.dumps(str(event.get(key, "")), ensure_ascii=False)[1:-1].encode(errors="replace")
        for key in ("cat", "name")
    )
    lane = f'{json.dumps(event.get("pid", ""))}, "tid": {json.dumps(event.get("tid", ""))}'.encode()
    times = (str(event.get(key, 0)).encode(errors="replace") for key in ("ts", "dur"))
    return (cat, name, lane, *times, args if isinstance(args, dict) else None)
