"""Regimes, questions, verdict, what-if and calibration, by hand and against published figures."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pandas as pd
import pytest

from labkit import costmodel
from labkit.costmodel import BadEstimate, Range, StepModel
from labkit.costmodel.experts import fullest_rank
from labkit.costmodel.step import checked_length
from labkit.experts import expected_unique
from labkit.targets import geometry

SERVER = "rtx-pro-6000-pcie-x8"
# moe.md section 6: n, ms a step, unique experts a layer; vLLM 0.24, bf16, one H200.
H200 = pd.DataFrame(
    {
        "n": [1, 2, 3, 4, 5, 6, 8, 12, 16],
        "streams": 1,
        "step_ms": [2.28, 2.38, 2.84, 3.30, 3.83, 4.27, 5.21, 7.09, 2.16],
    }
)


def h200(**changes) -> StepModel:
    """Four layers of Kimi-K2.5 in bf16, whose dummy weights route all tokens alike."""
    four = dataclasses.replace(geometry("kimi-k2.5"), num_hidden_layers=4, quantization_config={})
    return StepModel(four, "nvidia-h200", **({"reuse": 0.0} | changes))


def kimi(**changes) -> StepModel:
    return StepModel("kimi-k2.5", SERVER, **changes)


def test_unique_experts_of_the_facts():
    # moe.md rows 1 and 2
    row1 = [expected_unique(384, 8, n) for n in (1, 2, 3, 4, 5, 6, 8, 16)]
    assert row1 == pytest.approx([8, 15.83, 23.50, 31.01, 38.37, 45.57, 59.52, 109.82], abs=0.006)
    assert [expected_unique(256, 8, n) for n in (4, 8, 16)] == pytest.approx([30.5, 57.4, 102.0], abs=0.06)
    # rows 3, 4, 6: what independence would be
    assert expected_unique(128, 8, 4) == pytest.approx(29.12, abs=0.005)
    assert expected_unique(256, 8, 15) == pytest.approx(97.0, abs=0.05)
    assert [expected_unique(256, 10, n) for n in (5, 16)] == pytest.approx([46.2, 120.7], abs=0.06)


def test_the_h200_regimes_and_what_they_cost():
    model = h200()
    assert [model.regime(n).loading for n in (1, 12, 13)] == ["pairwise", "pairwise", "unique"]
    assert costmodel.pairwise_limit(model.geometry) == 384 // (8 * 4)
    assert "12 tokens x 8 experts x 4 = 384 <= 384" in model.regime(12).why
    assert model.regime(4, streams=4).loading == "unique"  # 16 tokens in all
    # 0.47 ms a token: 3 layers x 8 experts x 88 MB (3 x 7168 x 2048 x 2 B) at 0.94 x 4.8 TB/s
    each = 3 * 8 * 3 * 7168 * 2048 * 2 / (0.94 * 4.8e12) * 1e3
    assert model.step_ms(9) - model.step_ms(8) == pytest.approx(each, rel=1e-6)
    assert each == pytest.approx(0.47, abs=0.005)


def test_measured_times_tell_the_regime():
    found = costmodel.which_regime(H200, h200())
    assert found["loading"].iloc[0] == "auto"  # vLLM's rule: pairs up to 12, then unique
    assert found["error"].iloc[0] < 0.06 < 0.25 < found["error"].iloc[1]


def test_two_points_of_the_h200_predict_the_others():
    model = costmodel.calibrate(H200[H200["n"].isin([1, 12])], model=h200())
    others = H200[~H200["n"].isin([1, 12])]
    ratios = np.array([model.verify_ratio(int(n)).mid for n in others["n"]])
    measured = others["step_ms"].to_numpy() / 2.28
    assert ratios[1:] == pytest.approx(measured[1:], rel=0.12)
    assert ratios[0] == pytest.approx(measured[0], rel=0.15)  # n = 2 took hardly longer than n = 1 there
    # What was fitted: 4.8 TB/s almost, where the growth alone gave 4.5
    assert model.hardware.efficiency.mid == pytest.approx(0.97, abs=0.05)


@pytest.mark.parametrize(
    ("device", "parallel", "loading"),
    [("cuda", False, "pairwise"), ("cuda", True, "unique"), ("cpu", False, "unique")],
)
def test_expert_parallelism_and_the_cpu_sort_tokens(device, parallel, loading):
    model = geometry("qwen3-30b-a3b")
    assert costmodel.regime(model, 4, device=device, expert_parallel=parallel).loading == loading
    assert costmodel.regime(geometry("smollm2"), 4).loading == "dense"


def test_the_fullest_rank_by_simulation():
    rng = np.random.default_rng(0)
    for unique in (8, 31):
        drawn = [np.bincount(rng.permutation(384)[:unique] // 48, minlength=8).max() for _ in range(20_000)]
        assert fullest_rank(np.array([float(unique)]), 384, 8)[0] == pytest.approx(np.mean(drawn), rel=0.01)
    low, high = fullest_rank(np.array([8.0, 9.0]), 384, 8)
    assert fullest_rank(np.array([8.25]), 384, 8)[0] == pytest.approx(0.75 * low + 0.25 * high)
    assert fullest_rank(np.array([384.0]), 384, 8)[0] == pytest.approx(48)


def test_expert_parallelism_reads_the_fullest_rank():
    parallel = kimi(expert_parallel=True)
    one = 60 * costmodel.expert_bytes(parallel.geometry) / 1e9
    # By simulation 8 experts leave 2.58 on the fullest of 8 ranks: expert parallelism reads 2.58 times as much.
    assert parallel.gigabytes(1)["routed experts"] == pytest.approx(2.58 * one, rel=0.01)
    assert kimi().gigabytes(1)["routed experts"] == pytest.approx(one)  # 8 experts over 8 ranks


def test_an_expert_budget_caps_what_is_read():
    assert kimi(expert_budget=20).experts_loaded(4) == 20
    assert kimi(expert_budget=20).experts_loaded(2) == pytest.approx(expected_unique(384, 8, 2))
    saved = kimi().step_ms(4) - kimi(expert_budget=20).step_ms(4)
    # 0.130 ms an expert at efficiency .8 (moe.md section 3)
    assert saved == pytest.approx((expected_unique(384, 8, 4) - 20) * 0.130, rel=0.01)


def test_arithmetic_takes_over_where_it_is_the_longer():
    machine = dataclasses.replace(costmodel.hardware(SERVER), tflops=Range.of(100.0))
    dense = StepModel("smollm2", dataclasses.replace(machine, gpus=1), tensor_parallel_size=1)
    weights = costmodel.weights(dense.geometry)
    heads = weights.loc[weights["part"] == "output head", "weights"].iloc[0]
    few, many = dense.terms(1)["output head"], dense.terms(1, 1000)["output head"]
    assert few == pytest.approx(heads * 2 / 1e9 / (0.8 * 1.792))  # bytes: GB / (GB/ms)
    assert many == pytest.approx(2 * heads * 1000 / 100e12 * 1e3)  # 2 FLOP a weight and token


def test_allreduce_by_message_size():
    # moe.md row 22: 24.1 to 24.6 us up to 64 KB, 28.0 at 256 KB
    machine = costmodel.hardware("rtx-pro-6000-pcie-x8-tuned")
    tuned = StepModel("kimi-k2.5", machine)
    each = [tuned.terms(n)["AllReduce"] / 123 * 1e3 for n in (1, 4)]
    assert each == pytest.approx([24.3, 24.3])  # 14 and 56 KiB
    beyond = 28.0 - 24.3
    assert tuned.terms(18)["AllReduce"] / 123 * 1e3 - 24.3 == pytest.approx(
        beyond * (252 - 64) / (256 - 64), abs=0.02
    )


def test_acceptance_lengths():
    assert costmodel.length_at(0.6, 3) == pytest.approx((1 - 0.6**4) / (1 - 0.6))  # Leviathan
    assert costmodel.length_at([0.633, 0.404 / 0.633, 0.264 / 0.404], 3) == pytest.approx(
        1 + 0.633 + 0.404 + 0.264
    )
    assert costmodel.length_at([0.8, 0.5], 4) == pytest.approx(1 + 0.8 + 0.4 + 0.2 + 0.1)  # the last rate goes on
    assert costmodel.length_at(costmodel.rate_for(2.3, 3), 3) == pytest.approx(2.3)
    with pytest.raises(BadEstimate, match="between 0 and 1"):
        costmodel.length_at(1.2, 3)


def test_published_step_ratios():
    # row 21: TPOT 14.07 to 15.85 ms at 39% of one drafted token; row 7: 1.77 tokens a cycle, 16.8 to 26.7 ms
    assert 15.85 / 14.07 * costmodel.length_at(0.39, 1) == pytest.approx(1.57, abs=0.005)
    times = pd.DataFrame({"n": [1, 2], "streams": 1, "step_ms": [16.8, 26.7]})
    times = times.assign(low_ms=times["step_ms"], high_ms=times["step_ms"])
    assert costmodel.calibrate(times).speedup(1.77, 1)[1] == pytest.approx(1.11, abs=0.005)


def test_the_best_k_by_brute_force():
    model = kimi(draft_ms=0.9, host_ms=0.4)
    table = costmodel.speedups(model, 0.65, streams=(1, 8))
    for streams, row in costmodel.best_k(table).set_index("streams").iterrows():
        by_hand = {}
        for k in range(1, 9):
            length = sum(0.65**i for i in range(k + 1))
            spent = model.step_ms(k + 1, int(streams)) + 0.9 * k + 0.4
            by_hand[k] = length * model.step_ms(1, int(streams)) / spent
        assert row["num_speculative_tokens"] == max(by_hand, key=by_hand.get)
        assert row["speedup"] == pytest.approx(max(by_hand.values()))
        assert row["tpot_ms"] == pytest.approx(model.step_ms(1, int(streams)) / max(by_hand.values()))


def test_where_speculation_stops_paying():
    frame = pd.DataFrame({"streams": [1, 2, 4, 8], "speedup": [1.5, 0.9, 1.2, 0.95]})
    frame = frame.assign(speedup_low=[1.1, 0.8, 0.9, 0.8], speedup_high=[1.9, 1.2, 1.4, 1.1])
    assert costmodel.stops_paying(frame) == {"low": 2, "mid": 8, "high": float("inf")}
    never = frame.assign(speedup=0.5, speedup_low=0.4, speedup_high=0.9)
    assert set(costmodel.stops_paying(never).values()) == {1.0}


def test_throughput_of_all_streams():
    model = kimi()
    row = costmodel.concurrency(model, 2.0, 3, [8]).iloc[0]
    assert row["tok_s"] == pytest.approx(8 / model.step_ms(1, 8) * 1e3)
    assert row["speculative_tok_s"] == pytest.approx(8 * 2.0 / model.step_ms(4, 8) * 1e3)


@pytest.mark.parametrize(
    ("length", "word"), [((2.9, 2.95, 3.0), "go"), ((1.0, 1.0, 1.05), "no-go"), ((1.0, 1.5, 3.0), "unclear")]
)
def test_the_verdict_is_the_intervals_place(length, word):
    found = costmodel.verdict(kimi(reuse=(0.6, 0.8, 1.0), draft_ms=(0.5, 1.0, 1.5)), length, 3)
    assert found.word == word
    assert tuple(found.speedup) == kimi(reuse=(0.6, 0.8, 1.0), draft_ms=(0.5, 1.0, 1.5)).speedup(length, 3)
    assert ("next measure" in found.sentence()) == (word == "unclear")


def test_the_verdict_names_what_widens_it_most():
    ranges = {"reuse": (0.6, 0.8, 1.0), "draft_ms": (0.2, 1.0, 3.0)}
    model = kimi(**ranges)
    moved = costmodel.sensitivity(model, (1.9, 2.0, 2.1), 3).set_index("input")
    for name, (low, mid, high) in ranges.items():
        middles = {"reuse": 0.8, "draft_ms": 1.0}
        exact = dataclasses.replace(
            costmodel.hardware(SERVER), efficiency=Range.of(0.8), allreduce_us_per_kib=Range.of(0.0)
        )
        ends = [StepModel("kimi-k2.5", exact, **(middles | {name: end})).speedup(2.0, 3)[1] for end in (low, high)]
        assert moved.loc[name, ["low", "high"]].tolist() == pytest.approx(sorted(ends)), (name, mid)
    assert moved.index[0] == "draft_ms"
    assert costmodel.verdict(model, (1.9, 2.0, 2.1), 3).widest == "draft_ms"
    acceptance = costmodel.verdict(model, (1.0, 2.0, 4.0), 3)
    assert acceptance.widest == "acceptance_length"
    assert "counters" in acceptance.next_measurement


def test_what_if_follows_the_closed_form():
    model = kimi(draft_ms=0.5)
    table = costmodel.what_if(model, acceptance=0.6, k=3, reuse=0.6, allreduce_us=24.0, budget=20)
    row = table[table["chosen"]].iloc[0]
    assert (row["num_speculative_tokens"], row["n"]) == (3, 4)
    # Reading and the residual stay as in the measured step, 127 AllReduces become shorter.
    plain = 12.1 - 127 * (49.1 - 24.0) / 1e3
    experts = min(20, 8 + 0.6 * (expected_unique(384, 8, 4) - 8))
    expert_ms = 60 * costmodel.expert_bytes(geometry("kimi-k2.5")) / 8 / (0.8 * 1792e9) * 1e3
    step = plain + (experts - 8) * expert_ms
    assert row["experts_loaded"] == pytest.approx(experts)
    assert row["step_ms"] == pytest.approx(step)
    assert row["verify_ratio"] == pytest.approx(step / plain)
    assert row["speedup"] == pytest.approx((1 + 0.6 + 0.36 + 0.216) * plain / (step + 3 * 0.5))
    assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]


def test_what_if_changes_nothing_when_nothing_is_assumed():
    model = kimi(draft_ms=0.5)
    table = costmodel.what_if(model, acceptance=0.6).set_index("num_speculative_tokens")
    same = costmodel.speedups(model, 0.6).set_index("num_speculative_tokens")
    assert table["speedup"].tolist() == pytest.approx(same["speedup"].tolist())


def times_of(model: StepModel, ns, streams=(1,)) -> pd.DataFrame:
    rows = [{"n": n, "streams": s, "step_ms": model.step_ms(n, s)} for n, s in itertools.product(ns, streams)]
    return pd.DataFrame(rows)


def test_calibration_finds_what_made_the_times():
    machine = dataclasses.replace(
        costmodel.hardware("nvidia-h200"), efficiency=Range.of(0.6), token_ms=Range.of(0.08)
    )
    true = StepModel("qwen3-30b-a3b", machine, other_ms=1.7, loading="unique", reuse=0.7)
    guess = StepModel("qwen3-30b-a3b", "nvidia-h200", loading="unique", reuse=0.7)
    found = costmodel.calibrate(times_of(true, (1, 2, 4, 8), (1, 8)), model=guess, draft_ms=0.3)
    assert found.hardware.efficiency.mid == pytest.approx(0.6, rel=0.03)
    assert found.other_ms == pytest.approx(1.7, rel=0.1)
    assert found.hardware.token_ms.mid == pytest.approx(0.08, rel=0.1)
    assert found.step_ms(16) == pytest.approx(true.step_ms(16), rel=0.02)
    assert found.draft_ms == Range.of(0.3) or found.draft_ms == 0.3
    assert found.speedup(2.0, 3)[1] == pytest.approx(2 * found.step_ms(1) / (found.step_ms(4) + 0.9))
    told = found.inputs().set_index("name")["source"]
    assert told["efficiency"] == told["other_ms"] == "fitted to 8 measured step times"


@pytest.mark.parametrize("efficiency", [0.5, 0.7, 1.0, 1.5, 2.5])
@pytest.mark.parametrize("token_ms", [0.0, 0.5, 2.0])
def test_two_points_suffice_however_fast_the_kernels_are(efficiency, token_ms):
    # A CPU whose kernels read half to 2.5 times as fast as the benchmark, and tokens at up to 12% of a step.
    machine = costmodel.machine_at_hand(costmodel.Bandwidth(10.0, 9.5, 10.5, True, "made up"))
    moe = dataclasses.replace(geometry("qwen3-30b-a3b"), num_hidden_layers=8, hidden_size=1024, vocab_size=49152)
    moe = dataclasses.replace(moe, moe_intermediate_size=384, n_routed_experts=64, num_attention_heads=8)
    real = dataclasses.replace(machine, efficiency=Range.of(efficiency), token_ms=Range.of(token_ms))
    true = StepModel(moe, real, other_ms=6.0, context_tokens=64)
    found = costmodel.calibrate(times_of(true, (1, 8)), model=StepModel(moe, machine, context_tokens=64))
    for n in (2, 3, 4, 6):
        assert found.verify_ratio(n).mid == pytest.approx(true.verify_ratio(n).mid, rel=0.05)


def test_calibration_needs_two_points_and_t1():
    model = kimi()
    with pytest.raises(BadEstimate, match="two points"):
        costmodel.calibrate(times_of(model, (1,)), model=model)
    with pytest.raises(BadEstimate, match=r"no t\(1\)"):
        costmodel.calibrate(times_of(model, (2, 4)), model=model)


def test_every_input_has_a_source_and_an_order():
    for name, hardware in itertools.product(("kimi-k2.5", "qwen3-30b-a3b", "smollm2"), costmodel.known_hardware()):
        tp = 0 if name == "kimi-k2.5" else 1
        table = StepModel(name, hardware, tensor_parallel_size=tp).inputs()
        assert (table["source"].str.len() > 0).all(), table[table["source"] == ""]
        assert (table["low"] <= table["mid"]).all()
        assert (table["mid"] <= table["high"]).all()
        assert table["name"].is_unique
    table = kimi().inputs().set_index("name")
    assert table.loc["other_ms", "source"].startswith("RESIDUAL")
    assert table.loc["kv_bytes_per_token", "mid"] == 61 * 576 * 2
    assert table.loc["expert_bytes", "mid"] == 3 * 7168 * 2048 * (0.5 + 2 / 32)
    assert table.loc["allreduces", ["mid", "unit"]].tolist() == [127, "a step"]


def test_the_machine_at_hand_shares_its_memory():
    told = costmodel.Bandwidth(20.0, 18.0, 21.0, True, "made up")
    machine = costmodel.machine_at_hand(told, ranks=2)
    assert (machine.device, machine.bandwidth_gb_s.mid) == ("cpu", 10.0)
    assert tuple(machine.efficiency) == pytest.approx((0.9, 1.0, 1.05))


def test_lengths_are_checked():
    assert checked_length((1, 2, 4), 3) == Range(1, 2, 4)
    with pytest.raises(BadEstimate, match="bonus"):
        checked_length(4.2, 3)
