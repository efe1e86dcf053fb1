"""Damage by chance, the same for the same seed: bits, bytes, stretches, and values that nobody expects."""

from __future__ import annotations

import contextlib
import random
import re
import signal
from collections.abc import Iterator

TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null|[\[\]{},:]')
ODD = (
    b"null", b"true", b"-1", b"0", b"1e999", b"-1e999", b"1E+999999", b"NaN", b"Infinity", b"1.5", b"1e15", b'""',
    b'"x"', b"[]", b"{}", b"[[]]", b'{"a":1}', b"9" * 25, b"9" * 5000, b"18446744073709551616", b"2147483648",
    b'"\\ud800"', b'"\\u0000"', b'"\xc2\xb2"', b'"\xd9\xa3"', b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"[" * 3000,
    b'{"a":' * 3000, b"\n", b"\r", b"\n\n", b",", b":", b"}", b"]", b'"', b"\\", b"#", b"data: ",
    b"event: error\n", b'"ph"', b'"prompt"', b'"messages"', b'"role"', b"_total", b"1e400", b"\xe2\x80\xa8",
)  # fmt: skip


class Mutator:
    """Inputs made from whole ones."""

    def __init__(self, whole: list[bytes], seed: int) -> None:
        """`whole`: inputs as they should be."""
        self.whole, self.random = whole, random.Random(seed)
        self.tokens = [[match.span() for match in TOKEN.finditer(text)] for text in whole]

    def draw(self) -> bytes:
        """The next one."""
        pick = self.random.randrange(len(self.whole))
        data = self.whole[pick]
        if self.random.random() < 0.5 and self.tokens[pick]:  # one value replaced: the rest stays well-formed
            start, end = self.random.choice(self.tokens[pick])
            data = data[:start] + self.random.choice(ODD) + data[end:]
            if self.random.random() < 0.6:
                return data
        for _ in range(self.random.choice((1, 1, 2, 3, 12))):
            data = self.step(data)
        return data

    def step(self, data: bytes) -> bytes:
        """One change anywhere."""
        rng = self.random
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 8, 64))
        match rng.randrange(7):
            case 0:
                return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 1 if at < len(data):
                return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            case 2:
                return data[:at] + data[at + length :]
            case 3:
                return data[:at] + data[at : at + length] * rng.choice((2, 3, 40)) + data[at + length :]
            case 4:
                return data[:at] + rng.choice(ODD) + data[at:]
            case 5:
                return data[:at] if rng.random() < 0.5 else data[at:]
        other = rng.choice(self.whole)
        start = rng.randrange(len(other) + 1)
        return data[:at] + other[start : start + 8 * length] + data[at:]

    def pieces(self, data: bytes) -> list[bytes]:
        """The input as it may come over a wire: in one, or cut anywhere."""
        cuts = sorted(self.random.randrange(len(data) + 1) for _ in range(self.random.choice((0, 1, 4))))
        return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


class Hang(BaseException):
    """An input took longer than any should."""


@contextlib.contextmanager
def ends_within(seconds: int, data: bytes) -> Iterator[None]:
    """Raise Hang, with the input, where the block does not end; far beyond what a loaded machine needs."""

    def hang(*_: object) -> None:
        raise Hang(f"over {seconds} s with {data[:2000]!r}")

    before = signal.signal(signal.SIGALRM, hang)
    theirs = signal.setitimer(signal.ITIMER_REAL, seconds)  # pytest-timeout's
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *theirs)
