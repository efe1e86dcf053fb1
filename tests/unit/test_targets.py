"""Targets: names, directories that are whole or not, hub ids without a hub."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from labkit import engine, experts, files, settings, targets
from labkit.targets import text_models
from labkit.targets.configs import BrokenConfig


@pytest.fixture
def model_dir(tmp_path):
    """The smallest directory that counts as a model."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "vocab_size": 16}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"w": torch.zeros(64)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_directory_is_a_target(model_dir):
    target = targets.resolve(str(model_dir))
    assert target.path == model_dir
    assert target.geometry.num_hidden_layers == 2
    assert target.name == model_dir.name


def truncate(path):
    path.write_bytes(path.read_bytes()[:-20])


BREAKS = {
    "config.json": lambda d: (d / "config.json").unlink(),
    "config.json is": lambda d: (d / "config.json").write_text('{"hidden'),
    "architectures": lambda d: (d / "config.json").write_text("{}"),
    "no *.safetensors": lambda d: (d / "model.safetensors").unlink(),
    "model.safetensors is missing or damaged": lambda d: truncate(d / "model.safetensors"),
    "no tokenizer": lambda d: (d / "tokenizer.json").unlink(),
    "model-2.safetensors is missing": lambda d: (d / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "model.safetensors", "v": "model-2.safetensors"}})
    ),
}


@pytest.mark.parametrize("said", BREAKS)
def test_a_broken_directory_is_refused_with_the_reason(model_dir, said):
    BREAKS[said](model_dir)
    with pytest.raises(targets.BrokenTarget) as failure:
        targets.resolve(model_dir)
    assert said.removesuffix(" is") in str(failure.value)
    assert str(model_dir) in str(failure.value)


@pytest.mark.parametrize("name", ["no-such-model", "./missing", "/missing/place", "a/b/c"])
def test_what_is_nothing_names_the_alternatives(name):
    with pytest.raises(targets.UnknownTarget, match="smollm2"):
        targets.resolve(name)


def test_hub_id_without_network_names_the_alternatives(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(targets.HubUnreachable, match="local directory"):
        targets.resolve("somebody/some-model")


def test_shipped_target_is_built_once_and_whole():
    target = targets.resolve("smollm2")
    stamp = (target.path / "config.json").stat().st_mtime_ns
    assert targets.resolve("smollm2").path == target.path
    assert (target.path / "config.json").stat().st_mtime_ns == stamp
    assert (target.geometry.num_hidden_layers, target.geometry.hidden_size, target.geometry.vocab_size) == (
        30,
        576,
        49152,
    )
    assert not [path for path in target.path.parent.iterdir() if path.name.startswith(".") and path.is_dir()]


def test_a_build_that_fails_leaves_nothing(monkeypatch, tmp_path):
    from labkit.targets import sources as module

    def breaks(folder):
        (folder / "half").write_text("x")
        raise targets.BrokenTarget("no", "no")

    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.setitem(module.SHIPPED, "smollm2", module.Shipped(breaks, "test"))
    with pytest.raises(targets.BrokenTarget):
        targets.resolve("smollm2")
    assert [path.name for path in (tmp_path / "targets").iterdir()] == [".smollm2-v1.lock"]


def test_damaged_cache_says_to_delete_it(monkeypatch, tmp_path):
    source = targets.resolve("smollm2").path
    folder = tmp_path / "targets" / source.name
    shutil.copytree(source, folder)
    truncate(folder / "model.safetensors")
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    with pytest.raises(targets.BrokenTarget, match="delete"):
        targets.resolve("smollm2")


def test_padded_twin_holds_the_original_weights_and_zeros():
    """Logits are compared when it is built; here the tensors themselves: nothing lost, nothing but zeros added."""
    small, large = (
        load_file(targets.resolve(name).path / "model.safetensors") for name in ("smollm2", "smollm2-tp2")
    )
    assert small.keys() == large.keys()
    for name, weight in small.items():
        corner = large[name][tuple(slice(0, size) for size in weight.shape)]
        assert torch.equal(corner, weight), name
        assert large[name].abs().double().sum().item() == pytest.approx(
            weight.abs().double().sum().item(), rel=1e-9
        )
    assert targets.resolve("smollm2-tp2").geometry.num_attention_heads == 12


@pytest.mark.parametrize(
    ("name", "size", "fits"), [("smollm2", 2, False), ("smollm2", 3, True), ("smollm2-tp2", 2, True)]
)
def test_impossible_tensor_parallel_size_is_refused_with_those_that_do(name, size, fits):
    from labkit.engine.server import check_tensor_parallel

    target = targets.resolve(name)
    if fits:
        check_tensor_parallel(target, size)
        return
    with pytest.raises(engine.BadTensorParallel, match="1, 3"):
        check_tensor_parallel(target, size)


def test_mini_kimi_lies_in_the_repository_trained_and_small():
    target = targets.resolve("mini-kimi")
    model = experts.load(target)
    assert target.path == settings.root() / "data" / "targets" / "mini-kimi"
    assert type(model).__name__ == "Kimi_K25ForConditionalGeneration"
    assert dataclasses.replace(target.geometry, source="") == dataclasses.replace(
        targets.geometry("mini-kimi"), source=""
    )
    assert sum(file.stat().st_size for file in target.path.iterdir()) <= 20e6


def test_mini_kimis_card_is_that_of_its_weights():
    """Routing neither collapsed nor even, held-out text predicted, and the figures belong to these files."""
    target = targets.resolve("mini-kimi")
    card = files.read_json(target.path / "card.json")
    assert card["revision"] == target.revision
    assert card["held_out"][-1]["perplexity"] < 40  # of 4,096 tokens
    assert all(1.02 < layer["max_over_mean"] < 6 and layer["entropy"] > 0.8 for layer in card["load"])
    assert card["overlap"]["mean"] > card["overlap"]["uniform"]


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_mini_kimi_that_is_not_whole_says_how_to_get_it(monkeypatch, tmp_path_factory, model_dir, broken):
    root = tmp_path_factory.mktemp("root")
    folder = root / "data" / "targets" / "mini-kimi"
    shutil.copytree(model_dir, folder)
    monkeypatch.setenv("LABKIT_ROOT", str(root))
    (folder / broken).unlink()
    with pytest.raises(targets.BrokenTarget, match="git checkout"):
        targets.resolve("mini-kimi")
    shutil.rmtree(folder)
    with pytest.raises(targets.BrokenTarget, match=r"labkit\.pretrain"):
        targets.resolve("mini-kimi")


def test_a_plain_target_is_its_own_text_model(model_dir):
    target = targets.resolve(model_dir)
    assert targets.text_model(target) is target


@pytest.mark.parametrize(
    ("name", "wrapper", "expected"),
    [
        (
            "language_model.model.layers.1.mlp.gate.weight",
            "language_model.model",
            "model.layers.1.mlp.gate.weight",
        ),
        ("language_model.lm_head.weight", "language_model.model", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.language_model", "model.norm.weight"),
        ("lm_head.weight", "model.language_model", "lm_head.weight"),
        ("vision_tower.patch_embed.proj.weight", "language_model.model", ""),
        ("model.visual.norm.weight", "model.language_model", ""),
    ],
)
def test_tensor_names_without_the_wrapper(name, wrapper, expected):
    assert text_models.text_name(name, wrapper) == expected


def test_a_text_model_of_an_unknown_family_is_refused(model_dir, tmp_path):
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({"text_config": config | {"model_type": "nobody"}}))
    with pytest.raises(BrokenConfig, match="nobody"):
        text_models.export(model_dir, tmp_path / "out", "language_model.model")
