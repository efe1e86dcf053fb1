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
    if path.suffix in {".parquet", ".png"}:  # packed pixels and pages are no text
        yield from packed(path)
        return
    yield raw
    if path.suffix == ".gz":
        yield gzip.decompress(raw)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from (archive.read(name) for name in archive.namelist())


def packed(path: Path) -> Iterator[bytes]:
    """The text in a parquet file or a picture."""
    if path.suffix == ".png":
        with Image.open(path) as image:
            yield "\n".join(f"{name}: {value}" for name, value in image.info.items()).encode()
        return
    table = pq.read_table(path)
    yield str(table.schema.metadata).encode()
    for column in table.itercolumns():
        if "string" in str(column.type) or "dictionary" in str(column.type):
            yield "\n".join(map(str, column.to_pylist())).encode()
