"""What the cost model is given: figures that cannot be, missing ones, ignore lists, uneven experts."""

import dataclasses
import itertools

import numpy as np
import pandas as pd
import pytest

from labkit import costmodel, files, outlook, settings
from labkit.costmodel import BadEstimate, Range, StepModel
from labkit.costmodel.experts import expected_fullest, loaded
from labkit.costmodel.hardware import FIGURES, BadHardware, Hardware
from labkit.costmodel.ranges import BadRange
from labkit.targets import geometry

MIXTRAL = "mixtral-8x7b"


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("value", [-1, -0.5, (-1, 2, 3)])
def test_no_figure_of_a_server_is_below_nothing(figure, value):
    with pytest.raises(BadHardware, match=f"box: {figure} is -"):
        Hardware(**{"name": "box", "gpus": 1, "bandwidth_gb_s": 1000} | {figure: value})


@pytest.mark.parametrize("figure", ["bandwidth_gb_s", "efficiency", "tflops", "gpus"])
def test_what_time_is_divided_by_is_never_nothing(figure):
    with pytest.raises(BadHardware, match=figure):
        Hardware(**{"name": "box", "gpus": 1, "bandwidth_gb_s": 1000} | {figure: 0})


def test_a_server_takes_numbers_for_ranges():
    plain = Hardware(name="box", gpus=1, bandwidth_gb_s=1000, other_ms=np.float32(0.5))
    ranges = Hardware(name="box", gpus=1, bandwidth_gb_s=Range.of(1000), other_ms=Range.of(0.5))
    assert StepModel(MIXTRAL, plain).step_ms(4) == StepModel(MIXTRAL, ranges).step_ms(4)


@pytest.mark.parametrize("key", ["gpus", "bandwidth_gb_s"])
def test_an_entry_without_a_needed_figure_is_named(key, monkeypatch):
    entry = files.read_json(settings.root() / "data" / "hardware.json")["nvidia-h200"]
    monkeypatch.setattr(files, "read_json", lambda _path: {"box": {k: v for k, v in entry.items() if k != key}})
    with pytest.raises(BadHardware, match=f"box in data/hardware.json has no {key}"):
        costmodel.hardware("box")


@pytest.mark.parametrize("figure", [None, "fast", {}, {"low": 1}, (1, 2), [1, 2, 3, 4], {"mid": None}, object()])
def test_what_is_no_figure_is_refused_as_such(figure):
    with pytest.raises(BadRange, match="is no figure"):
        Range.of(figure)


@pytest.mark.parametrize("number", [1, 1.0, np.float32(1), np.float64(1), np.int64(1)])
def test_any_number_is_a_figure(number):
    assert Range.of(number) == Range(1, 1, 1)


@pytest.mark.parametrize(
    "given",
    [
        {"reuse": -0.1},
        {"reuse": {2: 0.8, 4: -0.1}},
        {"reuse": {2: (-0.1, 0.5, 0.9)}},
        {"reuse": {}},
        {"context_tokens": -1},
        {"expert_budget": -1},
    ],
)
def test_a_step_that_cannot_be_is_refused(given):
    with pytest.raises(BadEstimate):
        StepModel(MIXTRAL, "nvidia-h200", **given)


@pytest.mark.parametrize("n", range(1, 9))
def test_no_more_experts_are_touched_than_tokens_choose(n):
    kimi = geometry("kimi-k2.5")
    for reuse in (0, 0.5, 1, 2, 100):
        touched = loaded(kimi, n, 1, np.array([float(reuse)]), False)[0]
        assert touched >= 8 - 1e-9
        assert touched <= 8 * n + 1e-9


def test_every_figure_with_a_range_widens_the_interval():
    exact = {name: Range.of(1.0) for name in FIGURES} | {"bandwidth_gb_s": Range.of(1000.0)}
    box = Hardware(name="box", gpus=8, **exact)
    for figure in set(FIGURES) - {"allreduce_flat_kib"}:  # a size, not a time
        middle = exact[figure].mid
        wide = dataclasses.replace(box, **{figure: Range(middle / 2, middle, middle * 2)})
        found = StepModel("kimi-k2.5", wide, expert_parallel=True).step_range_ms(8)
        low, high = (
            StepModel("kimi-k2.5", dataclasses.replace(box, **{figure: Range.of(v)}), expert_parallel=True)
            for v in (middle / 2, middle * 2)
        )
        ends = sorted((low.step_ms(8), high.step_ms(8)))
        assert found.low < found.mid < found.high, figure
        assert [found.low, found.high] == pytest.approx(ends), figure


@pytest.mark.parametrize(("experts", "ranks"), [(8, 2), (9, 2), (10, 4), (7, 3), (3, 4), (6, 4)])
def test_the_fullest_rank_by_brute_force_for_any_split(experts, ranks):
    sizes = [len(part) for part in np.array_split(range(experts), ranks)]  # the first ones own one more
    owner = np.repeat(range(ranks), sizes)
    for unique in range(experts + 1):
        sets = itertools.combinations(range(experts), unique)
        most = [np.bincount(owner[list(chosen)], minlength=ranks).max() for chosen in sets]
        assert expected_fullest(unique, experts, ranks) == pytest.approx(np.mean(most))


def gpt_oss(**quantization):
    config = {"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "head_dim": 64}
    config |= {
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 201088,
        "intermediate_size": 2880,
    }
    config |= {"num_local_experts": 128, "num_experts_per_tok": 4}
    return geometry(config | {"quantization_config": quantization})


ROUTER_NAMES = ["gate", "mlp.gate", "model.layers.1.mlp.gate", "model.layers.*.mlp.router", "re:.*mlp.gate$"]


@pytest.mark.parametrize("name", [*ROUTER_NAMES, "lm_head", "model.embed_tokens", "down"])
def test_a_name_on_the_ignore_list_means_whole_modules(name):
    for key, quantization in (
        ("modules_to_not_convert", {"quant_method": "awq", "bits": 4, "group_size": 128}),
        ("ignore", {"quant_method": "mxfp4"}),
    ):
        stored = costmodel.weights(gpt_oss(**quantization, **{key: [name]})).set_index("part")["bytes_per_weight"]
        assert stored[["routed experts", "attention", "attention, keys and values"]].max() < 1
        assert stored["router"] == 2


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("model.layers.*.self_attn", "attention"),  # GPT-OSS's own
        ("self_attn", "attention"),
        ("re:.*self_attn.*", "attention"),
        ("model.layers.1.self_attn.o_proj", "attention"),
        ("experts", "routed experts"),
        ("mlp", "routed experts"),
        ("model.layers.*.mlp.experts", "routed experts"),
    ],
)
def test_an_ignored_module_is_stored_in_the_models_own_type(name, kept):
    stored = costmodel.weights(gpt_oss(quant_method="mxfp4", modules_to_not_convert=[name]))
    stored = stored.set_index("part")["bytes_per_weight"]
    other = {"attention": "routed experts", "routed experts": "attention"}[kept]
    assert stored[kept] == 2
    assert stored[other] < 1


def test_where_speculation_stops_paying_reads_as_a_sentence():
    table = pd.DataFrame({"streams": [1, 2, 4], "speedup_low": 1.1, "speedup": 1.2, "speedup_high": 1.3})
    every = "speculation pays at every number of streams that was tried, up to 4"
    assert outlook.stops_sentence(table) == every
    falling = table.assign(speedup_low=[1.1, 0.9, 0.8])
    told = "speculation stops paying from more than 4 [2, more than 4] streams on"
    assert outlook.stops_sentence(falling) == told
