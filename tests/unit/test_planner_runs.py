"""The plan of a run: parameter files, dry runs, refusals here, calibration and forecast; no engine is started."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import papermill
import pytest
import yaml
from typer.testing import CliRunner

from labkit import cli, pipeline, planner, settings, targets
from labkit.costmodel import Range
from labkit.engine import launch
from labkit.planner import calibration, commands, here, story, writing
from labkit.planner.rates import Rates
from labkit.runs import dry, parameter_files
from labkit.settings import NOTEBOOKS, BadParameter, Eagle3Pipeline

CASE = settings.root() / "data" / "params" / "kimi-k2.5-pcie8"
FILES = sorted(CASE.glob("*.yaml"))
SMALL = {"num_prompts": 10, "held_out": 2, "max_tokens": 100, "max_model_len": 2048, "draft_vocab_size": 1024}


@pytest.fixture(autouse=True)
def own_outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path / "outputs"))


# --- parameter files


def test_the_case_has_a_file_for_each_notebook():
    assert [path.stem for path in FILES] == list(NOTEBOOKS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_name_in_a_file_is_a_parameter_of_its_notebook(path):
    """By the notebook's own parameters cell, as papermill reads it with -f; values are of the right type."""
    values = yaml.safe_load(path.read_text())
    cell = papermill.inspect_notebook(str(settings.root() / "notebooks" / f"{path.stem}.ipynb"))
    assert set(values) <= set(cell)
    assert NOTEBOOKS[path.stem].of(values)
    assert parameter_files.read(path, path.stem) == values


def test_the_cases_plan_is_of_its_own_data():
    values = yaml.safe_load((CASE / "04_eagle3_pipeline.yaml").read_text())
    assert values["plan_conversations"] == values["num_prompts"]
    assert values["max_tokens"] < values["plan_tokens"] < values["max_model_len"]
    found = story.of_run(Eagle3Pipeline.of(values))
    assert found.served.tensor_parallel_size == values["tensor_parallel_size"]
    assert found.served.streams == values["concurrency"]
    assert not found.obstacles
    assert commands.case_of(found) == CASE.name
    assert commands.lab(found, "r") == (
        "labkit",
        "run",
        "04",
        "--run-id",
        "r",
        "--params",
        f"data/params/{CASE.name}",
    )
    other = planner.plan(found.target, found.machine, planner.Work(epochs=2), free_gb=found.free_gb)
    assert commands.lab(other, "r")[-2:] == ("-p", "epochs=2"), "what differs from the files is said"


def test_folder_for_all_prefixes_each_notebook_and_the_command_line_counts():
    found = parameter_files.read(CASE, "all")
    assert found["02.prompt_lookup_min"] == 4
    assert found["04.draft_vocab_size"] == 32_000
    merged = parameter_files.merged(found, {"max_tokens": "5", "04.epochs": "3"})
    assert merged["04.epochs"] == "3"
    assert merged["max_tokens"] == "5"
    assert "02.max_tokens" not in merged


@pytest.mark.parametrize(
    ("text", "told"),
    [("no_such: 1", "no_such"), ("- a", "no names"), ("a: [", "YAML"), ("max_tokens: many", "many")],
)
def test_bad_files_are_refused_by_name(tmp_path, text, told):
    path = tmp_path / "02.yaml"
    path.write_text(text)
    with pytest.raises(BadParameter, match=told):
        NOTEBOOKS["02_ngram_baseline"].of(parameter_files.read(tmp_path, "02"))
    with pytest.raises(BadParameter):
        parameter_files.read(tmp_path / "elsewhere", "02")


@pytest.mark.parametrize("notebook", ["all", "04"])
def test_a_folder_without_files_or_with_strange_ones_is_refused(tmp_path, notebook):
    """Else a slip in a file's name means a run with nothing but defaults."""
    with pytest.raises(BadParameter, match="no YAML file"):
        parameter_files.read(tmp_path, notebook)
    (tmp_path / "04.yml").write_text("epochs: 2")
    assert parameter_files.read(tmp_path, notebook).popitem()[1] == 2
    (tmp_path / "4.yaml").write_text("epochs: 3")
    with pytest.raises(BadParameter, match=r"4\.yaml"):
        parameter_files.read(tmp_path, notebook)


@pytest.mark.parametrize("words", ["--disk-gb nan", "--disk-gb -1", "--rent-after-days -1", "--batch-tokens 0"])
def test_plan_refuses_amounts_that_are_none(words):
    found = CliRunner().invoke(cli.app, ["plan", "--train", *words.split()])
    assert isinstance(found.exception, planner.BadPlan)


