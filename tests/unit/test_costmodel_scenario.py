"""The reference scenario, the published figures and `labkit plan`, against moe.md section 3 and closed forms."""

from __future__ import annotations

import json
import shutil

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from typer.testing import CliRunner

from labkit import costmodel, experts, files, outlook, settings
from labkit.cli import app
from labkit.costmodel import Range, UnknownHardware, drafting, scenario
from labkit.costmodel.published import published
from labkit.plots import costmodel as figures
from labkit.targets.geometry import UnknownGeometry

TARGET, SERVER = "kimi-k2.5", "rtx-pro-6000-pcie-x8"
TUNED = f"{SERVER}-tuned"


@pytest.fixture(scope="module")
def reference() -> scenario.Scenario:
    found = scenario.scenario_for(TARGET, SERVER)
    assert found is not None
    return found


@pytest.fixture
def own_data(tmp_path, monkeypatch):
    """A copy of data/ that a test may change."""
    shutil.copytree(
        settings.root() / "data", tmp_path / "data", ignore=shutil.ignore_patterns("*prompts", "targets")
    )
    monkeypatch.setenv("LABKIT_ROOT", str(tmp_path))
    return tmp_path / "data"


def test_the_measured_step_is_a_fit_and_says_so(reference):
    table = scenario.fit_table(reference, scenario.model_of(TARGET, SERVER)).set_index("figure")
    value = table["value"]
    assert value["AllReduce, ms"] == pytest.approx(0.515 * 12.1)
    assert value["one AllReduce, us"] == pytest.approx(49.1, abs=0.05)  # 6.23 ms over 127
    assert value["reading, ms"] == pytest.approx(4.30, abs=0.01)  # 6.17 GB at 0.8 x 1.792 TB/s
    assert value["everything else, ms"] == pytest.approx(12.1 - 0.0491 * 127 - 4.304, abs=0.01)
    assert "fit" in table.loc["one AllReduce, us", "kind"]
    assert "RESIDUAL" in table.loc["everything else, ms", "kind"]
    assert "123" in table.loc["AllReduces a step", "kind"]
    parts = scenario.step_table(scenario.model_of(TARGET, SERVER)).set_index("part")
    assert parts["share"].sum() == pytest.approx(1)
    assert parts.loc["AllReduce", "share"] == pytest.approx(0.515, abs=0.001)
    assert parts["kind"][["other", "AllReduce", "routed experts"]].tolist() == ["RESIDUAL", "fit", "predicted"]
    assert parts["gb"].sum() / 1.792 == pytest.approx(3.44, abs=0.01)  # ms at the datasheet's bandwidth


def test_the_ngram_table_of_the_facts(reference):
    table = scenario.ngram_table(reference, scenario.model_of(TARGET, SERVER))
    found = table.set_index(["num_speculative_tokens", "reuse", "slowdown"])["implied_acceptance_length"]
    expected = {
        (3, 1.0): (1.18, 1.02),
        (3, 0.7): (1.11, 0.96),
        (5, 1.0): (1.35, 1.17),
        (5, 0.7): (1.24, 1.07),
    }
    for (k, reuse), ends in expected.items():
        assert [found[k, reuse, s] for s in (1.09, 1.26)] == pytest.approx(ends, abs=0.006)


def test_the_head_table_of_the_facts(reference):
    table = scenario.head_table(reference, scenario.model_of(TARGET, SERVER))
    found = table.set_index(["case", "acceptance_length"])
    real = "step overhead of the published run"
    assert found.loc[(real, 2.94), "speedup"] == pytest.approx(1.65, abs=0.005)
    assert found.loc[(real, 2.3), "speedup"] == pytest.approx(1.29, abs=0.005)
    assert found.loc[(real, 2.3), "break_even"] == pytest.approx(1.8, abs=0.03)
    free = found.loc[[case for case in found.index.get_level_values(0) if "free" in case], "break_even"]
    assert (free.min() > 1.14) & (free.max() < 1.3)  # 1.2 to 1.3, less with reuse
    # The overhead itself: 2.30 tokens at 114.1 tok/s over 11.3 ms
    assert reference["head"]["step_over_plain"] == pytest.approx(2.30 / 114.1 * 88.5, abs=0.005)


def test_published_boxes_are_predicted_and_their_errors_are_those(reference):
    table = scenario.boxes_table(reference)
    # 4.23 ms reading with 512 tokens of cache, 123 AllReduces of 24.3 us, the reference server's residual
    gb = 6.172 - (2048 - 512) * 61 * 576 * 2 / 1e9
    step = gb / (0.8 * 1.792) + 123 * 24.3e-3 + 1.57
    assert table["predicted_tok_s"].tolist() == pytest.approx([1e3 / step] * 3, rel=0.002)
    assert table["error"].tolist() == pytest.approx([1e3 / step / t - 1 for t in (78, 90, 101)], abs=0.003)


