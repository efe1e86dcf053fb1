"""The bytes of a trace file in blocks, unpacked on the way."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from labkit.trace.errors import NotATrace

BLOCK = 8 << 20
PIECE = 64 << 10  # compressed bytes at a time
BOMB, RATIO = 256 << 20, 250  # unpacked bytes from which so many a packed one are no profile: those have 10 to 50


class Blocks:
    """Iterates over the bytes of a file, plain or gzipped; a cut or corrupt gzip yields what it still holds.

    Afterwards `fault` says what was wrong, and `corrupt` that bytes before the fault may be wrong too: what a
    damaged stream unpacks to is garbage from the damage on, and noticed only later.
    """

    def __init__(self, path: Path) -> None:
        """Open nothing yet."""
        self.path = path
        self.fault = ""
        self.corrupt = False

    def __iter__(self) -> Iterator[bytes]:
        """The blocks; each at least BLOCK long but for the last."""
        with self.path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            parts: list[bytes] = []
            size = 0
            for part in self.inflated(file) if packed else iter(lambda: file.read(BLOCK), b""):
                parts.append(part)
                size += len(part)
                if size >= BLOCK:
                    yield b"".join(parts)
                    parts, size = [], 0
            yield b"".join(parts)

    def inflated(self, file: BinaryIO) -> Iterator[bytes]:
        """Decompress gzip members piece by piece; where the stream is damaged, byte by byte up to the damage."""
        inflate, pending, unpacked = zlib.decompressobj(31), b"", 0
        while piece := pending or file.read(PIECE):
            before = inflate.copy()
            try:
                part = inflate.decompress(piece, BLOCK)
                self.refuse_bomb(unpacked := unpacked + len(part), file.tell())
                yield part
            except zlib.error as error:
                yield from up_to_damage(before, piece)
                self.fault, self.corrupt = f"the gzip data are damaged ({error})", True
                return
            pending = inflate.unconsumed_tail
            if inflate.eof and (pending := inflate.unused_data or file.read(PIECE)):  # members may be concatenated
                inflate = zlib.decompressobj(31)
        yield inflate.flush()
        if not inflate.eof:
            self.fault = "the gzip file is cut off"

    def refuse_bomb(self, unpacked: int, packed: int) -> None:
        """Raise NotATrace for a file that unpacks to what no profile packs so small: it would fill the memory."""
        if unpacked > max(BOMB, RATIO * packed):
            raise NotATrace(
                f"{self.path} unpacks to over {unpacked / 1e6:.0f} MB from {packed / 1e6:.1f} MB: no profile does",
                "ask whoever sent it; a trace that really is like this can be given unpacked",
            )


def up_to_damage(inflate: Any, piece: bytes) -> Iterator[bytes]:
    """What a piece holds before the byte at which decompression fails."""
    for i in range(len(piece)):
        try:
            yield inflate.decompress(piece[i : i + 1])
        except zlib.error:
            return