def test_dry_run_starts_no_server_that_nothing_asks():
    options = {"answers": "dataset", "prompts": "x/y", "states_backend": "transformers"}
    assert "  server " not in dry.report("04", options)[0]


# --- dry runs


def test_dry_run_of_the_case_says_plan_commands_and_refusal_and_starts_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(subprocess, "Popen", forbidden)
    monkeypatch.setattr(launch, "start", forbidden)
    done = CliRunner().invoke(cli.app, ["run", "all", "--params", str(CASE), "--dry-run"])
    assert done.exit_code == 1
    for name in NOTEBOOKS:
        assert f"{name} -> " in done.output
    for part in ("11.77 TB", "--tensor-parallel-size 8", "[2, 30, 58, 61]", "attached at http://127.0.0.1:8000"):
        assert part in done.output
    assert "REFUSED: target 'moonshotai/Kimi-K2.5' is not on this machine" in done.output
    assert "--enforce-eager" not in done.output, "those are a GPU machine's commands"
    lines = done.output.splitlines()
    started = [line for line in lines if launch.MODULE in line]
    assert started
    assert not [line for line in started if "trust" in line], "the lab's own server trusts nobody"
    assert len([line for line in lines if "adds: --trust-remote-code" in line]) == len(started)
    assert len([line for line in lines if "the lab never does unasked" in line]) == len(started)
    assert not (tmp_path / "outputs").exists()


def forbidden(*args, **kwargs):
    raise AssertionError("a dry run started something")


def test_dry_run_refuses_a_disk_that_will_not_do():
    text, well = dry.report("04", parameter_files.read(CASE, "04") | {"plan_disk_gb": 100})
    assert not well
    assert "REFUSED: 204,800,000 tokens need 11.77 TB of disk, 100.0 GB are free" in text


@pytest.mark.parametrize(
    ("number", "variants"), [("02", ["baseline", "baseline-sync", "ngram"]), ("04", ["baseline", "extract"])]
)
def test_dry_run_has_the_very_words_that_the_engine_is_started_with(monkeypatch, number, variants):
    """What engine.serve would start, caught where the process begins, against the dry run's line."""
    caught = {}

    def start(words, extra, log_path):
        caught[log_path.stem.removeprefix("server-")] = words
        raise KeyboardInterrupt

    monkeypatch.setattr("labkit.engine.server.launch.start", start)
    chosen = NOTEBOOKS[dry.find_notebook(number)].of({"scale": "smoke", "run_id": "words"})
    for server in dry.servers(chosen):
        with pytest.raises(KeyboardInterrupt):
            real(chosen, server.variant)
    assert list(caught) == variants
    text = dry.report(number, {"scale": "smoke", "run_id": "words"})[0]
    for words in caught.values():
        free = ["'<a free port>'" if before == "--port" else word for before, word in pairs(words)]
        assert launch_line(free) in text


def real(chosen, variant):
    """Start a server of a notebook by the code that the notebook itself calls."""
    target = targets.resolve(chosen.target)
    if chosen.notebook.startswith("04"):
        out, options = chosen.folder / "hidden_states", pipeline.serving(chosen) | {"log_dir": chosen.folder}
        extracting = pipeline.extract_server(target, out, chosen.aux_layers, **options)
        with extracting() if variant == "extract" else pipeline.serve(chosen, target, variant):
            pass
    from labkit.bench.measure import server_for

    options = {name: getattr(chosen, name) for name in (dry.LOOKUP if variant == "ngram" else ())}
    with server_for(chosen, variant, "", None, options):
        pass


def pairs(words):
    return zip(["", *words], words, strict=False)


def launch_line(words):
    return " ".join(word if word.startswith("'<") else shlex.quote(word) for word in words)


def test_dry_run_says_what_is_there_already(tmp_path):
    chosen = Eagle3Pipeline.of(SMALL | {"run_id": "half"})
    (chosen.folder / "data").mkdir(parents=True)
    (chosen.folder / "data" / "answers.jsonl").write_text('\n{"key": "a"}\n{"key": "b"}')
    (chosen.folder / "hidden_states").mkdir()
    (chosen.folder / "hidden_states" / "hs_0.safetensors").touch()
    text, well = dry.report("04", SMALL | {"run_id": "half"})
    assert well
    assert "stage answers: 2 stored, 12 prompts" in text
    assert "stage states: 1 files of 12" in text
    assert "stage training: to do" in text


