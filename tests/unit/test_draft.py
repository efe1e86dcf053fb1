"""The head: what its files say, that it comes back as it went, and the breaks that engines do not tell of."""

import json
import shutil

import numpy as np
import pytest
import torch
from draft_heads import CONFIG, DRAFT, VOCAB, H, change_tensors, tiny_target  # noqa: F401 - for others, too
from safetensors.torch import load_file

from labkit import draft, vocab


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def chosen():
    return vocab.build(np.arange(VOCAB), DRAFT, [0, 2])


@pytest.fixture(scope="module")
def exported(target, chosen, tmp_path_factory):
    model = draft.build(target, chosen, (1, 3, 4))
    head = tmp_path_factory.mktemp("head") / "head"
    return model, draft.export(model, head, verifier_name="tiny", record={"layers": [1, 3, 4]})


@pytest.fixture
def head(exported, tmp_path):
    """A copy to break."""
    return shutil.copytree(exported[1], tmp_path / "head")


def test_frozen_parts_are_the_targets_own_rows(exported, target, chosen):
    model, _ = exported
    table = load_file(target.path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.embed_tokens.weight, table)
    assert torch.equal(model.lm_head.weight, table[chosen.target_ids])
    assert not model.lm_head.weight.requires_grad
    assert not model.embed_tokens.weight.requires_grad


def test_config_is_complete_and_names_no_path(exported, target):
    text = (exported[1] / "config.json").read_text()
    config = json.loads(text)
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert {name: config[name] for name in draft.FLAGS} == draft.FLAGS
    assert config["draft_vocab_size"] == DRAFT
    layer = config["transformer_layer_config"]
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == 5000.0
    assert (layer["max_position_embeddings"], layer["vocab_size"], layer["num_hidden_layers"]) == (128, VOCAB, 1)
    assert str(target.path) not in text


def test_it_ships_lm_head_and_maps_but_not_the_targets_tensors(exported):
    tensors = load_file(exported[1] / "model.safetensors")
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    assert tensors["d2t"].dtype == torch.int64
    assert not [name for name in tensors if name.startswith(("embed_tokens", "verifier"))]


def test_it_comes_back_as_it_went(exported, target):
    model, head_dir = exported
    again = draft.load(head_dir, target)
    for name, tensor in model.state_dict().items():
        expected = (
            tensor
            if name.startswith(("embed", "verifier")) or not tensor.is_floating_point()
            else tensor.bfloat16()
        )
        assert torch.equal(again.state_dict()[name], expected.to(tensor.dtype)), name


def test_vllm_reads_the_same_configuration(exported):
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    read = SpeculatorsConfig.from_pretrained(str(exported[1]))
    assert read.eagle_aux_hidden_state_layer_ids == [1, 3, 4]
    assert read.architectures == ["Eagle3LlamaForCausalLM"]
    assert {name: getattr(read, name) for name in draft.FLAGS} == draft.FLAGS
    assert read.draft_vocab_size == DRAFT


def test_a_sound_head_has_no_problems(head, target):
    assert draft.preflight(head, target) == []


def test_a_head_of_another_target_is_named(head, tmp_path):
    other = tiny_target(tmp_path / "other", max_position_embeddings=4096)
    assert any("max_position_embeddings" in text for text in draft.preflight(head, other))


@pytest.mark.parametrize(("name", "said"), [("lm_head.weight", "lacks"), (None, "no EAGLE-3 head")])
def test_loading_a_broken_head_is_a_clear_error(head, target, name, said):
    if name:
        change_tensors(head, lambda tensors: tensors.pop(name))
    else:
        (head / "model.safetensors").unlink()
    with pytest.raises(draft.BadHead, match=said):
        draft.load(head, target)


def test_a_full_vocabulary_needs_no_map(target, tmp_path):
    model = draft.build(target, vocab.build(np.arange(VOCAB), VOCAB), (1, 3, 4))
    head = draft.export(model, tmp_path / "head", verifier_name="tiny")
    assert "d2t" not in load_file(head / "model.safetensors")
    assert draft.preflight(head, target) == []
    flat = draft.convert(head, tmp_path / "flat", "llama")
    assert draft.preflight(flat, target) == []
    assert draft.load(flat, target).d2t is None
