"""Two runs beside each other: what differs, by how much, whether that means anything, and what is refused."""

import json
import shutil
import zipfile

import pandas as pd
import pytest
from bs4 import BeautifulSoup

from labkit import cli, files, runs
from labkit.runs import accessibility, diff, frames
from labkit.settings import ExpertActivation, NgramBaseline

NAME = "02_ngram_baseline"


def rows(scale=1.0, **columns):
    """Four requests of two categories: TTFT 10 to 13 and 20 to 23 ms, times `scale`."""
    frame = pd.DataFrame(
        {
            "variant": ["baseline"] * 8,
            "category": ["code"] * 4 + ["story"] * 4,
            "prompt_id": [f"p{n}" for n in range(8)],
            "ttft_ms": [scale * value for value in (10, 11, 12, 13, 20, 21, 22, 23)],
            "tokens_total": [64] * 8,
            "answer_text": ["x"] * 8,
        }
    )
    return frame.assign(**columns)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes a finished run without an engine: run id, headline, frames, changes to provenance, settings."""
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path / "outputs"))

    def write(run_id, headline=None, saved=None, provenance=None, kind=NgramBaseline, **values):
        stage = runs.Stage(kind(run_id=run_id, **values))
        for name, frame in (saved or {}).items():
            stage.save(name, frame)
        path = stage.finish(headline or {})
        record = files.read_json(path)
        record["provenance"] |= {"source": {"commit": "a" * 40, "dirty": False}} | (provenance or {})
        files.write_json(path, record)
        return stage.folder.parent

    return write


def test_scalars_side_by_side(make):
    make("a", {"baseline_tok_s": 40.0, "ngram_speedup": 1.5, "source": "engine", "gone": 3, "none": None})
    make("b", {"baseline_tok_s": 50.0, "ngram_speedup": 1.2, "source": "told", "none": None, "zero": 0})
    (stage,) = diff.diff("a", "b").stages
    found = {line["name"]: line for line in stage.scalars}
    assert (found["baseline_tok_s"]["difference"], found["baseline_tok_s"]["ratio"]) == (10.0, 1.25)
    assert found["ngram_speedup"]["ratio"] == pytest.approx(0.8)
    assert (found["source"]["a"], found["source"]["b"], found["source"]["ratio"]) == ("engine", "told", None)
    assert (found["gone"]["a"], found["gone"]["b"], found["gone"]["difference"]) == (3, None, None)
    assert list(found) == ["baseline_tok_s", "ngram_speedup", "source", "gone", "none", "zero"]


def test_medians_and_quartiles_by_key(make):
    """Worked out by hand: medians of 10..13 are 11.5, quartiles 10.75 and 12.25; the same times 1.5."""
    make("a", saved={"rows": rows(), "only_a": rows()})
    make("b", saved={"rows": rows(1.5)})
    (stage,) = diff.diff("a", "b").stages
    assert stage.only == (["only_a"], [])
    (found,) = stage.frames
    assert found.keys == ["category"], "the variant is the same in all rows"
    assert found.same == 2, "tokens_total of both categories"
    code, story = found.figures
    assert (code["group"], code["figure"]) == ("code", "ttft_ms")
    assert (code["a"], code["b"], code["ratio"]) == (11.5, 17.25, 1.5)
    assert code["spread_a"] == (10.75, 12.25, 4)
    assert code["spread_b"] == (16.125, 18.375, 4)
    assert code["apart"]
    assert story["apart"]


def test_quartiles_that_overlap_are_not_apart(make):
    make("a", saved={"rows": rows()})
    make("b", saved={"rows": rows(1.1)})
    found = diff.diff("a", "b").stages[0].frames[0]
    assert [line["apart"] for line in found.figures] == [False, True]  # 11.825 < 12.25; 22.825 > 22.25
    assert found.figures[1]["spread_a"][1] < found.figures[1]["spread_b"][0]


def test_rows_of_one_run_alone_are_named(make):
    make("a", saved={"rows": rows().head(6)})
    make("b", saved={"rows": rows(category=["code"] * 4 + ["maths"] * 4)})
    found = diff.diff("a", "b").stages[0].frames[0]
    assert found.only == (["story"], ["maths"])


def test_frames_with_other_keys_are_not_compared(make):
    make("a", saved={"rows": rows()})
    make("b", saved={"rows": rows().drop(columns="variant")})
    found = diff.diff("a", "b").stages[0].frames[0]
    assert found.why_not == "rows are told apart by variant, category in A, by category in B"
    assert not found.figures


def test_a_key_with_one_value_does_not_keep_rows_apart(make):
    """Another model everywhere: the rows still stand beside each other, and it is said."""
    make("a", saved={"rows": rows(model="smollm2")})
    make("b", saved={"rows": rows(1.5, model="toy")})
    found = diff.diff("a", "b")
    assert [line["ratio"] for line in found.stages[0].frames[0].figures] == [1.5, 1.5]
    assert found.stages[0].frames[0].constant == [("model", "smollm2", "toy")]
    assert "rows: model is smollm2 in A, toy in B" in diff.text(found)
    assert "model is smollm2 in A and toy in B" in diff.page(found).read_text()


def test_numbers_are_keys_of_a_grid_and_steps_are_not():
    grid = pd.DataFrame({"k": [3, 5], "lookup_max": [4, 4], "lookup_min": [1, 1], "drafts": [7, 9]})
    assert frames.keys_of(grid) == ["k", "lookup_max", "lookup_min"]
    assert frames.labels_of(grid, ["k", "lookup_max"]) == ["k=3, lookup_max=4", "k=5, lookup_max=4"]
    assert frames.keys_of(pd.DataFrame({"step": [0, 1], "epoch": [0, 0], "loss": [2.0, 1.0]})) == []
    assert frames.keys_of(pd.DataFrame({"step": ["answers"], "hours": [1.0]})) == ["step"]


@pytest.mark.parametrize(
    "frame", [rows().head(0), rows(ttft_ms=None), rows(ttft_ms=[None] * 7 + [1.0]), pd.DataFrame()]
)
def test_empty_and_missing_values(make, frame):
    make("a", saved={"rows": frame})
    make("b", saved={"rows": rows()})
    found = diff.diff("a", "b")
    assert diff.page(found).exists()
    assert all(line["a"] == line["a"] for each in found.stages[0].frames for line in each.figures)


GPU = {"hardware": {"cpu": "Other", "cores": 64, "memory_gb": 500.0, "gpus": [{"name": "NVIDIA H200"}]}}


@pytest.mark.parametrize(
    ("first", "second", "says", "names"),
    [
        ({}, {}, "are the same", []),
        ({}, {"max_tokens": 9}, "do not compare directly: max_tokens differ", ["max_tokens"]),
        ({}, {"target": "mini-kimi"}, "do not compare directly: target differ", ["target"]),
        (
            {},
            {"provenance": GPU},
            "The same settings; processor, cores, memory (GB), GPUs differ",
            ["NVIDIA H200"],
        ),
        ({}, {"provenance": {"packages": {"vllm": "9.9"}}}, "vllm", ["9.9"]),
        ({}, {"server": "http://127.0.0.1:1"}, "The same settings; server differ", ["127.0.0.1:1"]),
        (
            {},
            {"provenance": {"source": {"commit": "a" * 40, "dirty": True}}},
            "the code may differ unseen",
            ["local"],
        ),
    ],
)
def test_whether_figures_compare_is_said(make, first, second, says, names, capsys):
    make("a", {"baseline_tok_s": 1.0}, **first)
    make("b", {"baseline_tok_s": 1.0}, **second)
    found = diff.diff("a", "b")
    assert says in found.stages[0].verdict
    page = BeautifulSoup(diff.page(found).read_text(), "html.parser").get_text(" ")
    for text in (diff.text(found), page):
        assert says in text
        assert all(name in text for name in names)
    assert bool(found.stages[0].work) == ("do not compare" in says)


def test_page_has_no_problem_and_text_is_short(make, tmp_path, monkeypatch, capsys):
    make("a", {"baseline_tok_s": 40.0, "said": "<b>&</b>"}, {"rows": rows(), "grid": rows().head(0)})
    make("b", {"baseline_tok_s": 44.0}, {"rows": rows(1.5), "grid": rows()}, GPU, max_tokens=7)
    out = tmp_path / "page.html"
    monkeypatch.setattr("sys.argv", ["labkit", "diff", "a", "b", "--out", str(out)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert accessibility.problems(out.read_text()) == []
    assert "<b>&</b>" not in out.read_text()
    assert "1.10x" in captured.out
    assert len(captured.out.splitlines()) < 30


def test_folders_and_zips_from_anywhere(make, tmp_path, monkeypatch):
    first, second = make("a", {"x": 1.0}, {"rows": rows()}), make("b", {"x": 2.0}, {"rows": rows(2)})
    expected = diff.text(diff.diff("a", "b"))
    sent = tmp_path / "sent"
    sent.mkdir()
    shutil.move(first, sent / "a")
    with zipfile.ZipFile(sent / "b.zip", "w") as archive:
        for file in second.rglob("*"):
            archive.write(file, f"b/{file.relative_to(second)}")
    shutil.rmtree(second)
    monkeypatch.chdir(sent)
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path / "none"))
    assert diff.text(diff.diff(sent / "a", "b.zip")) == expected


def test_bad_inputs_are_named(make):
    folder = make("a", {"x": 1.0}, {"rows": rows()})
    make("b", {"x": 1.0}, {"rows": rows()})
    make("other", kind=ExpertActivation, target="mini-kimi")
    with pytest.raises(runs.UnknownRun, match="no/such"):
        diff.diff("a", "no/such")
    with pytest.raises(diff.NothingShared, match="03_expert_activation"):
        diff.diff("a", "other")
    whole = (folder / NAME / "rows.parquet").read_bytes()
    (folder / NAME / "rows.parquet").write_bytes(whole[:100])
    with pytest.raises(files.BrokenFile, match=r"rows\.parquet"):
        diff.diff("a", "b")
    (folder / NAME / "rows.parquet").write_bytes(whole)
    (folder / NAME / "run.json").write_text(json.dumps({"notebook": NAME, "settings": 5}))
    with pytest.raises(runs.BadRecord, match="settings"):
        diff.diff("a", "b")


def test_stages_of_one_run_alone_are_named(make):
    make("a", {"x": 1.0})
    make("b", {"x": 1.0})
    make("b", kind=ExpertActivation, target="mini-kimi")
    found = diff.diff("a", "b")
    assert found.only == ([], ["03_expert_activation"])
    assert "only in B: 03_expert_activation" in diff.text(found)


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (1234567, "1,234,567"),
        (0.123456, "0.1235"),
        (12345.678, "12,346"),
        (2.0, "2"),
    ],
)
def test_values_in_few_characters(value, want):
    assert diff.shown(value) == want