def test_dry_run_refuses_missing_prompts_and_impossible_ranks():
    for number in ("02", "04", "05"):
        text, well = dry.report(number, {"prompts": "/nowhere/p.jsonl"})
        assert not well
        assert "file /nowhere/p.jsonl" in text
    assert "tensor_parallel_size=2 is impossible" in dry.report("04", {"tensor_parallel_size": 2})[0]
    with pytest.raises(BadParameter):
        dry.report("04", {"no_such": 1})


def test_every_command_of_the_file_is_one_that_exists():
    """labkit's parse with labkit's own parser, speculators' with speculators'."""
    from speculators.train.config.resolution import build_parser

    for command in commands.commands(planner.plan("kimi-k2.5", "rtx-pro-6000-pcie-x8"), free_gb=15_000):
        words = list(command.words)
        if words[:2] == ["labkit", "run"]:
            assert CliRunner().invoke(cli.app, [*words[1:], "--help-parameters"]).exit_code == 0
        elif words[:2] == ["labkit", "plan"]:
            assert CliRunner().invoke(cli.app, words[1:]).exit_code == 0
        elif "speculators.train" in words:
            read = build_parser().parse_args(words[words.index("speculators.train") + 1 :])
            assert read.target_layer_ids == [2, 30, 58]
            assert (read.norm_before_residual, read.norm_before_fc, read.norm_output) == (False, False, True)
            assert read.full_attention_indices == [0]
        elif words[0] == "vllm":
            assert words[1:3] == ["serve", "moonshotai/Kimi-K2.5"]
            configs = [json.loads(word) for word in words if word.startswith("{")]
            assert "extract_hidden_states" not in str(configs) or len(configs) == 2


@pytest.mark.parametrize(
    ("target", "hardware", "wanted"),
    [
        ("kimi-k2.5", "rtx-pro-6000-pcie-x8", True),
        ("mini-kimi", "nvidia-h200", False),
        ("smollm2", "nvidia-h200", False),
    ],
)
def test_lines_that_load_a_target_with_code_of_its_own_say_so_and_no_others(target, hardware, wanted):
    """All that load its configuration or tokenizer by hand; the lab's own lines never do."""
    found = planner.plan(target, hardware)
    for command in commands.commands(found):
        loads = command.words[0] == "vllm" or "speculators.train" in command.words
        assert ("--trust-remote-code" in command.words) == (wanted and loads), command
    assert ("`--trust-remote-code` lets code run" in writing.markdown(found, rent_after_days=2)) == wanted
    hub_id = commands.model_of(found)
    assert bool(dry.recipe(hub_id)) == bool(dry.recipe(f"/models/{hub_id}")) == wanted


def test_speculators_trains_by_the_settings_of_the_labs_own_line():
    """Read back by speculators: what the parameter files and the plan say, not what it would set by itself."""
    from speculators.train.config import TrainConfig

    for target, hardware, work in [
        ("kimi-k2.5", "rtx-pro-6000-pcie-x8", planner.Work(epochs=2)),
        ("smollm2", "nvidia-h200", planner.Work(ttt_steps=5, batch_tokens=4096, draft_vocab_size=8192)),
    ]:
        found = planner.plan(target, hardware, work)
        given = dict(word.split("=", 1) for word in commands.lab(found, "r") if "=" in word)
        known = commands.shipped(found) | given
        words = list(commands.speculators(found, "folder"))
        cut = words.index("speculators.train" if "speculators.train" in words else "train") + 1
        read = TrainConfig.resolve(words[cut:]).flatten()
        chosen = Eagle3Pipeline.of({name: value for name, value in known.items() if name != "run_id"})
        assert (read["epochs"], read["ttt_steps"]) == (work.epochs, work.ttt_steps)
        assert (read["total_seq_len"], read["draft_vocab_size"]) == (work.batch_tokens, work.draft_vocab_size)
        assert (read["lr"], read["loss_fn"], read["seed"]) == (chosen.learning_rate, chosen.loss, chosen.seed)
        assert read["trust_remote_code"] == (target == "kimi-k2.5")


def test_run_without_a_case_spells_its_parameters_out():
    words = commands.lab(planner.plan("smollm2", "nvidia-h200"), "own")
    given = dict(word.split("=", 1) for word in words if "=" in word)
    assert Eagle3Pipeline.of(given).num_prompts == 100_000
    assert given["plan_hardware"] == "nvidia-h200"


