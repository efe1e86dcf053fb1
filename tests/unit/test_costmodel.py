"""The cost model against the figures of moe.md, against Transformers' own parameter counts, and by hand."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import transformers

from labkit import costmodel, files, settings, targets
from labkit.costmodel import BadEstimate, Range, StepModel, UnknownHardware, UnknownQuantization
from labkit.costmodel.ranges import BadRange
from labkit.experts import expected_unique
from labkit.settings import Profiling
from labkit.targets import geometry
from labkit.targets.geometry import ImpossibleParallelism

SERVER = "rtx-pro-6000-pcie-x8"


def kimi(**changes) -> StepModel:
    return StepModel("kimi-k2.5", SERVER, **changes)


def flat(**changes) -> StepModel:
    """Kimi-K2.5's reference server without uncertainty and with flat AllReduces."""
    machine = costmodel.hardware(SERVER)
    # 14 KiB is the state of one token: 7168 x 2 B.
    exact = {"efficiency": Range.of(0.8), "allreduce_us_per_kib": Range.of(changes.pop("per_token_us", 0) / 14)}
    return StepModel("kimi-k2.5", dataclasses.replace(machine, **exact), **changes)


def test_kimis_parameters():
    # moe.md section 3: attention 6.17, dense .40, shared 2.64, router .165, head 1.17, routed 21.14: 31.7 billion
    table = costmodel.weights(geometry("kimi-k2.5"), 8)
    billions = (table.groupby("part")["weights"].sum() / 1e9).to_dict()
    attention = billions["attention"] + billions["attention, low-rank inputs"]
    assert attention == pytest.approx(6.17, abs=0.005)
    assert billions["dense feed-forward"] == pytest.approx(0.40, abs=0.005)
    assert billions["shared experts"] == pytest.approx(2.64, abs=0.005)
    assert billions["router"] == pytest.approx(0.165, abs=0.0005)
    assert billions["output head"] == pytest.approx(1.17, abs=0.005)
    assert billions["routed experts"] == pytest.approx(21.14, abs=0.005)
    assert table["weights"].sum() / 1e9 == pytest.approx(31.7, abs=0.05)


def test_kimis_bytes_a_rank():
    # replicated 2.18, sharded 2.36, routed 1.49, cache of 2,048 tokens .14: 6.17 GB; 3.10 MB an expert and rank
    table = costmodel.weights(geometry("kimi-k2.5"), 8)
    routed = table["part"] == "routed experts"
    assert table[table["replicated"]]["gb_per_rank"].sum() == pytest.approx(2.18, abs=0.005)
    assert table[~table["replicated"] & ~routed]["gb_per_rank"].sum() == pytest.approx(2.36, abs=0.006)
    assert table[routed]["gb_per_rank"].sum() == pytest.approx(1.49, abs=0.005)
    assert sum(kimi().gigabytes(1).values()) == pytest.approx(6.17, abs=0.005)
    assert kimi().gigabytes(1)["cache"] == pytest.approx(0.144, abs=0.0005)
    assert costmodel.expert_bytes(geometry("kimi-k2.5")) / 8 / 1e6 == pytest.approx(3.10, abs=0.005)


def test_kimis_step_is_the_measured_one_and_its_terms_the_known_ones():
    terms = kimi().terms(1)
    reading = sum(ms for name, ms in terms.items() if name not in ("AllReduce", "other"))
    assert reading == pytest.approx(4.30, abs=0.01)  # at efficiency .8
    assert terms["AllReduce"] == pytest.approx(0.515 * 12.1, abs=0.01)
    assert terms["other"] == pytest.approx(1.57, abs=0.015)
    assert kimi().step_ms(1) == pytest.approx(12.1)
    assert list(kimi().step_range_ms(1)) == pytest.approx([12.1] * 3)  # it was measured: no interval at one token


# The table of v(n) in moe.md section 3, to its two decimals.
@pytest.mark.parametrize(
    ("reuse", "per_token_us", "ratios"),
    [
        (1.0, 0, [1.08, 1.17, 1.25, 1.33, 1.40, 1.55]),
        (1.0, 1.25, [1.10, 1.19, 1.29, 1.38, 1.47, 1.64]),
        (0.6, 0, [1.05, 1.10, 1.15, 1.20, 1.24, 1.33]),
        (0.6, 1.25, [1.06, 1.13, 1.19, 1.25, 1.31, 1.42]),
    ],
)
def test_verify_ratios_of_the_facts(reuse, per_token_us, ratios):
    model = flat(reuse=reuse, per_token_us=per_token_us)
    got = [model.verify_ratio(n).mid for n in (2, 3, 4, 5, 6, 8)]
    assert got == pytest.approx(ratios, abs=0.0061)


