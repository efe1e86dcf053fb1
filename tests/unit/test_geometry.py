"""Geometries of every family under one set of names, the errors of broken ones, and mini-kimi's."""

from __future__ import annotations

import json

import pytest
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    Kimi_K25Config,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

from labkit import settings
from labkit.targets import configs
from labkit.targets.configs import BrokenConfig
from labkit.targets.geometry import ImpossibleParallelism, UnknownGeometry, geometry

SHIPPED = sorted(file.stem for file in (settings.root() / "data" / "models").glob("*.json"))
PLAIN = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "intermediate_size": 96,
}


def test_kimi_k25_is_the_published_model():
    kimi = geometry("kimi-k2.5")
    assert (kimi.hidden_size, kimi.num_hidden_layers, kimi.vocab_size) == (7168, 61, 163840)
    assert (kimi.n_routed_experts, kimi.num_experts_per_tok, kimi.n_shared_experts) == (384, 8, 1)
    assert (kimi.first_k_dense_replace, kimi.num_moe_layers, kimi.num_nextn_predict_layers) == (1, 60, 0)
    assert (kimi.moe_layers[0], kimi.moe_layers[-1]) == (1, 60)
    assert kimi.layers_path == "language_model.model.layers"


@pytest.mark.parametrize(("name", "expected"), [("kimi-k2.5", 123), ("smollm2", 61)])
def test_allreduces_are_two_a_layer_and_one(name, expected):
    assert geometry(name).expected_allreduces(2) == expected
    assert geometry(name).expected_allreduces(1) == 0


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("smollm2", [1, 3]),
        ("smollm2-tp2", [1, 2, 4]),
        ("kimi-k2.5", [1, 2, 4, 8]),
        ("qwen3-30b-a3b", [1, 2, 4, 8]),  # 8 ranks hold each of 4 KV heads twice
        ("mixtral-8x7b", [1, 2, 4, 8]),
    ],
)
def test_tensor_parallel_sizes(name, sizes):
    assert geometry(name).tensor_parallel_sizes(8) == sizes


@pytest.mark.parametrize("tp", [2, 0, -1])
def test_an_impossible_size_names_what_would_do(tp):
    with pytest.raises(ImpossibleParallelism, match=r"1, 3"):
        geometry("smollm2").require_tensor_parallel(tp)
    geometry("smollm2").require_tensor_parallel(3)


@pytest.mark.parametrize(
    ("config", "experts", "chosen", "layers", "width"),
    [
        (DeepseekV3Config(), 256, 8, 58, 2048),
        (Qwen3MoeConfig(), 128, 8, 24, 768),
        (MixtralConfig(), 8, 2, 32, 14336),
        (GptOssConfig(), 128, 4, 36, 2880),
        (OlmoeConfig(), 64, 8, 16, 2048),
        (LlamaConfig(), 0, 0, 0, 0),
        (Kimi_K25Config(), 256, 8, 58, 2048),  # its text model defaults to DeepSeek-V3
    ],
)
@pytest.mark.parametrize("form", ["config", "dict", "folder", "file"])
def test_families_map_to_one_set_of_names(config, experts, chosen, layers, width, form, tmp_path):
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    # Transformers leaves defaults out of what it saves for some families: write them all.
    file.write_text(json.dumps(config.to_dict(), default=str))
    source = {"config": config, "dict": config.to_dict(), "folder": tmp_path, "file": str(file)}[form]
    got = geometry(source)
    figures = (got.n_routed_experts, got.num_experts_per_tok, got.num_moe_layers, got.moe_intermediate_size)
    assert figures == (experts, chosen, layers, width)
    assert got.is_moe == bool(experts)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_wrappers_of_any_depth_are_taken_off(depth):
    config = dict(PLAIN)
    for _ in range(depth):
        config = {"architectures": ["SomeForConditionalGeneration"], "hidden_size": 7, "text_config": config}
    got = geometry(config)
    assert got.hidden_size == 64
    assert bool(got.wrapper) == bool(depth)


def test_layers_that_do_not_route():
    moe = PLAIN | {"num_hidden_layers": 6, "num_experts": 8, "num_experts_per_tok": 2}
    assert geometry(moe).moe_layers == (0, 1, 2, 3, 4, 5)
    assert geometry(moe | {"mlp_only_layers": [0, 5]}).moe_layers == (1, 2, 3, 4)
    assert geometry(moe | {"decoder_sparse_step": 2}).moe_layers == (1, 3, 5)  # (i + 1) % 2 == 0 in Qwen's code
    assert geometry(moe | {"first_k_dense_replace": 4}).moe_layers == (4, 5)
    assert geometry(moe | {"moe_layer_freq": [0, 1, 1, 0, 1, 1]}).moe_layers == (1, 2, 4, 5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": -1}, "num_key_value_heads"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "5 experts a token of 4"),
        ({"num_experts": 4}, "0 experts a token of 4"),
        ({"num_experts": 4.5, "num_experts_per_tok": 2}, "n_routed_experts"),
    ],
)
def test_a_figure_that_cannot_be_is_named_with_its_file(change, named, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN | change))
    with pytest.raises(BrokenConfig, match=named) as caught:
        geometry(tmp_path)
    assert str(tmp_path) in caught.value.what


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00\xff", '"text"'])
def test_an_unreadable_config_is_named(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(BrokenConfig, match=r"config\.json"):
        geometry(tmp_path)


def test_a_folder_without_config_and_an_unknown_name(tmp_path):
    with pytest.raises(BrokenConfig, match=r"no config\.json"):
        geometry(tmp_path)
    with pytest.raises(UnknownGeometry, match=r"kimi-k2\.5"):
        geometry("no-such-model")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_geometries_say_where_they_are_from(name):
    assert geometry(name).source
    assert geometry(name).name == name


def test_mini_kimi_has_kimis_architecture():
    got = geometry("mini-kimi")
    assert got.architecture == "Kimi_K25ForConditionalGeneration"
    assert got.n_routed_experts >= 48
    assert got.num_experts_per_tok >= 4
    assert (got.n_shared_experts, got.first_k_dense_replace) == (1, 1)
    assert (got.kv_lora_rank, got.qk_rope_head_dim) == (512, 64)  # what vLLM's MLA on the CPU takes
    assert got.wrapper == geometry("kimi-k2.5").wrapper


def test_a_damaged_weight_file_leaves_the_wrapper_to_the_class(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert configs.checkpoint_wrapper(tmp_path) == {}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a.b.embed_tokens.weight": "x", "a.b.norm.weight": "x"}})
    )
    assert configs.checkpoint_wrapper(tmp_path) == {"_wrapper": "a.b"}
