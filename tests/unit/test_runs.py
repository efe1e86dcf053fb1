"""Runs: folders, provenance, execution of notebooks, pages. Tiny notebooks stand in for the real five."""

import json
import re
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit import cli, runs
from labkit.errors import LabError
from labkit.runs import headline, provenance
from labkit.runs.execute import alone, digest, finished, parameters_for, what_is_left
from labkit.runs.stage import StageBusy
from labkit.settings import BadParameter, Eagle3Pipeline, ExpertActivation, NgramBaseline

PARAMETERS = 'target = "mini-kimi"\nscale = "demo"\nrun_id = ""\nseed = 0\nnum_tokens = 0\nmax_window = 16'
WORK = """
from labkit import runs
from labkit.settings import ExpertActivation
settings = ExpertActivation.from_notebook(globals())
stage = runs.Stage(settings)
print("step 1\\rstep 2", flush=True)
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A lab folder whose notebook 03 is tiny; returns a function that sets its last cell."""
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setenv("LABKIT_ROOT", str(tmp_path))
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path / "outputs"))

    def write(last: str) -> None:
        cells = [new_markdown_cell("# A question?"), new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})]
        cells += [new_code_cell(WORK), new_code_cell(last)]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        nbformat.write(
            new_notebook(cells=cells, metadata=kernel), tmp_path / "notebooks/03_expert_activation.ipynb"
        )

    write('stage.finish({"unique_experts_n4": 1.5})')
    return write


def test_a_stage_runs_once_and_again_only_when_something_changed(lab, capfd):
    path = runs.execute("03", {"run_id": "r", "scale": "smoke"})
    record = json.loads((path.parent / "run.json").read_text())
    assert record["settings"]["num_tokens"] == 512
    assert record["executed"]["command"] == "labkit run 03 --run-id r -p scale=smoke"
    stamp = path.stat().st_mtime_ns
    runs.execute("03", {"run_id": "r", "scale": "smoke"})
    assert path.stat().st_mtime_ns == stamp
    said = capfd.readouterr()
    assert "up to date" in said.out
    assert "WARNING" not in said.err, "of plain TCP, for one"
    runs.execute("03", {"run_id": "r", "scale": "smoke", "max_window": "8"})
    assert path.stat().st_mtime_ns > stamp
    lab('stage.finish({"unique_experts_n4": 2.5})')
    runs.execute("03", {"run_id": "r", "scale": "smoke", "max_window": "8"})
    assert runs.headline_of(path.parents[1])["03_expert_activation"] == {"unique_experts_n4": 2.5}


def test_a_failing_cell_keeps_the_partial_notebook_and_says_what_to_do(lab):
    lab('from labkit.errors import LabError\nraise LabError("the disk is gone", "bring it back")')
    with pytest.raises(runs.StageFailed, match="the disk is gone") as failure:
        runs.execute("03", {"run_id": "r"})
    partial = nbformat.read(partial_of(failure), as_version=4)
    assert failure.value.remedy.startswith("bring it back")
    assert not re.search("logs|kept", failure.value.remedy), "there is neither"
    assert any(output.output_type == "error" for cell in partial.cells for output in cell.get("outputs", []))
    lab('stage.finish({"unique_experts_n4": 3})')
    runs.execute("03", {"run_id": "r"})
    assert runs.headline_of(partial_of(failure).parents[1])["03_expert_activation"]["unique_experts_n4"] == 3


