"""Checks a documented command: run where that is cheap, else read by the code that would run it.

A command that none of these knows is an error. Example places (`/models/own`, `http://gpu:8000`) stand for real
ones in a folder of the test's (`World`).
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from labkit import cli, settings
from labkit.engine.urls import base_url
from labkit.runs.execute import find_notebook
from tests.docs.pages import ROOT

PARSED_ONLY = {"swap", "extract", "convert-head", "average-heads"}  # they want a service, an engine or heads
EXAMPLE_PLACES = ("/models/own", "/models/moe", "/heads/mine", "/data/", "/traces/mine")
JSON_FLAGS = {
    "speculative-config": "speculative",
    "kv-transfer-config": "kv_transfer",
    "profiler-config": "profiler",
}


class Unchecked(AssertionError):
    """A documented command that does not do what it says, or that nobody knows how to check."""


@dataclass(frozen=True)
class World:
    """Where the example places of the documentation really are, and a server's address."""

    folder: Path
    url: str

    def real(self, word: str) -> str:
        """A word with its example places replaced."""
        for place in EXAMPLE_PLACES:
            word = re.sub(
                rf"(^|[=@]){re.escape(place)}", lambda found, p=place: f"{found[1]}{self.folder}{p}", word
            )
        return word


def check(words: list[str], world: World) -> None:
    """Raise Unchecked, LabError or click's own error unless the command would work."""
    program = Path(words[0]).name
    known: dict[str, Callable[[list[str], World], None]] = {
        "make": make,
        "labkit": labkit,
        "papermill": papermill,
        "pip": pip,
        "conda": conda,
        "accelerate": accelerate,
        "torchrun": torchrun,
        "python": python,
        "vllm": vllm,
        "curl": curl,
        "export": export,
    }
    if program not in known:
        raise Unchecked(f"no check for {program!r}: add one to tests/docs/checking.py")
    if "/" in words[0] and program != "python" and not (Path(sys.executable).parent / program).exists():
        raise Unchecked(f"{program} is not installed in .venv")
    known[program]([world.real(word) for word in words[1:]], world)


def make(words: list[str], world: World) -> None:
    """The target exists: make says what it would run."""
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unchecked(done.stderr)


def labkit(words: list[str], world: World) -> None:
    """Run where it is cheap; `run` as its own dry run; what wants an engine is parsed by its own command line."""
    name, rest = words[0], words[1:]
    if "--" in rest:
        check([word.replace("{url}", "http://127.0.0.1:8000") for word in rest[rest.index("--") + 1 :]], world)
    if not rest and name in (*PARSED_ONLY, "run"):  # a span that only names it
        invoke([name, "--help"])
        return
    if name in PARSED_ONLY or (name == "doctor" and rest):
        parse(cli.app, name, rest)
        return
    if name == "run":
        run(rest)
        return
    if "--out" in rest:
        rest[rest.index("--out") + 1] = str(world.folder / "out")
    invoke([name, *rest], allowed=(0, 1) if "--train" in rest else (0,))  # 1: the plan does not fit


def run(words: list[str]) -> None:
    """`labkit run ... --dry-run`: parameters, prompts, servers and refusals as the real run has them."""
    given = dict(word.split("=", 1) for word in words if "server=" in word)
    for url in given.values():
        base_url(url)
    if "--help-parameters" in words:
        invoke(["run", *words])
        return
    text = invoke(["run", *(word for word in words if word != "--dry-run"), "--dry-run"], allowed=(0, 1))
    refused = [line for line in text.splitlines() if "REFUSED" in line]
    here = ("is not on this machine", " are free")  # what a test's machine lacks: the model, the disk
    other = [line for line in refused if not any(word in line for word in here)]
    if other or "nothing was started" not in text:
        raise Unchecked("\n".join(other) or text)


def invoke(words: list[str], allowed: tuple[int, ...] = (0,)) -> str:
    """What labkit prints in this process; its errors as they are."""
    result = CliRunner().invoke(cli.app, words)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code not in allowed:
        raise Unchecked(result.output)
    return result.output


def parse(app: typer.Typer, name: str, words: list[str]) -> None:
    """Read by the command's own parser, which raises for an unknown flag or a value of the wrong type."""
    command = typer.main.get_command(app)
    if isinstance(command, TyperGroup):
        if name not in command.commands:
            raise Unchecked(f"there is no command {name}")
        command = command.commands[name]
    command.make_context(name, list(words))