def test_the_published_streams(reference):
    table = scenario.streams_table(reference).set_index("streams")
    assert table.loc[1, "speedup_published"] == pytest.approx(114.1 / 88.5)
    assert table.loc[128, "speedup_published"] == pytest.approx(0.98, abs=0.005)  # parity
    assert table.loc[1, "speedup_low"] < table.loc[1, "speedup_published"] < table.loc[1, "speedup_high"]
    for streams in (1, 32, 128):
        row = table.loc[streams]
        assert row["plain_error"] == pytest.approx(row["plain"] / row["plain_published"] - 1)
    assert abs(table.loc[64, "plain_error"]) < 0.05


def test_a_drafted_token_by_hand():
    # Llama-shaped head: attention over two widths, one feed-forward, 32,000 outputs; bf16; fc on every rank.
    head = drafting.head("AQ-MedAI/Kimi-K25-eagle3")
    width, heads = 7168, 64 * 128
    weights = 2 * width * 3 * heads + heads * width + 3 * width * 18432 + 32000 * width
    each, once = drafting.head_gigabytes(head, 8)
    assert each == pytest.approx(weights * 2 / 8 / 1e9)
    assert once == pytest.approx(3 * width * width * 2 / 1e9)
    machine = costmodel.hardware(SERVER)
    found = drafting.draft_ms(head, machine, 8, 3)
    overhead = Range.of(drafting.drafts()["overhead"])
    assert found.mid == pytest.approx(overhead.mid * ((each + once / 3) / (0.8 * 1.792) + 3 * 0.0491))
    assert found.low == pytest.approx((each + once / 3) / (0.9 * 1.792) + 3 * 0.0491)


def test_an_mla_head_by_hand():
    head = drafting.head("kimi-k2.5-eagle3-mla")
    width, low = 7168, 1536 + 512 + 64
    high = 1536 * 64 * 192 + 512 * 64 * 256 + 64 * 128 * width
    each, _once = drafting.head_gigabytes(head, 8)
    sharded = high + 3 * width * 18432 + 163840 * width
    assert each == pytest.approx((sharded / 8 + 2 * width * low) * 2 / 1e9)


def test_the_overhead_of_a_drafted_token_is_the_published_runs():
    # K2.6: a step of 20.2 ms over 11.3 ms; v(4) by the model; the rest is three drafted tokens.
    model = costmodel.StepModel(TARGET, TUNED, context_tokens=512, reuse=scenario.published_trend())
    verify = model.verify_ratio(4).mid
    rest = (2.30 / 114.1 * 88.5 - verify) * 1e3 / 88.5 / 3
    head = drafting.head("kimi-k2.5-eagle3-mla")
    each, once = drafting.head_gigabytes(head, 8)
    bare = (each + once / 3) / (0.8 * 1.792) + 3 * 0.0243
    assert rest / bare == pytest.approx(drafting.drafts()["overhead"]["high"], rel=0.02)


def test_published_figures_beside_the_model():
    table = published()
    assert set(range(3, 8)) | {20, 21, 22, 24} <= set(table["row"])
    known = table.dropna(subset=["predicted"])
    assert known["error"].tolist() == pytest.approx((known["predicted"] / known["published"] - 1).tolist())
    row = {r.row: r for r in known.itertuples()}
    # 453 MB over 2.039 TB/s at 0.8; Amdahl of Cohere: 0.3 x 20.36 / 8 + 0.7
    assert row[20].predicted == pytest.approx(0.453 / 2.039 / 0.8, abs=0.0005)
    cohere = known[known["what"].str.contains("verify ratio")].iloc[0]
    assert cohere["predicted"] == pytest.approx(0.3 * 20.36 / 8 + 0.7)
    # Mixtral at 8 tokens and at 1: attention, head and routers once, experts by independence, of 2 of 8
    rest = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024) + 4096 * 32000 + 32 * 4096 * 8
    expert = 32 * 3 * 4096 * 14336
    assert row[12].high == pytest.approx((rest + 8 * (1 - 0.75**8) * expert) / (rest + 2 * expert), rel=1e-6)
    assert table.loc[table["row"] == 24, "predicted"].isna().all()
    # The H200's steps: dearer up to 12 tokens, where pairs are loaded, than at 16
    h200 = known[known["row"] == 0]
    assert h200["error"].abs().max() < 0.11
    assert h200["how"].str.contains("pairwise").tolist() == [True] * 4 + [False]


def test_predicting_a_model_does_not_use_its_own_figures():
    # The reuse of N=128 is left out when N=128 is predicted: with it the prediction would be another.
    table = published().set_index("what")
    others = experts.published_reuse()
    others = others[others["n_routed_experts"] != 128]
    r = experts.reuse_trend(others, [4])[4][1]
    independent = 128 * (1 - (1 - 8 / 128) ** 4)
    assert table.loc["unique experts, N=128, k=8 (Cohere)", "predicted"] == pytest.approx(
        8 + r * (independent - 8)
    )


