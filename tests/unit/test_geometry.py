"""Geometries of every family under one set of names, the errors of broken ones, and the untrained mini-kimi."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForImageTextToText,
    DeepseekV3Config,
    GptOssConfig,
    Kimi_K25Config,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

from labkit import settings
from labkit.targets import configs, mini_kimi
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


@pytest.fixture(scope="module")
def mini(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mini") / "mini-kimi"
    folder.mkdir()
    mini_kimi.build(folder, seed=0)
    return folder


def test_mini_kimi_has_kimis_architecture(mini):
    got = geometry(mini)
    assert got.architecture == "Kimi_K25ForConditionalGeneration"
    assert got.n_routed_experts >= 48
    assert got.num_experts_per_tok >= 4
    assert (got.n_shared_experts, got.first_k_dense_replace, got.vocab_size) == (1, 1, 49152)
    assert (got.kv_lora_rank, got.qk_rope_head_dim) == (512, 64)  # what vLLM's MLA on the CPU takes
    shipped = geometry("mini-kimi")
    assert (got.wrapper, got.num_moe_layers) == (shipped.wrapper, shipped.num_moe_layers)


def test_mini_kimis_tensors_have_the_names_of_kimis_checkpoint(mini):
    with safe_open(mini / "model.safetensors", framework="pt") as tensors:
        names = list(tensors.keys())
    text = [name for name in names if name.startswith("language_model.model.layers.")]
    assert any(name.startswith("vision_tower.") for name in names)
    assert "language_model.model.layers.1.mlp.experts.47.down_proj.weight" in text
    assert "language_model.model.layers.0.mlp.gate_proj.weight" in text
    assert not [name for name in names if name.startswith("language_model") and "blocks" in name]
    assert (mini / "model.safetensors").stat().st_size < 60e6


def test_mini_kimi_loads_whole_and_routes_by_token(mini):
    model, info = AutoModelForImageTextToText.from_pretrained(mini, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    chosen = []
    gate = model.get_submodule("model.language_model.layers.4.mlp.gate")
    gate.register_forward_hook(lambda _m, _i, output: chosen.append(output))
    with torch.no_grad():
        model(input_ids=torch.arange(1000, 1512).unsqueeze(0), use_cache=False, logits_to_keep=1)
    logits, _weights, indices = chosen[0]
    load = torch.bincount(indices.flatten(), minlength=48) / len(indices)
    assert 0.5 < logits.std() < 2.0
    assert load.max() < 0.6  # no expert serves most tokens
    assert (load > 0).sum() > 40  # nearly all serve some
    assert not torch.equal(indices.sort().values, logits.topk(4).indices.sort().values)  # the bias takes part


def test_mini_kimi_is_the_same_from_the_same_seed(mini, tmp_path):
    weights = [(mini / "model.safetensors").read_bytes()]
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        before = torch.random.get_rng_state()
        mini_kimi.build(folder, seed=seed)
        assert torch.equal(before, torch.random.get_rng_state())
        weights.append((folder / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


def test_a_tokenizer_is_copied_only_when_it_fits(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "folder"
    source.mkdir()
    folder.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "config.json").write_text(json.dumps(PLAIN))
    mini_kimi.copy_tokenizer(source, folder)
    assert (folder / "tokenizer.json").read_text() == "{}"
    (source / "config.json").write_text(json.dumps(PLAIN | {"vocab_size": 50_000}))
    with pytest.raises(BrokenConfig, match="50000"):
        mini_kimi.copy_tokenizer(source, folder)


def test_a_damaged_weight_file_leaves_the_wrapper_to_the_class(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert configs.checkpoint_wrapper(tmp_path) == {}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a.b.embed_tokens.weight": "x", "a.b.norm.weight": "x"}})
    )
    assert configs.checkpoint_wrapper(tmp_path) == {"_wrapper": "a.b"}