def test_lower_allreduce_latency_makes_verification_relatively_dearer():
    # moe.md: at 24 us the same experts give v(4) of about 1.33, on a step of about 9.0 ms
    tuned = StepModel("kimi-k2.5", "rtx-pro-6000-pcie-x8-tuned")
    assert tuned.step_ms(1) == pytest.approx(9.0, abs=0.2)
    assert tuned.verify_ratio(4).mid == pytest.approx(1.33, abs=0.01)


def test_the_ngram_table_of_the_facts():
    # Implied acceptance length = v / slowdown, AllReduce growing: k=3, r=1: 1.18 to 1.02; k=5: 1.35 to 1.17
    model = flat(per_token_us=1.25)
    for k, ends in ((3, (1.18, 1.02)), (5, (1.35, 1.17))):
        implied = [model.break_even(k).mid / slowdown for slowdown in (1.09, 1.26)]
        assert implied == pytest.approx(ends, abs=0.006)


def test_speedup_follows_its_formula_and_breaks_even_where_it_says():
    model = flat(draft_ms=0.7, host_ms=0.3)
    low, mid, high = model.speedup(2.4, 3)
    assert mid == pytest.approx(2.4 * model.step_ms(1) / (model.step_ms(4) + 3 * 0.7 + 0.3))
    assert (low, high) == pytest.approx((mid, mid))
    assert model.speedup(model.break_even(3).mid, 3)[1] == pytest.approx(1)


def test_an_expert_of_qwen3_30b():
    # moe.md row 20: 453 MB a further unique expert over 48 layers
    qwen = geometry("qwen3-30b-a3b")
    assert costmodel.expert_bytes(qwen) * qwen.num_moe_layers / 1e6 == pytest.approx(453, abs=0.5)


def test_the_h200_measurement_of_section_6():
    # 4 layers of Kimi-K2.5 in bf16: 0.47 ms a token while pairs are loaded (n <= 12), then about 2.1 ms at 16
    # tokens that share 8.9 experts. Its dummy weights routed all tokens alike: reuse 0.
    four = dataclasses.replace(geometry("kimi-k2.5"), num_hidden_layers=4, quantization_config={})
    model = StepModel(four, "nvidia-h200", reuse=0.0)
    kernels = [model.kernel(n) for n in range(1, 17)]
    assert kernels == ["pairwise"] * 12 + ["unique"] * 4
    assert model.step_ms(12) - model.step_ms(11) == pytest.approx(0.47, abs=0.01)
    assert model.step_ms(1) == pytest.approx(2.2, abs=0.1)
    assert model.step_ms(12) == pytest.approx(7.09, rel=0.1)
    assert model.step_ms(16) == pytest.approx(2.13, abs=0.1)
    assert model.step_ms(4) > model.step_ms(16)


@pytest.mark.parametrize(
    ("name", "tokens", "expected"),
    [
        ("kimi-k2.5", 1, "unique"),  # grouped INT4 is sorted by expert at any size
        ("qwen3-30b-a3b", 4, "pairwise"),  # 4 x 8 x 4 = 128
        ("qwen3-30b-a3b", 5, "unique"),
        ("deepseek-v3", 8, "pairwise"),  # 8 x 8 x 4 = 256; fp8 blocks are no grouped int
        ("deepseek-v3", 9, "unique"),
    ],
)
def test_the_kernels_rule(name, tokens, expected):
    assert StepModel(name, "nvidia-h200").kernel(tokens) == expected


def test_given_loading_wins_over_the_rule():
    pairs = kimi(loading="pairwise")
    assert [pairs.experts_loaded(n) for n in (1, 4)] == [8, 32]
    assert pairs.step_ms(4) > kimi().step_ms(4)
    with pytest.raises(BadEstimate, match="loading"):
        kimi(loading="sometimes")


def test_streams_are_independent_of_each_other():
    model = kimi(reuse=0.6)
    one = 8 + 0.6 * (expected_unique(384, 8, 4) - 8)
    assert model.experts_loaded(4) == pytest.approx(one)
    assert model.experts_loaded(4, streams=3) == pytest.approx(384 * (1 - (1 - one / 384) ** 3))
    assert kimi().experts_loaded(1, streams=5) == pytest.approx(expected_unique(384, 8, 5))
    assert model.gigabytes(1, streams=3)["cache"] == pytest.approx(3 * model.gigabytes(1)["cache"])
    assert kimi().experts_loaded(16, streams=500) <= 384


def test_many_streams_make_verifying_cheap_for_a_moe():
    # MoESD: with a moderate batch nearly all experts are loaded anyway.
    model = kimi()
    assert model.verify_ratio(4, streams=64).mid < model.verify_ratio(4).mid


