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


def shipped_for(target: str) -> Path | None:
    """The shipped head of a target, called <target>-eagle3; None where there is none."""
    return shipped().get(f"{target}-eagle3")


def locate(head: str, run_folder: Path | None = None, target: str = "") -> Path:
    """The directory of `head`: a shipped name, a directory, or a hub id (fetched, or from the hub's local cache).

    An empty one stands for the head that notebook 04 trained in `run_folder`, and without that for the shipped
    head of `target`. Raises NoHead saying what there is.
    """
    known = shipped()
    if not head:
        return trained(run_folder) or shipped_for(target) or none_at_all(run_folder, target)
    if head in known:
        return known[head]
    if Path(head).expanduser().is_dir():
        return Path(head).expanduser().resolve()
    if head.count("/") == 1 and not head.startswith((".", "/", "~")):
        return from_hub(head)
    raise NoHead(
        f"head {head!r} is no directory and no shipped head",
        f"give a directory, a hub id (owner/name), or a shipped head: {', '.join(known) or 'there is none'}",
    )


def trained(run_folder: Path | None) -> Path | None:
    """The head that notebook 04 made in a run; None where it did not."""
    found = run_folder / "04_eagle3_pipeline" / "head" if run_folder else None
    return found if found and (found / "config.json").exists() else None


def none_at_all(run_folder: Path | None, target: str) -> Path:
    """Raise NoHead: none was given, none trained, and none comes with the lab for this target."""
    place = f", {run_folder / '04_eagle3_pipeline' / 'head'} does not exist" if run_folder else ""
    raise NoHead(
        f"no head was given{place}, and the lab ships none for {target or 'this target'}",
        "run notebook 04 with the same run_id first (`labkit run 04 --run-id ...`), or give `head`: "
        + ", ".join([*shipped(), "a head directory", "a hub id"]),
    )


def origin(head: str, path: Path) -> str:
    """Where a located head comes from, in words; `head` is what was asked for."""
    if path in shipped().values():
        name = next(name for name, folder in shipped().items() if folder == path)
        why = "" if head else ", since no head was given and notebook 04 left none in this run"
        return f"the shipped head {name}{why}"
    if not head:
        return "the head that notebook 04 trained in this run"
    return f"the directory {head}" if Path(head).expanduser().is_dir() else f"{head}, from the hub"


def from_hub(name: str) -> Path:
    """A head from the hub, or from its local cache; raises NoHead when that fails or it has no safetensors."""
    from huggingface_hub import snapshot_download

    try:
        found = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # the hub client raises many kinds
        reason = " ".join(str(error).split())[:200]
        raise NoHead(
            f"head {name!r} is no directory here and could not be fetched from the hub ({reason})",
            "is the id right and the hub within reach? else give a local head directory",
        ) from error
    if not (found / "config.json").exists() or not list(found.glob("*.safetensors")):
        raise NoHead(
            f"{name} on the hub has no config.json with safetensors beside it",
            "give a head that has (the lab loads no pickled weights)",
        )
    return found
