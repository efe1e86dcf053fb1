"""The glue of notebook 03 over the cost model: what-if from a length, sliders, verdict by case, measured steps."""

from __future__ import annotations

import pandas as pd
import pytest

from benchmarks.verify_cost import config
from labkit import costmodel, outlook, planner, targets
from labkit.costmodel import StepModel
from labkit.plots import costmodel as figures

KIMI, BOX = "kimi-k2.5", "rtx-pro-6000-pcie-x8"


@pytest.fixture(scope="module")
def model() -> StepModel:
    return StepModel(KIMI, BOX, reuse=0.7, draft_ms=1.0)


@pytest.fixture(scope="module")
def found() -> outlook.Outlook:
    return outlook.outlook(KIMI, BOX)


def test_a_length_at_k_is_that_length_there_and_its_rate_elsewhere(model):
    """Rate 0.5 gives 1 + 0.5 + 0.25 = 1.75 at k = 2, 1.5 at k = 1 and 1.875 at k = 3."""
    table = costmodel.at_length(model, acceptance_length=1.75, k=2).set_index("num_speculative_tokens")
    assert table.loc[[1, 2, 3], "acceptance_length"].tolist() == pytest.approx([1.5, 1.75, 1.875])
    assert table.index[table["chosen"]].tolist() == [2]
    step = model.step_ms(3) + 2 * 1.0
    assert table.loc[2, "speedup"] == pytest.approx(1.75 * model.step_ms(1) / step)


def test_a_length_that_cannot_be_is_the_nearest_that_can(model):
    table = costmodel.at_length(model, acceptance_length=6.0, k=1).set_index("num_speculative_tokens")
    assert table.loc[1, "acceptance_length"] == pytest.approx(2.0)


def test_what_ifs_are_the_single_ones_under_each_other(model):
    given = {"acceptance_length": 2.3, "k": 3}
    table = costmodel.what_ifs(model, **given, reuse={"small": 0.2})
    assert list(dict.fromkeys(table["case"])) == [
        "as predicted",
        "r small",
        "AllReduce in 25 us",
        "budget of 19 experts (lossy)",  # 0.6 of 384 (1 - (376 / 384)^4) = 31.0
    ]
    parts = {case: part.set_index("num_speculative_tokens") for case, part in table.groupby("case")}
    assert (
        parts["r small"]["step_ms"].to_dict()
        == costmodel.at_length(model, **given, r=0.2).set_index("num_speculative_tokens")["step_ms"].to_dict()
    )
    assert parts["budget of 19 experts (lossy)"]["experts_loaded"].max() == 19
    faster = parts["as predicted"]["step_ms"] - parts["AllReduce in 25 us"]["step_ms"]
    assert faster.tolist() == pytest.approx([127 * 49.1 / 2 / 1e3] * len(faster))


def test_sliders_begin_at_the_models_own_figures(model):
    lists = costmodel.choices(model, 2.94, 3)
    assert {name: values[0] for name, values in lists.items()} == {
        "k": 3,
        "acceptance_length": 2.94,
        "r": 0.7,
        "allreduce_us": 49.1,
        "budget": 0,
    }
    assert lists["budget"][-1] == 31
    costmodel.at_length(model, **{name: values[-1] for name, values in lists.items()})
    dense = costmodel.choices(StepModel("smollm2", costmodel.machine_at_hand(BANDWIDTH)), 2, 3)
    assert set(dense) == {"k", "acceptance_length"}


BANDWIDTH = costmodel.Bandwidth(20.0, 19.0, 21.0, True, "test")


def test_verdict_by_case_is_the_models_own(model):
    best = {"num_speculative_tokens": 3}
    best |= {f"acceptance_{end}": v for end, v in (("low", 1.0), ("length", 1.1), ("high", 1.15))}
    best |= {"draft_ms_low": 2.0, "draft_ms": 2.0, "draft_ms_high": 2.0}
    table = outlook.by_case(costmodel.cases(KIMI, BOX, {"all shared": 0.0}), best).set_index("case")
    assert set(table["verdict"]) == {"no-go"}
    shared = StepModel(KIMI, BOX, reuse=0.0, draft_ms=2.0)
    assert table.loc["all shared", "speedup"] == pytest.approx(1.1 * shared.step_ms(1) / (shared.step_ms(4) + 6))
    assert table.loc["every pair read", "speedup"] < table.loc["all shared", "speedup"]


def test_reuse_is_taken_over_only_by_the_model_that_it_was_measured_on():
    kimi, mini = targets.geometry(KIMI), targets.resolve("mini-kimi").geometry
    assert outlook.own_reuse(kimi, kimi, {4: 0.7}) == {4: 0.7}
    assert outlook.own_reuse(mini, kimi, {4: 0.7}) is None