@pytest.mark.parametrize(("item_bytes", "form"), [(1, "fp8"), (2, "bf16")])
@pytest.mark.parametrize(("stored", "place"), [(True, "files"), (False, "on-the-fly")])
def test_the_run_keeps_its_states_as_the_plan_says(item_bytes, form, stored, place):
    found = planner.plan("smollm2", "nvidia-h200", planner.Work(item_bytes=item_bytes, stored=stored))
    given = dict(word.split("=", 1) for word in commands.lab(found, "own") if "=" in word)
    chosen = Eagle3Pipeline.of(given)
    assert (chosen.hidden_states, chosen.states_from) == (form, place)


# --- refusals here


def test_what_does_not_fit_here_is_refused_before_anything_starts(monkeypatch):
    chosen, target = Eagle3Pipeline.of(SMALL), targets.resolve("smollm2")
    assert pipeline.estimate(chosen, target).tokens == 12 * 145
    monkeypatch.setattr(here, "free_disk_gb", lambda folder, wanted: 1e-3)
    with pytest.raises(planner.DoesNotFit, match="of disk"):
        pipeline.estimate(chosen, target)
    monkeypatch.undo()
    monkeypatch.setattr(here, "free_memory_gb", lambda: 0.01)
    with pytest.raises(planner.DoesNotFit, match="training the head needs") as caught:
        pipeline.estimate(dataclasses.replace(chosen, draft_vocab_size=16_384), target)
    assert "larger GPU" in caught.value.remedy


def test_what_the_folder_holds_counts_as_free(monkeypatch, tmp_path):
    (tmp_path / "hs_0.safetensors").write_bytes(b"0" * 2_000_000)
    usage = SimpleNamespace(free=3_000_000)
    monkeypatch.setattr(here.shutil, "disk_usage", lambda folder: usage)
    assert here.free_disk_gb(tmp_path, 0.001) == pytest.approx(0.003), "enough without looking"
    assert here.free_disk_gb(tmp_path, 1.0) == pytest.approx(0.005)
    assert here.free_disk_gb(tmp_path / "not" / "yet", 1.0) == pytest.approx(0.003)


# --- calibration and forecast


def measured(**changes) -> calibration.Calibration:
    """A calibration with round figures."""
    exact = {
        "decode": Range.of(100),
        "prefill": Range.of(1000),
        "extraction": Range.of(500),
        "training": Range.of(50),
    }
    values = {
        "rates": Rates(**exact, source="test"),
        "answer_tokens": Range(40, 50, 60),
        "prompt_tokens": 20.0,
        "start_s": 10.0,
        "setup_s": 4.0,
        "seconds": 1.0,
    }
    return calibration.Calibration(**(values | changes))


def test_forecast_by_hand():
    """10 + 2 conversations of 20 + 50 tokens, 3 epochs; held-out ones at a third of a training token."""
    table = calibration.forecast(measured(), train=10, held_out=2, epochs=3, max_length=1000).set_index("step")
    assert table.loc["answers", "predicted_s"] == pytest.approx(12 * 20 / 1000 + 12 * 50 / 100)
    assert table.loc["states", "predicted_s"] == pytest.approx(10 + 12 * 70 / 500)
    assert table.loc["training", "predicted_s"] == pytest.approx(4 + 70 * 3 * (10 + 2 / 3) / 50)
    assert table.loc["training", "tokens"] == 70 * 10 * 3
    assert table.loc["states", "predicted_s_low"] == pytest.approx(7 + 12 * 60 / 500)
    assert (table["predicted_s_low"] <= table["predicted_s"]).all()
    cut = calibration.forecast(measured(), train=10, held_out=2, epochs=3, max_length=30).set_index("step")
    assert cut.loc["states", "tokens"] == 12 * 30