def test_a_notebook_that_ends_after_its_shard_ends_well_and_is_not_taken_for_done(lab, monkeypatch, capsys):
    lab('from labkit.extract import ShardDone\nraise ShardDone("shard 1/4 is done", "run the others")')
    monkeypatch.setattr("sys.argv", ["labkit", "run", "03", "--run-id", "r"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    said = capsys.readouterr()
    assert "labkit: 03_expert_activation: shard 1/4 is done\n  what to do: run the others" in said.out
    assert "Failed" not in said.out + said.err
    assert not finished(ExpertActivation(run_id="r"))


def partial_of(failure):
    return Path(re.search(r"notebook is (.*?\.ipynb)", failure.value.remedy)[1])


@pytest.mark.parametrize("parameters", [{"no_such": "1"}, {"num_tokens": "many"}])
def test_bad_parameters_stop_before_a_kernel_starts(lab, parameters, tmp_path):
    with pytest.raises(BadParameter, match=next(iter(parameters))):
        runs.execute("03", {"run_id": "r"} | parameters)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("number", "text"),  # what is in a data set (04) is judged row by row, by the notebook
    [("04", None), *((number, text) for number in ("02", "05", "all") for text in (None, "", "{}"))],
)
def test_prompts_that_cannot_be_read_stop_before_a_kernel_starts(number, text, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path / "outputs"))
    path = tmp_path / "mine.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LabError, match=re.escape(str(path))):
        runs.run_all({"prompts": str(path)}) if number == "all" else runs.execute(number, {"prompts": str(path)})
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("left", "told", "untold"),
    [
        ([], ["partial.ipynb"], ["logs", "kept"]),
        (["server-baseline.log"], ["server logs lie beside it"], ["kept"]),
        (["rows.parquet"], ["what was done until then is kept"], ["logs"]),
        (["data/answers.jsonl"], ["what was done until then is kept"], ["logs"]),
    ],
)
def test_a_failed_stage_says_only_what_is_there(tmp_path, left, told, untold):
    for name in left:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    said = what_is_left(tmp_path, tmp_path / "03.partial.ipynb")
    assert all(word in said for word in told), said
    assert not any(word in said for word in untold), said


def test_plain_papermill_refuses_an_unknown_parameter_too(lab, tmp_path):
    import papermill

    source, output = tmp_path / "notebooks/03_expert_activation.ipynb", tmp_path / "out.ipynb"
    with pytest.raises(papermill.PapermillExecutionError, match="no_such"):
        papermill.execute_notebook(str(source), str(output), {"no_such": 1}, progress_bar=False)


def test_two_runs_of_the_same_stage_do_not_mix(lab, tmp_path):
    folder = tmp_path / "outputs/r/03_expert_activation"
    with alone(folder), pytest.raises(StageBusy, match="03_expert_activation"):
        runs.execute("03", {"run_id": "r"})


@pytest.mark.parametrize("name", ["2", "02", "02_ngram_baseline", "notebooks/02_ngram_baseline.ipynb"])
def test_a_notebook_has_many_names(name):
    assert runs.find_notebook(name) == "02_ngram_baseline"


@pytest.mark.parametrize("name", ["6", "profiling", "", "all of them"])
def test_other_names_are_refused(name):
    with pytest.raises(runs.UnknownNotebook, match="01_profiling"):
        runs.find_notebook(name)


def test_parameters_of_run_all_go_where_they_belong():
    given = {"scale": "smoke", "max_tokens": 9, "02.max_tokens": 7, "04.epochs": 2}
    assert parameters_for("02_ngram_baseline", given) == {"scale": "smoke", "max_tokens": 7}
    assert parameters_for("04_eagle3_pipeline", given)["epochs"] == 2
    assert "max_tokens" not in parameters_for("03_expert_activation", given)


