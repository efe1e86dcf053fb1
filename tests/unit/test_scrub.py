"""What a run stores tells no secret, no host and no path of the machine, and still means the same."""

import dataclasses
import gzip
import json
import re
import socket
import subprocess
import zipfile
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import psutil
import pytest
import torch
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from safetensors.torch import save_file

from labkit import files, runs, settings
from labkit.runs import accessibility
from labkit.runs.scrub import Scrubber, of_settings, scrub
from labkit.settings import ExpertActivation, NgramBaseline
from tests.private import leaks

SECRETS = {
    "HF_TOKEN": "hf_" + "Planted4Test" * 3,
    "OPENAI_API_KEY": 'sk-with"quote&<amp>\\back',
    "WANDB_API_KEY": "0123456789abcdef-wandb",
    "SERVER_PASSWORD": "pässwörd of mine",
}
HOMES = "/" + "home"  # in two parts: the packaging tests want no such path in any tracked file
HOST = "gpu-node-17.corp.example"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with secrets, a telling host name, a home and a lab in it; what of it must not be stored."""
    home = tmp_path / "home" / "alice.b"
    (home / "lab" / "notebooks").mkdir(parents=True)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LABKIT_ROOT", str(home / "lab"))
    monkeypatch.setenv("LABKIT_OUTPUTS", str(home / "lab/outputs"))
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "fast-disk"))
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    words = [json.dumps(value)[1:-1] for value in SECRETS.values()]
    return [*SECRETS.values(), *words, HOST, HOST.split(".")[0], "alice.b", str(tmp_path), "fast-disk"]


def told():
    """A text as logs and outputs have it: secrets, hosts, and this machine's paths."""
    places = [
        str(p) for p in (Path.home(), settings.root(), settings.outputs() / "r", settings.cache() / "targets")
    ]
    words = [*SECRETS.values(), HOST, HOST.split(".")[0], f"http://{HOST}:80/", f"root@{HOST}", *places]
    return "\n".join([*words, *(f'File "{place}/x.py", line 1' for place in places), json.dumps(words)])


def test_a_run_of_the_library_stores_nothing_private(machine, tmp_path):
    chosen = NgramBaseline(run_id="r", server="http://box.their.example:8000/v1", prompts="/models/own/rows.jsonl")
    stage = runs.Stage(chosen)
    text = told()
    stage.save("rows", pd.DataFrame({"text": [text, None], "lists": [[text], []], "x_ms": [1.5, 2.5]}))
    ax = plt.subplots()[1]
    ax.set_title("Rates")
    stage.figure("rates", ax)
    (stage.folder / "server.log").write_text(f"\x1b[1m{settings.root()}/.venv/x\x1b[0m {text}")
    (stage.folder / "answers.jsonl").write_text(json.dumps({"said": text}) + "\n" + json.dumps({"n": 1}) + "\n")
    (stage.folder / "deep").mkdir()
    (stage.folder / "deep/rank0.1.pt.trace.json.gz").write_bytes(gzip.compress(json.dumps([text]).encode()))
    (stage.folder / f"deep/events.out.tfevents.17.{HOST}.5.0").write_bytes(b"\0events")
    (stage.folder.parent / "next-steps.md").write_text(f"labkit run 02 {text}")
    stage.finish({"ngram_speedup": 1.25, "note": text})
    assert leaks(tmp_path / "home/alice.b/lab/outputs", [*machine, "their.example"]) == []
    record = files.read_json(stage.folder / "run.json")
    assert record["settings"]["server"] == "http://SERVER:8000/v1"
    assert not Path(record["settings"]["prompts"]).is_absolute()
    assert record["headline"]["ngram_speedup"] == 1.25
    rows = pd.read_parquet(stage.folder / "rows.parquet")
    assert rows.x_ms.tolist() == [1.5, 2.5]
    assert rows.text.isna().tolist() == [False, True]
    assert json.loads((stage.folder / "answers.jsonl").read_text().splitlines()[1]) == {"n": 1}