def test_headline_and_conclusion_tell_the_option_behind_the_verdict(found):
    head = outlook.headline(found, 4)
    rows = found.ranked[found.ranked["possible"] & (found.ranked["option"] != "E")]
    best = rows.loc[rows["speedup"].idxmax()]
    assert head["predicted_with"] == best["draft"]
    assert (head["predicted_speedup_low"], head["predicted_speedup"]) == (best["speedup_low"], best["speedup"])
    assert head["served"] == f"{KIMI} on {BOX}"
    text = outlook.conclusion(found, recorded="mini", measured={4: 0.66}, n=4)
    for part in (found.sentence, "mini was measured at 0.66", "not of kimi-k2.5", f"{head['verify_ratio']:.2f} ["):
        assert part in text
    assert "small model" not in outlook.conclusion(found, recorded=KIMI, measured={4: 0.66}, n=4)


def test_measured_steps_hold_every_model_beside_its_prediction():
    steps = costmodel.measured_steps()
    rows = costmodel.verify_table(steps).set_index(["model", "weights"])
    assert rows["pairwise_up_to"].to_dict() == {
        ("kimi-k2.5", "bf16"): 12,
        ("kimi-k2.5", "int4"): 0,
        ("qwen3-30b-a3b", "bf16"): 4,
    }
    assert abs(rows.loc[("kimi-k2.5", "bf16"), "saved"]) < 0.03
    assert config("kimi-k2.5", "bf16")["num_hidden_layers"] == steps["layers"].iloc[0]
    assert len(figures.plot_measured_steps(steps).axes) == 3


def test_verify_table_by_hand():
    """t(1) is 2 and 2; 4 tokens take 3 shared and 4 varied; the one unseen error counts."""
    steps = pd.DataFrame(
        {
            "model": "m",
            "weights": "bf16",
            "layers": 2,
            "kind": ["shared", "shared", "varied", "varied"],
            "n": [1, 4, 1, 4],
            "measured_ms": [1.8, 3.0, 2.2, 4.0],
            "regime": ["pairwise", "unique", "pairwise", "unique"],
            "fitted": [True, False, True, True],
            "error": [0.5, -0.1, 0.5, 0.5],
        }
    )
    (row,) = costmodel.verify_table(steps).to_dict("records")
    assert row["pairwise_up_to"] == 1
    assert (row["shared"], row["varied"], row["saved"]) == pytest.approx((1.5, 2.0, 0.25))
    assert (row["median_error"], row["largest_error"]) == pytest.approx((0.1, 0.1))


def test_one_case_has_one_interval_by_k_and_by_streams(found):
    """Acceptance is uncertain in both tables; at a larger k the same rates give a wider range of lengths."""
    by_k, by_streams = (
        next(table for title, table in found.tables.items() if title.startswith(start))
        for start in ("By k", "By streams")
    )
    k = found.best["num_speculative_tokens"]
    ends = ["speedup_low", "speedup", "speedup_high"]
    row = by_k.set_index("num_speculative_tokens").loc[k, ends]
    assert row.tolist() == pytest.approx(by_streams.set_index("streams").loc[1, ends].tolist())
    assert row.tolist() == pytest.approx([found.best[end] for end in ends])


@pytest.mark.parametrize(("hardware", "fits"), [("nvidia-h200", False), ("nvidia-a100-80gb", False), (BOX, True)])
def test_weights_that_no_gpu_holds_are_no_outlook(hardware, fits):
    """Kimi-K2.5 in INT4 takes about 600 GB (its checkpoint: 595): one GPU of 141 or 80 GB will not do."""
    if fits:
        assert outlook.outlook(KIMI, hardware).verdict
        return
    with pytest.raises(
        planner.DoesNotFit, match=rf"(?s)takes 59\d GB of each of 1 GPUs of {hardware}.*fits on {BOX}"
    ):
        outlook.outlook(KIMI, hardware)


def test_ranks_are_those_asked_for_and_no_more_than_gpus():
    assert outlook.outlook("smollm2", BOX, tensor_parallel_size=1).model.tensor_parallel_size == 1
    with pytest.raises(costmodel.BadEstimate, match="tensor_parallel_size=3 on nvidia-h200"):
        outlook.outlook("smollm2", "nvidia-h200", tensor_parallel_size=3)


@pytest.mark.parametrize("name", ["nvidia-h200", "nvidia-a100-80gb"])
def test_arithmetic_ends_what_verification_costs_nothing(name):
    """Many tokens cost more than their bytes: 2 x 0.135e9 weights x 4096 tokens over 500 or 156 TFLOPS."""
    model = StepModel("smollm2", name, reuse=1.0)
    tokens, rate = 4096, model.hardware.tflops.mid * 1e12
    assert model.step_ms(1, streams=tokens) > 1e3 * 2 * 0.106e9 * tokens / rate