@pytest.mark.parametrize("name", ["no_such", "02.epochs"])
def test_run_all_refuses_parameters_that_nobody_has(name):
    with pytest.raises(BadParameter, match=re.escape(name)):
        runs.run_all({name: 1})


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["-p", "no_such=1"], "no_such"),
        (["-p", "max_tokens=many"], "max_tokens"),
        (["-p", "max_tokens"], "max_tokens"),
    ],
)
def test_command_line_names_the_parameter(words, names, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["labkit", "run", "02", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    said = capsys.readouterr().err
    assert names in said
    assert "Traceback" not in said


def test_run_json_holds_plain_numbers_and_null_for_nan(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    stage = runs.Stage(NgramBaseline(run_id="r"))
    stage.save("rows", pd.DataFrame({"x_ms": [1.0]}))
    record = json.loads(
        stage.finish({"a": np.float32(1.5), "b": float("nan"), "c": np.int64(3), "d": "x"}).read_text()
    )
    assert record["headline"] == {"a": 1.5, "b": None, "c": 3, "d": "x"}
    assert record["results"] == ["rows.parquet"]


def test_provenance_tells_no_host_user_or_secret(monkeypatch):
    import getpass
    import socket

    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    text = json.dumps(provenance.provenance())
    for private in (socket.gethostname(), "hf_verysecret", f"/{getpass.getuser()}/"):
        assert private not in text
    assert re.search(r'"torch": "\d', text)


def executed_notebook(path, title):
    stream = [new_output("stream", name="stdout", text=text) for text in ("10%\r", "50%\r", "100%\n", "end\n")]
    image = new_output("display_data", data={"image/png": "iVBORw0KGgo=", "text/plain": "<Figure>"})
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "m"}, "text/plain": "slider"}
    cells = [
        new_markdown_cell(f"# {title}"),
        new_code_cell("secret_sauce = 1", outputs=[*stream, image, new_output("display_data", data=widget)]),
    ]
    path.parent.mkdir(parents=True)
    nbformat.write(new_notebook(cells=cells), path)


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """A finished run of two stages."""
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    for cls, values in (
        (
            NgramBaseline,
            {"baseline_tok_s": 40.25, "ngram_speedup": 0.9, "ngram_speedup_low": 0.8, "ngram_speedup_high": 1},
        ),
        (
            ExpertActivation,
            {"unique_experts_n4": 12.34, "unique_experts_n4_uniform": 14.0, "reuse_n4": 0.86},
        ),
    ):
        settings = cls(run_id="r")
        executed_notebook(settings.folder / f"{settings.notebook}.ipynb", settings.notebook)
        runs.Stage(settings).finish(values)
    return tmp_path / "r"


def test_pages_are_self_contained(run_folder):
    index = runs.render("r")
    pages = [index, *run_folder.glob("*/*.html")]
    assert len(pages) == 3
    for page in pages:
        text = page.read_text()
        assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", text), page
        assert not re.search(r"@import|url\(\s*[\"']?http", text), page
        assert page.stat().st_size < 3e6


def test_page_folds_code_and_shows_the_last_state_of_progress(run_folder):
    runs.render("r")
    text = (run_folder / "02_ngram_baseline/02_ngram_baseline.html").read_text()
    assert re.search(r"<details[^>]*>\s*<summary>code</summary>.*secret_sauce", text, re.S)
    assert "100%\nend" in text
    assert "50%" not in text
    assert "widget-view" not in text


def test_index_has_the_headline_table(run_folder):
    text = runs.render(run_folder).read_text()
    for figure in ("40.2 tok/s", "0.90× [0.80, 1.00]", "12.3", "r = 0.86", "14.00"):
        assert figure in text
    assert 'href="02_ngram_baseline/02_ngram_baseline.html"' in text


def test_figures_that_were_not_measured_are_dashes():
    lines = {row.what: row.value for row in headline.rows({"05_evaluation": {}})}
    assert set(lines.values()) == {"–"}


def test_unknown_run_names_what_there_is(run_folder):
    with pytest.raises(runs.UnknownRun, match="r"):
        runs.render("nothing")


def test_a_stage_without_a_page_is_no_broken_link(run_folder):
    (run_folder / "03_expert_activation/03_expert_activation.ipynb").unlink()
    text = runs.render("r").read_text()
    assert "03_expert_activation" in text
    assert 'href="03_expert_activation' not in text


def test_a_failed_run_keeps_the_earlier_results_and_is_not_taken_for_done(lab, tmp_path):
    path = runs.execute("03", {"run_id": "r"})
    before = path.read_bytes()
    lab("1 / 0")
    with pytest.raises(runs.StageFailed):
        runs.execute("03", {"run_id": "r"})
    assert path.read_bytes() == before
    record = json.loads((path.parent / "run.json").read_text())
    assert record["headline"] == {"unique_experts_n4": 1.5}
    assert "executed" not in record


def test_a_dead_kernel_is_named(lab):
    lab("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(runs.StageFailed, match="kernel died"):
        runs.execute("03", {"run_id": "r"})


def test_paths_given_from_another_folder_are_found(tmp_path, monkeypatch):
    (tmp_path / "mine.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    given = cli.parse_parameters(
        ["prompts=mine.jsonl", "02.prompts=./mine.jsonl", "target=smollm2", "head=no/such"]
    )
    assert given["prompts"] == given["02.prompts"] == str(tmp_path / "mine.jsonl")
    assert given["target"] == "smollm2"
    assert given["head"] == "no/such"


@pytest.mark.parametrize("name", ["prompts", "start"])
def test_a_stage_is_outdated_when_a_file_that_it_was_given_changes(tmp_path, name):
    """The same words on the command line are not the same data."""
    file = tmp_path / "own" / "rows.jsonl"
    file.parent.mkdir()
    file.write_text("one")
    chosen = Eagle3Pipeline(**{name: str(file if name == "prompts" else file.parent)})
    before = digest(chosen)
    assert digest(chosen) == before
    file.write_text("one and two")
    assert digest(chosen) != before