def test_the_search_reads_text_wherever_it_is_packed_and_nowhere_else(tmp_path):
    """Any three letters stand somewhere in numbers and packed bytes; what was written is found in each form."""
    word = "@vm"
    chance = torch.frombuffer(bytearray(word.encode() * 8), dtype=torch.uint8)
    when = int.from_bytes(word.encode(), "little")  # the time in a gzip header, as good as any packed byte
    quiet, told = tmp_path / "quiet", tmp_path / "told"
    for folder, text in ((quiet, "x"), (told, f"root{word}")):
        folder.mkdir()
        save_file({"h": chance}, folder / "a.safetensors", metadata={"from": text})
        torch.save({"state": chance, "of": text}, folder / "b.pt")
        with (folder / "c.gz").open("wb") as raw, gzip.GzipFile(text, "wb", fileobj=raw, mtime=when) as packed:
            packed.write(b"plain")
        (folder / "d.gz").write_bytes(gzip.compress(text.encode()))
        with zipfile.ZipFile(folder / "e.zip", "w") as archive:
            archive.writestr("inside.txt", text)
        pd.DataFrame({"text": [text], "n": [1.5]}).to_parquet(folder / "f.parquet")
        (folder / "g.log").write_text(text)
    for name in ("a.safetensors", "b.pt", "c.gz"):
        assert word.encode() in (quiet / name).read_bytes(), f"{name}: or this test shows nothing"
    assert leaks(quiet, [word]) == []
    assert leaks(told, [word]) == [f"{path.name}: {word!r}" for path in sorted(told.iterdir())]


def test_an_executed_notebook_stores_nothing_private(machine, tmp_path):
    """papermill writes absolute paths into the metadata; cells print, fail, and draw."""
    source = tmp_path / "home/alice.b/lab/notebooks/03_expert_activation.ipynb"
    fields = [f for f in dataclasses.fields(ExpertActivation) if f.name in ("target", "scale", "run_id")]
    parameters = "\n".join(f"{field.name} = {field.default!r}" for field in fields)
    work = (
        "import os\nfrom pathlib import Path\nfrom labkit import runs, settings\n"
        "stage = runs.Stage(settings.ExpertActivation.from_notebook(globals()))\n"
        f"print({{name: os.environ[name] for name in {list(SECRETS)}}}, Path.home(), stage.folder)\n"
        "{'home': str(Path.home())}"
    )
    cells = [new_markdown_cell("# Q?"), new_code_cell(parameters, metadata={"tags": ["parameters"]})]
    cells += [new_code_cell(work), new_code_cell('stage.finish({"unique_experts_n4": 1.5})')]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), source)
    path = runs.execute("03", {"run_id": "r"})
    assert leaks(path.parents[1], machine) == []
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.papermill.input_path == "notebooks/03_expert_activation.ipynb"
    assert "'OPENAI_API_KEY'" in notebook.cells[-2].outputs[0].text, "names of variables are no secret"
    stamp = path.stat().st_mtime_ns
    assert runs.execute("03", {"run_id": "r"}).stat().st_mtime_ns == stamp, "scrubbed, and still up to date"
    cells[-1].source = "raise RuntimeError(str(stage.folder), os.environ['HF_TOKEN'])"
    nbformat.write(new_notebook(cells=cells, metadata=kernel), source)
    with pytest.raises(runs.StageFailed):
        runs.execute("03", {"run_id": "failed"})
    assert leaks(path.parents[2] / "failed", machine) == []


def test_scrubbed_twice_is_scrubbed_once(machine, tmp_path):
    given = of_settings({"target": "/models/own", "server": f"https://{HOST}/v1", "head": "data/head"})
    scrubber = Scrubber(given)
    text = " ".join([told(), "/models/own", "/tmp", f"{HOMES}/bob/x", "outputs/tmp/x", "/rooted"])
    once = scrubber.text(text)
    assert scrubber.text(once) == once
    assert "outputs/tmp/x" in once
    assert "/rooted" in once
    assert "/models/own" not in re.sub(r"\.\./models/own", "", once)


