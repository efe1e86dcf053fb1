"""Where a head lies: the one that this run trained, a shipped one by name, a directory, or a hub id."""

from __future__ import annotations

from pathlib import Path

from labkit import settings
from labkit.errors import LabError


class NoHead(LabError):
    """There is no head to serve."""


def shipped() -> dict[str, Path]:
    """name: directory of the heads that come with the lab."""
    return {
        path.parent.name: path.parent
        for path in sorted((settings.root() / "data" / "heads").glob("*/config.json"))
    }


def locate(head: str, run_folder: Path) -> Path:
    """The directory of `head`; an empty one stands for the head that notebook 04 trained in `run_folder`.

    Raises NoHead saying what there is.
    """
    trained = run_folder / "04_eagle3_pipeline" / "head"
    known = shipped()
    if not head:
        if (trained / "config.json").exists():
            return trained
        raise NoHead(
            f"no head was given and {trained} does not exist",
            "run notebook 04 with the same run_id first (`labkit run 04 --run-id ...`), or give `head`: "
            + ", ".join([*known, "a head directory", "a hub id"]),
        )
    if head in known:
        return known[head]
    if Path(head).is_dir():
        return Path(head).resolve()
    if head.count("/") == 1 and not head.startswith((".", "/", "~")):
        return from_hub(head)
    raise NoHead(f"head {head!r} is no directory", f"shipped heads: {', '.join(known) or 'none'}")


def from_hub(name: str) -> Path:
    """Download a head from the hub; raises NoHead when that fails."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # the hub client raises many kinds
        reason = " ".join(str(error).split())[:200]
        raise NoHead(f"head {name!r} could not be fetched ({reason})", "give a local head directory") from error
