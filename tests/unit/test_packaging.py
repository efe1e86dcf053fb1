"""pyproject.toml, requirements and environment.yml say the same; nothing names a registry or a machine's paths."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
NINE = {
    "jupyterlab",
    "torch",
    "vllm",
    "speculators",
    "datasets",
    "transformers",
    "matplotlib",
    "ipywidgets",
    "papermill",
}


def names_and_pins(lines: list[str]) -> dict[str, str]:
    """package: version ("" where unpinned), of requirement lines."""
    found = {}
    for line in lines:
        line = line.split("#")[0].strip()
        if line:
            name, _, version = line.partition("==")
            found[name.lower().replace("_", "-")] = version
    return found


def requirements(name: str) -> dict[str, str]:
    return names_and_pins((ROOT / "requirements" / name).read_text().splitlines())


def environment_pip() -> dict[str, str]:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    return names_and_pins([line for line in pip if not line.startswith("-e")])


@pytest.mark.parametrize("stack", ["cpu", "gpu"])
def test_every_dependency_is_pinned(stack):
    pinned = requirements(f"{stack}.txt")
    assert all(pinned.values())
    wanted = names_and_pins(PROJECT["dependencies"] + PROJECT["optional-dependencies"][stack])
    for name, version in wanted.items():
        assert name in pinned, f"{name} of pyproject.toml is not in {stack}.txt"
        assert not version or pinned[name].split("+")[0] == version


@pytest.mark.parametrize("stack", ["cpu", "gpu"])
def test_in_file_names_what_pyproject_names(stack):
    extras = PROJECT["optional-dependencies"][stack] + (
        PROJECT["optional-dependencies"]["dev"] if stack == "cpu" else []
    )
    assert set(names_and_pins(PROJECT["dependencies"] + extras)) <= set(requirements(f"{stack}.in"))
    assert set(requirements(f"{stack}.in")) <= set(requirements(f"{stack}.txt"))


def test_environment_is_the_gpu_stack():
    pip = environment_pip()
    assert set(pip) >= NINE
    pinned = requirements("gpu.txt")
    assert {name: version for name, version in pip.items() if version} == {
        name: pinned[name] for name, version in pip.items() if version
    }
    text = (ROOT / "environment.yml").read_text()
    assert "-e .." not in text
    assert re.search(r"-e \.(\[gpu\])?$", text, re.M)


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listing.splitlines() if (ROOT / name).is_file()]


def test_no_registry_hosts_and_no_paths_of_this_machine():
    hosts = re.compile("pypi" + r"\.org|files\.pythonhosted" + r"|registry\.npmjs" + r"|deb\.debian" + r"\.org")
    places = re.compile(r"(?<![\w.])/(?:work|root|opt|home)/\w")
    for path in tracked():
        if path.suffix in {".safetensors", ".parquet", ".png", ".gz"}:
            continue
        text = path.read_text(errors="replace")
        assert not hosts.search(text), path
        assert not places.search(text), (path, places.search(text))


def test_tracked_files_stay_under_44_mb():
    assert sum(path.stat().st_size for path in tracked()) < 44e6


def test_make_test_runs_every_folder_of_tests():
    """Once each; tests/gpu is for another machine."""
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} - {"gpu"}
    said = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    run = [
        name for line in said.splitlines() if "-m pytest" in line for name in re.findall(r" tests/(\w+)\b", line)
    ]
    assert sorted(run) == sorted(folders)
    assert {f"tests/{name}" for name in folders} == set(PYPROJECT["tool"]["pytest"]["ini_options"]["testpaths"])
