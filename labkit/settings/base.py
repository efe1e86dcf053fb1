"""What the settings of every notebook have: scales, checks, where a run's results go."""

from __future__ import annotations

import ast
import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from labkit.errors import LabError

SCALES = ("smoke", "demo", "full")
SMALLEST = {"seed": 0, "temperature": 0, "max_model_len": 16}  # wherever a notebook has them


class BadParameter(LabError):
    """A notebook parameter is unknown, of the wrong type, or out of range."""


def root() -> Path:
    """The lab's folder: LABKIT_ROOT, else the checkout that labkit is imported from, else where we are."""
    if "LABKIT_ROOT" in os.environ:
        return Path(os.environ["LABKIT_ROOT"])
    checkout = Path(__file__).resolve().parents[2]
    return checkout if (checkout / "notebooks").is_dir() else Path.cwd()


def outputs() -> Path:
    """Where run folders are made: LABKIT_OUTPUTS, else outputs/ in the lab's folder."""
    return Path(os.environ.get("LABKIT_OUTPUTS", root() / "outputs")).absolute()


def cache() -> Path:
    """Where built targets are kept: LABKIT_CACHE, else .cache/ in the lab's folder."""
    return Path(os.environ.get("LABKIT_CACHE", root() / ".cache")).absolute()


def place(text: str) -> Path:
    """Where a stored path lies here: those under outputs/, .cache/ and the lab's folder are stored relative."""
    first, _, rest = text.partition("/")
    base = {"outputs": outputs(), ".cache": cache()}.get(first)
    return base / rest if base else Path(os.path.normpath(root() / Path(text).expanduser()))


def here(value: str) -> str:
    """A parameter that was stored, as it is to be given here: a stored path is absolute again, a name stays."""
    return str(place(value)) if value.startswith(("~/", "../", "outputs/", ".cache/")) else value


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every notebook has. Fields left at 0 or "" take the value of the scale."""

    notebook: ClassVar[str] = ""
    by_scale: ClassVar[dict[str, tuple[int, int, int]]] = {}  # field: its value at smoke, demo, full
    at_least: ClassVar[dict[str, float]] = {}  # field: its smallest value

    target: str = "smollm2"
    scale: str = "demo"
    run_id: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        """Check types and ranges, then fill in what the scale decides."""
        for field in dataclasses.fields(self):
            value = coerce(field.name, field.type, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        if self.scale not in SCALES:
            raise BadParameter(f"scale={self.scale!r} is no scale", f"use one of {', '.join(SCALES)}")
        for name, values in self.by_scale.items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, values[SCALES.index(self.scale)])
        for name in self.parameters():
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise BadParameter(f"{name}={value} is no finite number", f"give {name} a number")
        for name, smallest in (SMALLEST | self.at_least).items():
            if not hasattr(self, name):
                continue
            if getattr(self, name) < smallest:
                raise BadParameter(f"{name}={getattr(self, name)} is below {smallest}", f"raise {name}")
        if not self.target.strip():
            raise BadParameter("target is empty", "name a shipped target, a model directory or a hub id")
        if not self.run_id:
            object.__setattr__(self, "run_id", f"{Path(self.target).name}-{self.scale}")
        if Path(self.run_id).name != self.run_id or not self.run_id.strip() or self.run_id in (".", ".."):
            raise BadParameter(f"run_id={self.run_id!r} is no plain folder name", "leave out slashes")

    @property
    def folder(self) -> Path:
        """Where this notebook's results of this run go."""
        return outputs() / self.run_id / self.notebook

    @classmethod
    def parameters(cls) -> dict[str, dataclasses.Field]:
        """Its parameters by name."""
        return {field.name: field for field in dataclasses.fields(cls)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Make settings from given values only; raises BadParameter for an unknown name."""
        for name in values:
            if name not in cls.parameters():
                known = ", ".join(cls.parameters())
                raise BadParameter(f"{cls.notebook} has no parameter {name!r}", f"its parameters: {known}")
        return cls(**values)

    @classmethod
    def from_notebook(cls, namespace: Mapping[str, Any]) -> Self:
        """Make settings from a notebook's `globals()`: call it right after the parameters cell.

        papermill only warns of a parameter that a notebook does not have, so the cell that papermill
        injected is looked up in the input history and each name it assigns has to be known.
        """
        names = set(cls.parameters())
        for source in namespace.get("In", []):
            if source.startswith("# Parameters\n"):
                names |= assigned_names(source)
        return cls.of({name: namespace[name] for name in names if name in namespace})


def assigned_names(source: str) -> set[str]:
    """The names that a cell of plain assignments assigns."""
    statements = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    return {target.id for node in statements for target in node.targets if isinstance(target, ast.Name)}


def coerce(name: str, kind: Any, value: Any) -> Any:
    """`value` as the field's type where nothing is lost (text from a command line, 1 for 1.0).

    Raises BadParameter naming the parameter, the value and the type that it has to have.
    """
    kind = {"int": int, "float": float, "str": str, "bool": bool}.get(kind, kind)
    flags = {"true": True, "false": False}
    if kind is bool and isinstance(value, str) and value.lower() in flags:
        return flags[value.lower()]
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)  # papermill reads `-p run_id 7` as a number
    plain = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    if plain:
        return value
    if kind in (int, float) and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return kind(value)
        except ValueError:
            pass
    raise BadParameter(f"parameter {name}={value!r} is no {kind.__name__}", f"give {name} as {kind.__name__}")
