"""Parameters in YAML files: one for a notebook, or a folder with one for each; papermill's -f reads them, too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from labkit.runs.execute import find_notebook
from labkit.settings import NOTEBOOKS, BadParameter


def read(path: Path, notebook: str) -> dict[str, Any]:
    """The parameters for `notebook` ("02", a name, or "all", whose names get the notebook's number before a dot).

    A folder holds a file a notebook, named by number or name ("04.yaml", "04_eagle3_pipeline.yaml"). Raises
    BadParameter for what is missing or unreadable, and for a name that its notebook does not have.
    """
    if not path.exists():
        raise BadParameter(f"there is no file or folder {path}", "see data/params/ for what ships")
    if notebook == "all":
        if not path.is_dir():
            raise BadParameter(f"{path} is one file", "for all notebooks give a folder with one file for each")
        refuse_strangers(path)
        found = {name: of_file(file_in(path, name), name) for name in NOTEBOOKS if file_in(path, name)}
        return {f"{name[:2]}.{key}": value for name, values in found.items() for key, value in values.items()}
    name = find_notebook(notebook)
    if path.is_dir():
        refuse_strangers(path)
    return of_file(file_in(path, name) if path.is_dir() else path, name)


def refuse_strangers(folder: Path) -> None:
    """Raise BadParameter for a YAML file that belongs to no notebook, or where there is none at all."""
    files = sorted(folder.glob("*.y*ml"))
    strange = [file.name for file in files if not any(file.stem in (name, name[:2]) for name in NOTEBOOKS)]
    if strange or not files:
        raise BadParameter(
            f"{folder} has {', '.join(strange)}, for no notebook" if strange else f"{folder} has no YAML file",
            f"name a file by its notebook's number or name: {', '.join(f'{name[:2]}.yaml' for name in NOTEBOOKS)}",
        )


def file_in(folder: Path, name: str) -> Path | None:
    """The folder's file for a notebook, None where it has none."""
    files = sorted(file for file in folder.glob("*.y*ml") if file.stem in (name, name[:2]))
    return files[0] if files else None


def of_file(path: Path | None, name: str) -> dict[str, Any]:
    """The parameters of one file, each one of that notebook's."""
    if path is None:
        return {}
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise BadParameter(f"{path} cannot be read as YAML ({error})", "write name: value, a line each") from error
    if not isinstance(values, dict):
        raise BadParameter(f"{path} holds no names with values", "write name: value, a line each")
    for key in values:
        if key not in NOTEBOOKS[name].parameters():
            known = ", ".join(NOTEBOOKS[name].parameters())
            raise BadParameter(f"{path}: {name} has no parameter {key!r}", f"its parameters: {known}")
    return values


def merged(files: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Both; what was given on the command line counts, a plain name in every notebook that a file has it for."""
    kept = {name: value for name, value in files.items() if name.rpartition(".")[2] not in given}
    return kept | dict(given)
