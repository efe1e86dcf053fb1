"""The head: what its files say, that it comes back as it went, and the breaks that engines do not tell of."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from labkit import draft, files, targets, vocab

H, VOCAB, DRAFT, N = 32, 64, 16, 6
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": H,
    "num_hidden_layers": N,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}


def tiny_target(folder, **changes):
    """A Llama in two tensors and what the warm start reads, random."""
    folder.mkdir(parents=True)
    files.write_json(folder / "config.json", CONFIG | changes)
    generator = torch.Generator().manual_seed(1)
    last = f"model.layers.{N - 1}."
    shapes = {
        "model.embed_tokens.weight": (VOCAB, H),
        "model.norm.weight": (H,),
        f"{last}input_layernorm.weight": (H,),
        f"{last}post_attention_layernorm.weight": (H,),
        f"{last}self_attn.q_proj.weight": (32, H),
        f"{last}self_attn.k_proj.weight": (16, H),
        f"{last}self_attn.v_proj.weight": (16, H),
        f"{last}self_attn.o_proj.weight": (H, 32),
        f"{last}mlp.gate_proj.weight": (48, H),
        f"{last}mlp.up_proj.weight": (48, H),
        f"{last}mlp.down_proj.weight": (H, 48),
    }
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights |= {name: weights[name].abs() + 0.5 for name in weights if "norm" in name}
    weights |= {name: weights[name] * 0.1 for name in weights if "proj" in name}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return targets.Target("tiny", folder, "made for a test")


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


def change_config(head, **changes):
    config = json.loads((head / "config.json").read_text())
    layer = config["transformer_layer_config"]
    for name, value in changes.items():
        where = layer if name in layer else config
        if value is None:
            del where[name]
        else:
            where[name] = value
    (head / "config.json").write_text(json.dumps(config))


def change_tensors(head, change):
    tensors = load_file(head / "model.safetensors")
    change(tensors)
    save_file(tensors, head / "model.safetensors")


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


def spoil(name):
    def change(tensors):
        tensors[name][0] = float("nan")

    return change


OTHER_ROPE = {"rope_type": "default", "rope_theta": 1e4}
DOWN = "layers.0.mlp.down_proj.weight"
BREAKS = [
    ("max_position_embeddings is 64", lambda h: change_config(h, max_position_embeddings=64)),
    ("rope_parameters is", lambda h: change_config(h, rope_parameters=OTHER_ROPE)),
    ("vocab_size is 32", lambda h: change_config(h, vocab_size=32)),
    ("hidden_size is 16", lambda h: change_config(h, hidden_size=16)),
    ("draft_vocab_size is 100", lambda h: change_config(h, draft_vocab_size=100)),
    ("layer ids are [1, 2, 4], but the head was trained on [1, 3, 4]",
     lambda h: change_config(h, eagle_aux_hidden_state_layer_ids=[1, 2, 4])),
    ("do not ascend within 0..6", lambda h: change_config(h, eagle_aux_hidden_state_layer_ids=[4, 3, 1])),
    ("do not ascend within 0..6", lambda h: change_config(h, eagle_aux_hidden_state_layer_ids=[1, 3, 9])),
    ("names no eagle_aux", lambda h: change_config(h, eagle_aux_hidden_state_layer_ids=None)),
    ("does not say norm_before_residual", lambda h: change_config(h, norm_before_residual=None)),
    ("does not say norm_output", lambda h: change_config(h, norm_output=None)),
    ("no EAGLE-3 head's: speculators_model_type is 'eagle'", lambda h: change_config(h, speculators_model_type="eagle")),
    ("has no lm_head.weight: vLLM would draft with random numbers",
     lambda h: change_tensors(h, lambda t: t.pop("lm_head.weight"))),
    ("has no d2t", lambda h: change_tensors(h, lambda t: t.pop("d2t"))),
    ("has no fc.weight", lambda h: change_tensors(h, lambda t: t.pop("fc.weight"))),
    (f"has no {DOWN}", lambda h: change_tensors(h, lambda t: t.pop(DOWN))),
    ("lm_head.weight has shape [15, 32] instead of [16, 32]",
     lambda h: change_tensors(h, lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:15].clone()}))),
    ("fc.weight holds NaN", lambda h: change_tensors(h, spoil("fc.weight"))),
    ("absolute target ids, not offsets",
     lambda h: change_tensors(h, lambda t: t.update(d2t=t["d2t"] + torch.arange(DRAFT)))),
    ("do not ascend", lambda h: change_tensors(h, lambda t: t.update(d2t=t["d2t"].flip(0)))),
    ("name different tokens", lambda h: change_tensors(h, lambda t: t.update(t2d=t["t2d"].roll(1)))),
    ("cannot be read", lambda h: (h / "model.safetensors").write_bytes(b"cut")),
    ("cannot be read", lambda h: (h / "config.json").write_text("{")),
    ("cannot be read", lambda h: (h / "config.json").unlink()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "damage"), BREAKS, ids=[f"{n}-{said[:24]}" for n, (said, _) in enumerate(BREAKS)]
)
def test_each_damage_is_named(head, target, said, damage):
    damage(head)
    assert any(said in text for text in draft.preflight(head, target)), draft.preflight(head, target)


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