def papermill(words: list[str], world: World) -> None:
    """The notebook is there and has the parameters."""
    source = ROOT / words[0]
    if not source.is_file():
        raise Unchecked(f"there is no {source}")
    given = {words[at + 1]: words[at + 2] for at, word in enumerate(words) if word == "-p"}
    settings.NOTEBOOKS[find_notebook(source.name)].of(given)


def pip(words: list[str], world: World) -> None:
    """Requirement files are there; pinned packages have the version that requirements/ has."""
    pinned = {line.strip() for file in (ROOT / "requirements").glob("*.txt") for line in file.read_text().split()}
    for at, word in enumerate(words):
        if word == "-r" and not (ROOT / words[at + 1]).is_file():
            raise Unchecked(f"there is no {words[at + 1]}")
        if "==" in word and word not in pinned:
            raise Unchecked(f"requirements/ does not pin {word}")


def conda(words: list[str], world: World) -> None:
    """The environment's file is there."""
    if not (ROOT / words[words.index("-f") + 1]).is_file():
        raise Unchecked("conda's file is not there")


def accelerate(words: list[str], world: World) -> None:
    """Read by accelerate's own parser, what it launches by the trainer's."""
    from accelerate.commands.launch import launch_command_parser

    found = launch_command_parser().parse_args(words[1:])
    launched(found.training_script, found.training_script_args, module=found.module)


def torchrun(words: list[str], world: World) -> None:
    """Read by torchrun's own parser, what it launches by the trainer's."""
    from torch.distributed.run import get_args_parser

    found = get_args_parser().parse_args(words)
    launched(found.training_script, found.training_script_args, module=found.module)


def launched(script: str, words: list[str], *, module: bool) -> None:
    """`-m labkit.train FILE`: the trainer's own parser reads it."""
    from labkit.train.__main__ import app

    if not module or script != "labkit.train":
        raise Unchecked(f"{script} is not the lab's trainer")
    parse(app, "train", words)


def python(words: list[str], world: World) -> None:
    """`python -m MODULE`: the module is there; the lab's own command line, or vLLM's, reads the rest."""
    if words[:2] == ["-m", "labkit.conversations"]:
        from labkit.conversations.__main__ import app

        parse(app, words[2], words[3:])
        return
    if words[:2] == ["-m", "vllm.entrypoints.openai.api_server"]:
        vllm(["serve", words[words.index("--model") + 1], *words[2:]], world)
        return
    if words[0] != "-m" or importlib.util.find_spec(words[1]) is None:
        raise Unchecked(f"there is no module {words[1]}")


def vllm(words: list[str], world: World) -> None:
    """`vllm serve`: every flag, and every key of a flag's JSON, is one of the installed vLLM's."""
    if words[0] != "serve" or words[1].startswith("-"):
        raise Unchecked("vllm serve MODEL ...")
    flags = sources("engine/arg_utils.py", "entrypoints", "config")
    for at, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name = word.removeprefix("--").removeprefix("no-")
        if f'"--{name}"' not in flags and not re.search(rf"^    {name.replace('-', '_')}:", flags, re.MULTILINE):
            raise Unchecked(f"vLLM has no flag {word}")
        if name in JSON_FLAGS:
            fields = sources(f"config/{JSON_FLAGS[name]}.py")
            for key in json.loads(words[at + 1]):
                if not re.search(rf"^    {key}:", fields, re.MULTILINE):
                    raise Unchecked(f"{word} has no {key}")


def sources(*names: str) -> str:
    """The text of files and folders of the installed vLLM, which takes long to import."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    paths = [
        path for name in names for path in ([root / name] if name.endswith(".py") else (root / name).rglob("*.py"))
    ]
    return "\n".join(path.read_text() for path in paths)


def curl(words: list[str], world: World) -> None:
    """The page is there on a server that the tests run."""
    url = next(word for word in words if "://" in word)
    httpx.get(re.sub(r"^http://[^/]+", world.url, url)).raise_for_status()


def export(words: list[str], world: World) -> None:
    """The variable is one that the lab reads."""
    name = words[0].partition("=")[0]
    if not any(f'"{name}"' in path.read_text() for path in (ROOT / "labkit").rglob("*.py")):
        raise Unchecked(f"nothing reads {name}")