def test_words_of_a_configuration_are_no_secrets(machine, monkeypatch):
    """A variable called AUTH or KEY may hold a plain word, which results are full of."""
    for name, value in {
        "AUTH_MODE": "benchmark",
        "SORT_KEY": "20261130",
        "X_KEY": "short1",
        "Y_TOKEN": "/a/b/c/d",
    }.items():
        monkeypatch.setenv(name, value)
    text = "benchmark 20261130 short1 /a/b/c/d"
    assert Scrubber().text(text) == text


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("model_name: HOST of tokens_per_step in 'demo'", None),
        ("Authorization: Bearer abcdefghijklmnopqrstuvwx", "Authorization: Bearer ***"),
        ("https://user:pw12@example.org/x", "https://example.org/x"),
        (f"see {HOMES}/bob/x and /Users/eve/y", f"see {HOMES}/user/x and /Users/user/y"),
        ("key=AKIAABCDEFGHIJKLMNOP", "key=***"),
    ],
)
def test_shapes(machine, text, want):
    assert Scrubber().text(text) == (text if want is None else want)


def test_pictures_in_notebooks_are_left_alone(machine, tmp_path):
    """A short host name is found in base64 now and then."""
    picture = f"{HOST}/{SECRETS['HF_TOKEN']}"
    assert Scrubber().value({"data": {"image/png": picture, "text/plain": HOST}})["data"] == {
        "image/png": picture,
        "text/plain": "HOST",
    }


def test_stored_paths_are_found_again_here(machine, tmp_path):
    folders = (settings.outputs() / "r/03/x", settings.cache() / "targets/smollm2-v1", settings.root() / "data/x")
    for path in folders:
        path.mkdir(parents=True)
        stored = Scrubber().text(str(path))
        assert not stored.startswith("/")
        assert settings.place(stored) == path
        assert settings.here(stored) in (str(path), stored)  # a name like data/x is a name of the lab's own
    own = tmp_path / "models/own"
    for given in (str(own), str(Path.home() / "models/own")):
        (stored,) = Scrubber(of_settings({"start": given})).value([given])
        assert not stored.startswith("/")
        assert settings.here(stored) == given
    assert settings.here("smollm2") == "smollm2"


def test_addresses_of_the_machine_are_hosts(machine, monkeypatch):
    """Engines log the address that they listen on; loopback and other people's numbers stay."""
    entry = type("Entry", (), {"family": socket.AF_INET, "address": "10.1.2.3"})
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [entry]})
    said = Scrubber().text("tcp://10.1.2.3:99 tcp://127.0.0.1:5 version 10.1.2.34 and 110.1.2.3")
    assert said == "tcp://HOST:99 tcp://127.0.0.1:5 version 10.1.2.34 and 110.1.2.3"


def test_a_broken_file_does_not_stop_the_rest(machine, tmp_path):
    folder = tmp_path / "outputs/r/02_ngram_baseline"
    folder.mkdir(parents=True)
    (folder / "half.partial.ipynb").write_text('{"cells": [')
    (folder / "half.parquet").write_bytes(b"PAR1 half")
    (folder / "half.json.gz").write_bytes(gzip.compress(b"x" * 1000)[:20])
    (folder / "z.log").write_text(HOST)
    assert scrub(folder) == [folder / "z.log"]


def test_what_is_published_is_clean():
    listing = subprocess.run(
        ["git", "ls-files", "outputs/published"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert len(listing.stdout.splitlines()) > 5
    for page in (ROOT / "outputs/published").rglob("*.html"):
        assert accessibility.problems(page.read_text()) == [], page
    assert leaks(ROOT / "outputs/published", ["root@", "hf_", "sk-", str(Path.home()) + "/", str(ROOT)]) == []


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("http://gpu-9.corp.example:8000", "http://gpu-9.corp.example:8000/v1 said no"),
        ("gpu-9.corp.example:8000", "http://gpu-9.corp.example:8000/v1; server='gpu-9.corp.example:8000'"),
        ("http://[2001:db8::7]:8000", "http://[2001:db8::7]:8000/v1"),
    ],
)
def test_hosts_of_servers_are_hidden_however_their_address_was_typed(machine, given, stored):
    told = Scrubber(of_settings({"server": given})).text(stored)
    assert "SERVER:8000" in told
    assert not re.search("gpu-9|2001", told)


@pytest.mark.parametrize("given", ["127.0.0.1:8000", "localhost:8000", "http://[::1]:8000", "http://[", "2/4", ""])
def test_loopback_and_what_is_no_address_stay(machine, given):
    assert of_settings({"server": given}) == {}