def test_a_changed_bandwidth_changes_the_verify_ratio_by_the_closed_form(own_data):
    hardware = files.read_json(own_data / "hardware.json")
    hardware[SERVER]["bandwidth_gb_s"]["mid"] = 3584
    files.write_json(own_data / "hardware.json", hardware)
    found = outlook.outlook(TARGET, SERVER, reuse=1.0)
    row = found.tables["Verifying n tokens"].set_index("n").loc[4]
    # The measured step stays 12.1 ms; an expert costs 3.0966 MB x 60 over 0.8 x 3584 GB/s
    extra = 384 * (1 - (1 - 8 / 384) ** 4) - 8
    step = 12.1 + extra * 60 * 44.04e6 * 0.5625 / 8 / (0.8 * 3584e9) * 1e3
    assert row["step_ms"] == pytest.approx(step, abs=0.001)
    assert row["verify_ratio"] == pytest.approx(step / 12.1, abs=1e-4)


def test_a_changed_allreduce_changes_the_boxes_by_the_closed_form(own_data):
    before = scenario.boxes_table(scenario.scenario_for(TARGET, SERVER))["predicted_tok_s"].iloc[0]
    hardware = files.read_json(own_data / "hardware.json")
    hardware[TUNED]["allreduce_us"] = {"mid": 10.0, "source": "a test"}
    files.write_json(own_data / "hardware.json", hardware)
    after = scenario.boxes_table(scenario.scenario_for(TARGET, SERVER))["predicted_tok_s"].iloc[0]
    assert 1e3 / before - 1e3 / after == pytest.approx(123 * (24.3 - 10.0) / 1e3)


def test_a_residual_follows_the_allreduce_of_the_measured_step(own_data):
    hardware = files.read_json(own_data / "hardware.json")
    hardware[SERVER]["allreduce_us"]["mid"] = 40.0
    files.write_json(own_data / "hardware.json", hardware)
    terms = costmodel.StepModel(TARGET, SERVER).terms(1)
    assert sum(terms.values()) == pytest.approx(12.1)
    assert terms["AllReduce"] == pytest.approx(127 * 0.040)
    assert terms["other"] == pytest.approx(12.1 - 127 * 0.040 - 4.304, abs=0.005)


def test_plan_prints_the_reference_scenario_and_a_verdict():
    told = CliRunner().invoke(app, ["plan", "--target", TARGET, "--hardware", SERVER], catch_exceptions=False)
    assert told.exit_code == 0
    for words in ("RESIDUAL", "grouped int4", "Options, in the order to try", "129,280 against 163,840", "12.1"):
        assert words in told.output
    assert "at 128 streams" in told.output or "64, 128 streams" in told.output  # where the model was wrong
    last = told.output.strip().splitlines()[-1]
    assert last.startswith(("go:", "no-go:", "unclear:"))


def test_plan_as_json_and_next_steps(tmp_path):
    words = ["plan", "--target", TARGET, "--hardware", SERVER, "--json", "--engine", "vllm 0.16"]
    found = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).output)
    assert (found["target"], found["hardware"]) == (TARGET, SERVER)
    assert found["verdict"] in ("go", "no-go", "unclear")
    rows = {row["n"]: row for row in found["tables"]["Verifying n tokens"]}
    assert rows[1]["verify_ratio"] == 1
    by_k = next(table for title, table in found["tables"].items() if title.startswith("By k"))
    assert [r["num_speculative_tokens"] for r in by_k if r["best"]] == [
        max(by_k, key=lambda r: r["speedup"])["num_speculative_tokens"]
    ]
    heads = [o for o in found["options"] if o["option"] == "C"]
    assert heads
    assert not any(o["possible"] for o in heads)  # vLLM 0.16 serves no head for it
    words = ["plan", "--target", "qwen3-30b-a3b", "--hardware", "nvidia-h200", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert (tmp_path / "next-steps.md").read_text().startswith("# Next steps: qwen3-30b-a3b on nvidia-h200")


def test_unknown_names_list_the_known_ones():
    with pytest.raises(UnknownGeometry, match=r"deepseek-v3.*kimi-k2\.5"):
        outlook.outlook("no-such-model", SERVER)
    with pytest.raises(UnknownHardware, match=SERVER):
        outlook.outlook(TARGET, "abacus")


def test_figures_draw_the_frames_they_are_given():
    model = costmodel.StepModel(TARGET, SERVER, reuse=(0.6, 0.8, 1.0))
    table = pd.concat([costmodel.what_if(model, acceptance=a, case=f"a={a}") for a in (0.5, 0.8)])
    ax = figures.plot_speedup(table)
    lines = [line for line in ax.get_lines() if len(line.get_xdata()) == 8]
    assert [list(line.get_ydata()) for line in lines] == [
        part["speedup"].tolist() for _, part in table.groupby("case", sort=False)
    ]
    assert ax.get_ylabel().endswith("(×)")
    streams = costmodel.concurrency(model, 2.3, 3)
    drawn = figures.plot_concurrency(streams).get_lines()[0]
    assert list(drawn.get_ydata()) == streams["speedup"].tolist()
    figures.plot_verify(table)
    plt.close("all")