def test_reuse_by_window_length_is_interpolated_and_ends_are_kept():
    model = kimi(reuse={2: 0.8, 4: 0.6})
    for n, r in ((2, 0.8), (3, 0.7), (4, 0.6), (8, 0.6)):
        assert model.experts_loaded(n) == pytest.approx(8 + r * (expected_unique(384, 8, n) - 8))


def test_the_interval_is_the_extreme_of_every_combination():
    model = kimi(reuse=(0.6, 0.8, 1.0), draft_ms=(0.5, 1.0, 1.5))
    machine = model.hardware
    ratios = []
    for eta, growth, r, draft in itertools.product((0.7, 0.9), (0, 0.0893), (0.6, 1.0), (0.5, 1.5)):
        exact = {"efficiency": Range.of(eta), "allreduce_us_per_kib": Range.of(growth)}
        single = StepModel("kimi-k2.5", dataclasses.replace(machine, **exact), reuse=r, draft_ms=draft)
        ratios.append(single.speedup(2.0, 3)[1])
    low, mid, high = model.speedup(2.0, 3)
    assert (low, high) == pytest.approx((min(ratios), max(ratios)))
    assert low < mid < high
    assert model.speedup((1.8, 2.0, 2.2), 3)[0] == pytest.approx(low * 0.9)


@pytest.mark.parametrize("length", [0.9, 4.1, (0.5, 2, 3)])
def test_an_impossible_acceptance_length_is_refused(length):
    with pytest.raises(BadEstimate, match="bonus"):
        kimi().speedup(length, 3)


def test_a_changed_figure_changes_the_step_by_the_closed_form(tmp_path, monkeypatch):
    known = files.read_json(settings.root() / "data" / "hardware.json")
    known[SERVER] |= {"efficiency": {"mid": 0.5}, "measured": {}, "other_ms": {"mid": 2.0}}
    (tmp_path / "data" / "models").mkdir(parents=True)
    files.write_json(tmp_path / "data" / "hardware.json", known)
    model_file = settings.root() / "data" / "models" / "kimi-k2.5.json"
    (tmp_path / "data" / "models" / "kimi-k2.5.json").write_text(model_file.read_text())
    monkeypatch.setenv("LABKIT_ROOT", str(tmp_path))
    expected = 6.172 / 0.5 / 1.792 + 123 * 49.1e-3 + 2.0  # no measurement: 2 x 61 + 1 AllReduces
    assert StepModel("kimi-k2.5", SERVER).step_ms(1) == pytest.approx(expected, abs=0.001)


def test_a_measured_step_that_is_too_short_is_a_contradiction():
    fast = dataclasses.replace(costmodel.hardware(SERVER), measured={"kimi-k2.5": {"step_ms": 9.0}})
    with pytest.raises(BadEstimate, match=r"9\.0 ms"):
        StepModel("kimi-k2.5", fast).step_ms(1)
    assert StepModel("kimi-k2.5", fast, other_ms=0.5).terms(1)["other"] == 0.5


def test_one_gpu_has_no_allreduce():
    alone = StepModel("qwen3-30b-a3b", SERVER, tensor_parallel_size=1)
    assert alone.terms(1)["AllReduce"] == 0
    with pytest.raises(ImpossibleParallelism):
        StepModel("smollm2", SERVER)


def test_a_dense_model_verifies_at_the_price_of_one_token():
    model = StepModel("smollm2", "nvidia-h200")
    assert list(model.verify_ratio(8)) == pytest.approx([1, 1, 1])
    assert model.table([1, 4])["experts_loaded"].tolist() == [0, 0]


@pytest.mark.parametrize("counts", [(0, 1), (1, 0)])
def test_a_step_has_at_least_one_token_and_stream(counts):
    with pytest.raises(BadEstimate):
        kimi().step_ms(*counts)