def test_measure_takes_prefill_off_generation(monkeypatch, tmp_path):
    """4 prompts of 10 tokens and 4 answers of 8; prefill at 100 tokens a second, so 0.4 s of them."""
    clock = iter(range(0, 1000))
    monkeypatch.setattr(calibration.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(calibration, "prefill_rate", lambda server, rows: 100.0)
    dataset = pd.DataFrame(
        {
            "input_ids": [[1] * 18] * 4,
            "prompt_tokens": 10,
            "answer_tokens": 8,
            "finish_reason": ["stop"] * 3 + ["length"],
        }
    )
    metrics = pd.DataFrame({"tokens": [100] * 10, "seconds": [float(i) / 2 for i in range(1, 11)]})
    asked = []
    found = calibration.measure(
        lambda folder, limit: asked.append(limit) or dataset,
        lambda: "server",
        lambda folder: metrics,
        scratch=tmp_path / "scratch",
        max_tokens=100,
        prompts=4,
    )
    assert asked == [100]
    assert found.rates.decode.mid == pytest.approx(32 / (1.0 - 0.4)), "one tick of the clock for the answers"
    assert found.rates.training.mid == pytest.approx(200), "100 tokens each half second"
    assert (found.start_s, found.setup_s) == (1.0, 0.0)
    assert not (tmp_path / "scratch").exists()
    assert found.answer_tokens == Range(8, 8, 8)
    again = calibration.Calibration.from_json(json.loads(json.dumps(found.as_json())))
    assert again == found


def test_cut_answers_widen_the_length_upwards():
    """Half of the answers were cut at 10 of 30 allowed tokens: 9 seen, 9 + 10 at most in the mean."""
    frame = pd.DataFrame({"answer_tokens": [8, 10], "finish_reason": ["stop", "length"]})
    found = calibration.answer_length(frame, 10, 30)
    error = 2 * 1 / 2**0.5
    assert tuple(found) == pytest.approx((9 - error, 14, 19 + error))


def test_training_rate_spans_slow_and_fast_thirds():
    """Steps of 100 tokens: three thirds at 1, 2 and 1 s a step after a slow start that does not count."""
    gaps = [30.0, 9.0, *[1.0] * 3, *[2.0] * 3, *[1.0] * 3]
    seconds = pd.Series(gaps).cumsum()
    rate = calibration.training_rate(pd.DataFrame({"tokens": 100, "seconds": seconds}))
    assert rate.mid == pytest.approx(900 / 12)
    assert rate.low == pytest.approx(50 * calibration.AROUND.low)
    assert rate.high == pytest.approx(100 * calibration.AROUND.high)


def test_kept_calibration_is_of_the_same_inputs(tmp_path):
    path, made = tmp_path / "calibration.json", []

    def measure():
        made.append(1)
        return measured()

    assert calibration.kept(path, "a", measure) == calibration.kept(path, "a", measure)
    assert len(made) == 1
    calibration.kept(path, "b", measure)
    assert len(made) == 2


def test_prefill_asks_for_one_token_of_each_prompt():
    """A real HTTP server counts the requests; rows beyond the limit are left out."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    from threading import Thread

    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        server = SimpleNamespace(model="m", base_url=f"http://127.0.0.1:{http.server_port}/v1")
        rows = [[1] * 10_000, [2] * 10_000, [3] * 10]
        assert calibration.prefill_rate(server, rows) > 0
        http.shutdown()
    assert sorted(body["prompt"][0] for body in asked) == [1, 2], "20,000 tokens are enough"
    assert {(body["max_tokens"], body["model"]) for body in asked} == {(1, "m")}


def test_costs_stand_beside_the_forecast():
    dataset = pd.DataFrame({"answer_tokens": [5, 5], "seq_len": [10, 10]})
    metrics = pd.DataFrame({"tokens": [100]})
    forecast = calibration.forecast(measured(), train=1, held_out=1, epochs=1, max_length=100)
    table = pipeline.costs(dataset, metrics, {"preparation": 1.0, "answers": 2.0, "training": 4.0}, forecast)
    table = table.set_index("step")
    assert table.loc["answers", "predicted_s"] == forecast.set_index("step").loc["answers", "predicted_s"]
    assert pd.isna(table.loc["preparation", "predicted_s"])


def test_trial_training_is_the_real_training():
    """A few steps of train.run on random states: metrics of all, nothing left in the run's folder."""
    chosen = Eagle3Pipeline.of(
        SMALL | {"max_tokens": 16, "batch_tokens": 64, "draft_vocab_size": 64, "aux_layers": "1,3,4"}
    )
    target = targets.resolve("mini-kimi")
    folder = Path(chosen.folder.parent / "scratch")
    metrics = pipeline.trial_training(chosen, target, folder)
    rows = 45 + 16 - 1  # a row pairs a state with the token after it
    assert metrics.tokens.sum() >= calibration.TRAINED_CONVERSATIONS * (rows - 3)
    assert calibration.training_rate(metrics).low > 0
    assert not chosen.folder.exists()


# --- the link


def test_notebook_02_and_04_link_the_file_that_they_write():
    for name in ("02_ngram_baseline", "04_eagle3_pipeline"):
        chosen = NOTEBOOKS[name].of({"run_id": "linked"})
        told = story.sentence(chosen, story.write(chosen))
        link = told.split("](")[1].split(")")[0]
        assert (chosen.folder / link).resolve() == (chosen.folder.parent / writing.FILE).resolve()
        assert (chosen.folder.parent / writing.FILE).exists()
        source = (settings.root() / "notebooks" / f"{name}.ipynb").read_text()
        assert "story.write(settings)" in source
