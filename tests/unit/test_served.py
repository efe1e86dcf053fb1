"""Whose figures a run has: the servers that it was given say it, pages repeat it, and a change is noticed."""

import time

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from sse_server import Reply, serving

from labkit import files, runs
from labkit.runs import accessibility, diff, served, told
from labkit.runs.ending import ending
from labkit.runs.execute import finished, mark_finished
from labkit.settings import ExpertActivation, NgramBaseline
from tests.private import leaks

NAME = "02_ngram_baseline"
ENTRY = {"id": "acme-7b", "root": "/data/llm/acme", "max_model_len": 8192, "owned_by": "vllm"}


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server of acme-7b, whose pages a test may change."""
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path / "outputs"))
    with serving(lambda path, body: Reply()) as fake:
        tells(fake)
        yield fake


def tells(fake, version="0.17.1", **changes):
    """Let a server list one model, and its version."""
    fake.pages = {"/v1/models": {"data": [ENTRY | changes]}, "/version": {"version": version}}


def finish(run_id="r", **values):
    """A finished stage of notebook 02 with its executed notebook; its settings."""
    stage = runs.Stage(NgramBaseline(run_id=run_id, **values))
    cells = [new_markdown_cell("# How fast?"), new_code_cell("x = 1")]
    nbformat.write(new_notebook(cells=cells), stage.folder / f"{NAME}.ipynb")
    stage.finish({"baseline_tok_s": 40.25})
    return stage.settings


def words(path):
    """The text of a page."""
    return " ".join(BeautifulSoup(path.read_text(), "html.parser").get_text(" ").split())


def test_pages_name_the_served_model_and_call_this_machine_the_one_that_asked(server):
    chosen = finish(server=server.url)
    index = runs.render("r")
    line = f"acme-7b (weights acme) at {server.url}, vllm 0.17.1, context up to 8,192 tokens"
    page = index.parent / NAME / f"{NAME}.html"
    assert f"Measured server: {line}." in words(index)
    assert "Target smollm2" not in words(index)
    assert "The machine that asked, not the one that served:" in words(index)
    assert "Versions on the machine that asked" in words(index)
    assert line in words(page)
    assert "hardware and versions of the machine that asked, not of the servers" in words(page)
    assert f"  server: {line}" in ending(chosen.folder / f"{NAME}.ipynb")
    assert [accessibility.problems(path.read_text()) for path in (index, page)] == [[], []]
    assert leaks(index.parent, ["/data/llm"]) == []


def test_a_run_of_both_kinds_says_which_is_which(server):
    finish(server=server.url)
    runs.Stage(ExpertActivation(run_id="r")).finish({})
    said = words(runs.render("r"))
    assert "Target mini-kimi in 03_expert_activation." in said
    assert "Measured server: acme-7b" in said
    assert "The machine that served the target and asked the servers:" in said


def test_a_run_without_servers_says_nothing_of_them(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    chosen = finish()
    assert "servers" not in files.read_json(chosen.folder / "run.json")["provenance"]
    said = words(runs.render("r"))
    assert "Target smollm2. " in said
    assert "asked" not in said


def test_a_run_of_before_servers_were_recorded_owns_up(server):
    chosen = finish(server="http://127.0.0.1:9")
    path = chosen.folder / "run.json"
    record = files.read_json(path)
    del record["provenance"]["servers"]
    files.write_json(path, record)
    said = words(runs.render("r"))
    assert "at http://127.0.0.1:9; what it serves was not recorded" in said
    assert "Target smollm2" not in said


@pytest.mark.parametrize(
    "listed", [None, 3, {"data": 3}, {"data": []}, {"data": [{"id": {"a": 1}}]}, {"data": [ENTRY | {"id": "\n"}]}]
)
def test_a_server_that_tells_nothing_usable_stops_no_run(server, listed):
    server.pages = {"/v1/models": listed, "/version": listed}
    chosen = finish(server=server.url)
    record = files.read_json(chosen.folder / "run.json")
    assert told.servers(record) == {"server": f"at {server.url}; what it serves was not recorded"}


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "ftp://x", "http://[", " "])
def test_a_server_that_is_away_or_no_server_stops_no_run(tmp_path, monkeypatch, url):
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    found = served.asked(NgramBaseline(run_id="r", server=url))["server"]
    assert set(found) == {"address"}


def test_a_server_that_is_away_keeps_what_it_told_before(server):
    finish(server=server.url)
    server.stop()
    chosen = finish(server=server.url)
    assert served.stored(chosen.folder / "run.json")["server"]["model"] == "acme-7b"
    chosen = finish(server="http://127.0.0.1:9")
    assert "model" not in served.stored(chosen.folder / "run.json")["server"], "another address is another server"


def test_a_server_that_was_loading_when_the_stage_began_is_asked_again(server):
    server.pages = {"/v1/models": {"data": []}}
    stage = runs.Stage(NgramBaseline(run_id="r", server=server.url))
    tells(server)
    stage.finish({})
    assert served.stored(stage.folder / "run.json")["server"]["model"] == "acme-7b"


@pytest.mark.parametrize(
    ("url", "stored"),
    [
        ("http://gpu-17.corp.example:8000", "http://SERVER:8000"),
        ("gpu:8000", "http://SERVER:8000"),
        ("https://gw.example/team/v1/", "https://SERVER/team"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("http://[2001:db8::1]:8000", "http://SERVER:8000"),
        ("http://127.0.0.1:8000/v1?key=abc", "http://127.0.0.1:8000"),
    ],
)
def test_addresses_are_stored_without_their_host(url, stored):
    assert served.address(url) == stored


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2.5"),
        ("acme-7b", "acme-7b"),
        ("/data/llm/acme-7b/", "acme-7b"),
        ("~/models/acme-7b", "acme-7b"),
        ("../people/bob/acme-7b", "acme-7b"),
        ("a/b/acme-7b", "acme-7b"),
        ("C:\\models\\acme-7b", "acme-7b"),
        ("/srv/hub/models--moonshotai--Kimi-K2.5/snapshots/0a1b", "moonshotai/Kimi-K2.5"),
        ("/", ""),
        (None, ""),
        (7, ""),
    ],
)
def test_paths_of_a_server_are_cut_to_a_name(text, name):
    assert served.named(text) == name


@pytest.mark.parametrize(
    "change", [{"id": "other"}, {"version": "0.18"}, {"max_model_len": 4096}, {"root": "new"}]
)
def test_another_server_at_the_same_address_is_measured_again(server, change):
    chosen = finish(server=server.url)
    mark_finished(chosen)
    assert finished(chosen)
    tells(server, **change)
    assert not finished(chosen)
    (said,) = served.changed(chosen)
    assert "measured was acme-7b (weights acme)" in said
    assert str(change.popitem()[1]).replace("4096", "4,096") in said
    server.stop()
    assert finished(chosen), "away: what was measured stands"


def test_what_is_up_to_date_says_since_when_and_how_to_measure_again(server, capsys):
    chosen = finish(server=server.url)
    mark_finished(chosen)
    runs.execute("02", {"run_id": "r", "server": server.url})
    said = capsys.readouterr().out
    assert f"up to date in {chosen.folder}: measured {time.strftime('%Y-%m-%d', time.gmtime())} " in said
    assert said.endswith(" UTC; --force measures again\n")


def test_diff_compares_servers_and_not_what_the_client_has_installed(server):
    finish("a", server=server.url)
    tells(server, version="0.18")
    finish("b", server=server.url)
    finish("c")
    (both,) = diff.diff("a", "b").stages
    want = ("what server told", "acme-7b (weights acme), vllm {}, context up to 8,192 tokens")
    assert both.conditions == [(want[0], want[1].format("0.17.1"), want[1].format("0.18"))]
    assert "The same settings; what server told differ" in both.verdict
    (mixed,) = diff.diff("a", "c").stages
    assert [name for name, _, _ in mixed.conditions] == ["what server told"]
