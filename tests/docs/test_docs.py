"""The documentation is true: commands work, parameters and outputs are those of the code, links lead somewhere."""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.runs.execute import find_notebook
from labkit.settings import NOTEBOOKS, BadParameter
from tests.docs import tables
from tests.docs.checking import World, check
from tests.docs.pages import PAGES, ROOT, anchors, blocks, commands, links, prose, spans
from tests.unit.sse_server import ROLE, Reply, delta, serving, usage

LANGUAGES = {"sh", "text", "python", "json", "yaml"}
COMMANDS = [found for page in PAGES for found in commands(page)]
NOTEBOOK_PAGES = {name: tables.page(name) for name in NOTEBOOKS}
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "labkit").rglob("*.py")))
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 40_000,
    "max_position_embeddings": 8192,
}
TEXT = [11, 12, 13, 14, 11, 12, 13, 14, 11, 12]  # repeats itself, so prompt lookup finds something


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """What the examples name: models, a head, data and traces in a folder, a server, a finished run."""
    folder = tmp_path_factory.mktemp("world")
    for name in ("models/own", "heads/mine", "data/copy", "traces/mine", "outputs"):
        (folder / name).mkdir(parents=True)
    (folder / "models/own/config.json").write_text(json.dumps(LLAMA))
    moe = json.loads((ROOT / "data/targets/mini-kimi/config.json").read_text())
    moe["text_config"] |= {"num_attention_heads": 8, "num_key_value_heads": 8}  # for eight ranks
    (folder / "models/moe").mkdir()
    (folder / "models/moe/config.json").write_text(json.dumps(moe))
    row = {"id": "a-1", "category": "a", "messages": [{"role": "user", "content": "Why?"}]}
    for name in ("data/questions.jsonl", "data/bench.jsonl"):
        (folder / name).write_text(json.dumps(row) + "\n")
    with serving(answer) as server:
        yield World(folder, server.url)


@pytest.fixture
def lab(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The world, its outputs folder the lab's, with runs of the names that the documentation uses."""
    outputs = world.folder / "outputs"
    monkeypatch.setenv("LABKIT_OUTPUTS", str(outputs))
    monkeypatch.chdir(ROOT)
    for run in {word for _, words in COMMANDS for word in words[2:] if words[1] in ("render", "diff")}:
        if not run.startswith("-"):
            finished(outputs / run)
    return world


def finished(folder: Path) -> None:
    """A run with one finished notebook, as Stage writes it."""
    from labkit import runs
    from labkit.settings import ExpertActivation

    stage = runs.Stage(ExpertActivation(run_id=folder.name, scale="smoke"))
    stage.finish({"unique_experts_n4": 11.7})


def answer(path: str, body: dict) -> Reply:
    """A vLLM that says the same ten tokens."""
    if not body.get("stream"):
        return Reply(body={"choices": [{"text": "x", "token_ids": TEXT, "finish_reason": "length"}]})
    n = min(len(TEXT), body.get("max_tokens") or len(TEXT))
    first = ROLE | {"prompt_token_ids": [1, 2, 3]}
    pieces = [part for token in TEXT[:n] for part in (0.002, delta(content="x", ids=[token]))]
    if "messages" not in body:
        pieces = [part if isinstance(part, float) else completion(part) for part in pieces]
        return Reply([*pieces, completion(delta("length", ids=[])), usage(n, prompt=3)])
    return Reply([first, *pieces, delta("length", ids=[]), usage(n, prompt=3)])


def completion(chunk: dict) -> dict:
    """A chat chunk as one of a plain completion."""
    choice = dict(chunk["choices"][0])
    choice["text"] = choice.pop("delta").get("content", "")
    return {"object": "text_completion", "choices": [choice]}


@pytest.mark.parametrize(("place", "words"), COMMANDS, ids=[place[:90] for place, _ in COMMANDS])
def test_a_documented_command_works(place: str, words: list[str], lab: World) -> None:
    check(words, lab)


@pytest.mark.parametrize(
    "words",
    [
        ["labkit", "run", "02", "-p", "no_such=1"],
        ["labkit", "run", "02", "--no-such"],
        ["labkit", "run", "04", "-p", "hidden_states=none"],
        ["labkit", "extract", "data", "states", "--shards", "2/4"],
        ["labkit", "swap", "vllm", "--", "labkit", "run", "09"],
        ["labkit", "plan", "--hardware", "toaster"],
        ["make", "coffee"],
        ["vllm", "serve", "m", "--speculative-config", '{"kind": "ngram"}'],
        ["vllm", "serve", "m", "--speculate"],
        ["torchrun", "-m", "labkit.train"],
        ["accelerate", "launch", "--no_such", "-m", "labkit.train", "a.json"],
        ["papermill", "notebooks/02_ngram_baseline.ipynb", "out.ipynb", "-p", "streams", "1"],
        ["pip", "install", "vllm==0.0.1"],
        ["export", "LABKIT_SECRET=1"],
        ["frobnicate"],
    ],
    ids=lambda words: " ".join(words),
)
def test_a_wrong_command_is_found(words: list[str], lab: World) -> None:
    with pytest.raises((Exception, SystemExit)):  # click's, argparse's or the lab's own: each parser has its kind
        check(words, lab)


def test_blocks_say_what_they_are() -> None:
    found = [block for page in PAGES for block in blocks(page)]
    assert len(found) > 20
    assert [f"{b.page}:{b.line}" for b in found if b.language not in LANGUAGES] == []
    for block in found:
        if block.language == "json":
            assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines()), block


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_parameters_are_those_of_the_settings(notebook: str) -> None:
    """Names and defaults against the dataclass; the meanings against the notebook's own comments."""
    rows = re.findall(
        r"^\| `(\w+)` \| `(.*?)` \|(.*?)\|(.*)\|$", tables.of_page(tables.page(notebook).read_text()), re.M
    )
    cls = NOTEBOOKS[notebook]
    assert {name: json.loads(default) for name, default, *_ in rows} == {
        name: field.default for name, field in cls.parameters().items()
    }
    scales = {name: [int(n.replace(",", "")) for n in s.split(", ")] for name, _, s, _ in stripped(rows) if s}
    assert scales == {name: list(values) for name, values in cls.by_scale.items()}
    assert tables.of_page(tables.page(notebook).read_text()) == tables.table(notebook), (
        "run python -m tests.docs.tables"
    )