CLASSES = {
    "deepseek-v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "qwen3-30b-a3b": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "mixtral-8x7b": ("MixtralConfig", "MixtralForCausalLM"),
    "smollm2": ("LlamaConfig", "LlamaForCausalLM"),
    "mini-kimi": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "kimi-k2.5": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_weights_are_those_of_transformers(name):
    config, model = (getattr(transformers, cls) for cls in CLASSES[name])
    shipped = files.read_json(settings.root() / "data" / "models" / f"{name}.json")
    text = shipped.get("text_config", shipped)
    plain = {k: v for k, v in text.items() if k not in ("quantization_config", "_source", "model_type")}
    with torch.device("meta"):
        real = sum(p.numel() for p in model(config(**plain)).parameters())
    got = geometry(name)
    table = costmodel.weights(got).set_index("part")["weights"]
    unread = got.num_experts_per_tok and table["routed experts"] * (
        got.n_routed_experts / got.num_experts_per_tok - 1
    )
    embedding = 0 if got.tie_word_embeddings else got.vocab_size * got.hidden_size
    assert table.sum() + unread + embedding == pytest.approx(
        real, rel=0.001
    )  # norms are left out: 0.07% of mini-kimi


def test_cache_bytes():
    assert costmodel.kv_bytes_per_token(geometry("kimi-k2.5"), 8) == 61 * 576 * 2  # the latent, on every rank
    assert costmodel.kv_bytes_per_token(geometry("smollm2"), 1) == 30 * 2 * 3 * 64 * 2
    assert (
        costmodel.kv_bytes_per_token(geometry("qwen3-30b-a3b"), 8) == 48 * 2 * 1 * 128 * 2
    )  # a head is not split


@pytest.mark.parametrize(
    ("config", "expected", "grouped"),
    [
        ({}, 2, False),
        ({"quant_method": "fp8"}, 1, False),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 128**2, False),
        ({"quant_method": "mxfp4"}, 0.5 + 1 / 32, False),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128, True),
        ({"quant_method": "awq", "bits": 4, "group_size": -1}, 0.5, False),
        ({"quant_method": "fp8", "modules_to_not_convert": ["experts"]}, 2, False),
        ({"quant_method": "fp8", "ignore": ["re:.*experts.*"]}, 2, False),
    ],
)
def test_quantization_kinds(config, expected, grouped):
    moe = dataclasses.replace(geometry("qwen3-30b-a3b"), quantization_config=config)
    table = costmodel.weights(moe).set_index("part")["bytes_per_weight"]
    assert table["routed experts"] == pytest.approx(expected)
    assert table["router"] == table["output head"] == 2
    assert costmodel.weights(moe).loc[0, "gb_per_rank"] > 0
    assert (StepModel(moe, "nvidia-h200").kernel(2) == "unique") == grouped


def test_an_unknown_quantization_is_named():
    odd = dataclasses.replace(geometry("qwen3-30b-a3b"), quantization_config={"quant_method": "new"})
    with pytest.raises(UnknownQuantization, match="new"):
        costmodel.weights(odd)


def test_hardware_names_its_sources():
    for name in files.read_json(settings.root() / "data" / "hardware.json"):
        machine = costmodel.hardware(name)
        assert all(machine.sources.values()), name
    with pytest.raises(UnknownHardware, match="nvidia-h200"):
        costmodel.hardware("abacus")


def test_ranges():
    assert Range.of({"mid": 2, "high": 3}) == Range(2, 2, 3)
    assert tuple(Range.of((1, 2, 3))) == (1, 2, 3)
    assert Range.of(np.float64(1.5)).exact
    with pytest.raises(BadRange):
        Range(2, 1, 3)


def test_floor_by_hand():
    """SmolLM2, padded: every weight but the embedding's copy and the norms, in bf16, and keys and values."""
    geometry = targets.geometry("smollm2-tp2")
    g, layers = geometry, geometry.num_hidden_layers
    query, kv = g.num_attention_heads * g.head_dim, g.num_key_value_heads * g.head_dim
    weights = layers * (
        2 * g.hidden_size * query + 2 * g.hidden_size * kv + 3 * g.hidden_size * g.intermediate_size
    )
    weights += g.hidden_size * g.vocab_size
    cache = 40 * layers * 2 * kv
    both = (weights + cache) * 2
    shared = costmodel.Bandwidth(50.0, 49.0, 51.0, True, "made up")
    apart = costmodel.Bandwidth(50.0, 49.0, 51.0, False, "made up")
    assert costmodel.floor_ms(geometry, 2, 40, shared) == pytest.approx(both / 50e9 * 1e3, rel=1e-6)
    assert costmodel.floor_ms(geometry, 2, 40, apart) == pytest.approx(both / 2 / 50e9 * 1e3, rel=1e-6)


def test_bandwidth_of_this_machine_is_of_a_sensible_size():
    found = costmodel.measure_bandwidth("cpu", repeats=3)
    assert 1 < found.gb_s < 2000
    assert found.low_gb_s <= found.gb_s <= found.high_gb_s
    assert found.shared


def test_where_the_bandwidth_comes_from():
    named = costmodel.bandwidth_for(Profiling(hardware="rtx-pro-6000-pcie-x8"))
    assert (named.gb_s, named.shared) == (1792, False)
    assert costmodel.bandwidth_for(Profiling(trace_dir="x")) is None
    assert "hardware" in costmodel.floor_sentence(Profiling(trace_dir="x"), targets.geometry("smollm2"), None)
    with pytest.raises(costmodel.UnknownHardware):
        costmodel.bandwidth_for(Profiling(hardware="abacus"))
