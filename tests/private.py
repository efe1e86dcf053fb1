"""Every byte of a folder searched for what must not leave a machine; knows nothing of labkit.runs.scrub."""

import gzip
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
from PIL import Image

# An absolute path of somebody's own: not part of a relative one, and not the stand-in that the lab writes.
ABSOLUTE = re.compile(rb"(?<![\w.~-])/(?:root|work|tmp|mnt|home/(?!user\b)|Users/(?!user\b))/?[\w.]")


def leaks(folder: Path, needles: Iterable[str]) -> list[str]:
    """What of `needles`, and which absolute paths, stand in the files under `folder` or their names."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        for content in contents(path):
            found += [f"{name}: {needle!r}" for needle in needles if needle.encode() in content]
            if match := ABSOLUTE.search(content):
                found.append(f"{name}: {content[max(0, match.start() - 40) : match.end() + 40]!r}")
        found += [f"{name}: its name has {needle!r}" for needle in needles if needle in name]
    return found


def contents(path: Path) -> Iterator[bytes]:
    """The file's bytes, and what is packed in them."""
    raw = path.read_bytes()
    if path.suffix in {".ipynb", ".html"}:  # in a picture any few letters are found
        raw = re.sub(rb"(?<=base64,)[A-Za-z0-9+/=\s]+|(?<=\"image/png\": \")[A-Za-z0-9+/=\\]+", b"", raw)
    unpack = {".parquet": table, ".png": picture, ".gz": gzipped, ".safetensors": tensors}
    # Packed bytes, pixels and numbers are no text: any few letters are found in them sooner or later.
    if path.suffix in unpack:
        yield from unpack[path.suffix](path)
    elif zipfile.is_zipfile(path):
        yield from archived(path)
    else:
        yield raw


def gzipped(path: Path) -> Iterator[bytes]:
    """What is packed, and the name in the header (RFC 1952: a flag in byte 3, the name from byte 10 on)."""
    raw = path.read_bytes()
    yield gzip.decompress(raw)
    if raw[3] & 8:
        yield raw[10 : raw.index(b"\0", 10)]


def archived(path: Path) -> Iterator[bytes]:
    """The members, but for the numbers in a file of torch (its data/0, data/1, ...), and their names."""
    with zipfile.ZipFile(path) as archive:
        yield "\n".join(archive.namelist()).encode() + archive.comment
        yield from (archive.read(name) for name in archive.namelist() if not re.search(r"/data/\d+$", name))


def tensors(path: Path) -> Iterator[bytes]:
    """The header: names, shapes and metadata (its length is the first eight bytes)."""
    raw = path.read_bytes()
    yield raw[8 : 8 + int.from_bytes(raw[:8], "little")]


def picture(path: Path) -> Iterator[bytes]:
    """What is written beside the pixels."""
    with Image.open(path) as image:
        yield "\n".join(f"{name}: {value}" for name, value in image.info.items()).encode()


def table(path: Path) -> Iterator[bytes]:
    """The schema's metadata, and columns of text."""
    rows = pq.read_table(path)
    yield str(rows.schema.metadata).encode()
    for column in rows.itercolumns():
        if "string" in str(column.type) or "dictionary" in str(column.type):
            yield "\n".join(map(str, column.to_pylist())).encode()