def stripped(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Cells without the space around them."""
    return [tuple(cell.strip() for cell in row) for row in rows]


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_outputs_are_those_that_the_notebook_saves(notebook: str) -> None:
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    saved = {f"{name}.parquet" for name in re.findall(r'stage\.save\("(\w+)"', code)}
    assert saved
    table = section(NOTEBOOK_PAGES[notebook], "## Outputs")
    told = {cell for cell in re.findall(r"`([^`]+\.parquet)`", table) if "/" not in cell}
    assert saved <= told, "a result without a description"
    assert [name for name in told - saved if f'"{Path(name).stem}"' not in code and name not in code] == []
    columns = {
        name for row in re.findall(r"^\| `\w+\.parquet`.*$", table, re.M) for name in re.findall(r"`(\w+)`", row)
    }
    assert columns
    assert sorted(name for name in columns if not re.search(rf"\b{name}\b", SOURCE) and not built(name)) == []


def built(name: str) -> bool:
    """Whether a column's name is put together in the code: an interval's end, a share, a count a step."""
    stem = re.sub(r"_(low|high|share|ms|per_step)$", "", name)
    return stem != name and re.search(rf"\b{stem}", SOURCE) is not None


def section(page: Path, heading: str) -> str:
    """The text under a heading of the second level."""
    return page.read_text().partition(f"{heading}\n")[2].partition("\n## ")[0]


def test_every_notebook_page_has_its_parts() -> None:
    for page in NOTEBOOK_PAGES.values():
        for heading in ("## Parameters", "## Outputs", "## How to read it", "## What can go wrong"):
            assert section(page, heading).strip(), (page.name, heading)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), link
        assert not anchor or anchor in anchors(found), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_errors_and_parameter_values_exist(page: Path) -> None:
    classes = set(re.findall(r"^class (\w+)\(", SOURCE, re.M)) | set(dir(builtins))
    for span in spans(page):
        if re.fullmatch(r"(?:[A-Z][a-z]+){2,}", span):
            assert span in classes, f"{page.name}: there is no {span}"
        given = re.fullmatch(r"(?:-p )?(?:\d\d\.)?([a-z_]+)=(\S+)", span)
        if given and not re.search(r"NAME|\.\.\.|@", given[2]):
            assert accepted(given[1], given[2]), f"{page.name}: no notebook takes {span}"


def accepted(name: str, value: str) -> bool:
    """Whether a notebook has the parameter and takes the value."""
    for cls in NOTEBOOKS.values():
        if name in cls.parameters():
            try:
                cls.of({name: value})
            except BadParameter:
                continue
            return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_snippets_use_what_there_is(page: Path) -> None:
    for block in blocks(page):
        if block.language != "python":
            continue
        tree = ast.parse(block.text)
        known = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                package = importlib.import_module(str(node.module))
                for alias in node.names:
                    if not hasattr(package, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")
                    known[alias.asname or alias.name] = getattr(package, alias.name)
        assert known, "a snippet imports what it uses"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
                assert hasattr(known[node.value.id], node.attr), f"{block}: {node.attr}"


def test_the_readme_is_short_and_all_pages_are_linked() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    index = set(links(ROOT / "docs/README.md"))
    assert {page.name for page in PAGES[1:]} - {"README.md"} <= index
    assert any(link.startswith("docs/") for link in links(ROOT / "README.md"))
    assert all(len(line) <= 400 for page in PAGES for line in prose(page).splitlines() if not line.startswith("|"))


def test_two_commands_reach_the_verdict_of_a_server(tmp_path: Path) -> None:
    """The README's second command, for real, against two servers at addresses."""
    words = next(
        words for place, words in COMMANDS if place.startswith("README") and "run" in words and "mine" in words
    )
    assert find_notebook(words[2]) == "02_ngram_baseline"
    with serving(answer) as plain, serving(answer) as speculating:
        real = [w.replace("http://gpu:8000", plain.url).replace("http://gpu:8001", speculating.url) for w in words]
        done = subprocess.run(
            [sys.executable, "-m", "labkit.cli", *real[1:], "--scale", "smoke"],
            env=os.environ | {"LABKIT_OUTPUTS": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"baseline +[\d.]+ tok/s", done.stdout)
    assert re.search(r"n-gram speedup +[\d.]+×", done.stdout)
    assert "n-gram is " in done.stdout
    assert "labkit render mine" in done.stdout
