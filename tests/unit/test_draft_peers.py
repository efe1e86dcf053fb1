"""Heads of other projects as they are published: no false alarms, and what is odd about them is said."""

import json
from pathlib import Path

import numpy as np
import pytest
from draft_heads import DRAFT, VOCAB, tiny_target

from labkit import draft, files, settings, targets, vocab
from labkit.draft.check_config import config_problems
from labkit.draft.forms import Head, form_of, to_speculators

# Kimi-K2.5's heads as their configurations say (eagle3.md, section 4); AQ-MedAI's and SpecForge's are alike.
KIMI = {
    "hidden_size": 7168, "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840,
    "num_hidden_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6, "bos_token_id": 163584,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = KIMI | {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "head_dim": 128, "rope_scaling": None,
    "rope_theta": 1e6, "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
YARN = {
    "type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
}
PUBLISHED = {
    "TorchSpec": LLAMA | {"intermediate_size": 12288, "max_position_embeddings": 262144},
    "SpecForge": LLAMA
    | {"intermediate_size": 18432, "max_position_embeddings": 131072, "draft_vocab_size": 32000}
    | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True}},
    "MLA": KIMI
    | {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "intermediate_size": 18432}
    | {"rope_theta": 5e4, "rope_scaling": YARN, "draft_vocab_size": 163840}
    | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}},
}


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """Kimi-K2.5's configuration without its terabyte of weights."""
    folder = tmp_path_factory.mktemp("kimi")
    shipped = files.read_json(settings.root() / "data" / "models" / "kimi-k2.5.json")
    files.write_json(folder / "config.json", shipped)
    return targets.Target("kimi-k2.5", folder, "its configuration only")


def problems(config, target, max_model_len):
    head = Head(Path("head"), form_of(config), to_speculators(config), config, {})
    return list(config_problems(head, target, "vllm", max_model_len))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_not_refused(kimi, name):
    found = problems(PUBLISHED[name], kimi, 131_072)
    assert [one for one in found if one.fatal] == []


def test_what_is_odd_about_them_is_said(kimi):
    """Their RoPE is not the target's, and only their makers know whether they were trained with it."""
    said = {name: {one.check for one in problems(config, kimi, 131_072)} for name, config in PUBLISHED.items()}
    assert said["TorchSpec"] == {"rope"}
    assert said["SpecForge"] == {"rope", "layer counting"}
    found = problems(PUBLISHED["SpecForge"], kimi, 262_144)
    assert [one.check for one in found if one.fatal] == ["positions"]
    assert "serve with --max-model-len 131072" in next(one for one in found if one.fatal)


@pytest.mark.parametrize("known", [h for h in files.read_json(settings.root() / "data" / "drafts.json")["heads"]
                                   if h["target"] == "kimi-k2.5" and h["architecture"].startswith("Llama")],
                         ids=lambda known: known["name"])  # fmt: skip
def test_the_heads_that_the_lab_knows_of_fit_kimi(kimi, known):
    names = ("intermediate_size", "draft_vocab_size", "max_position_embeddings", "head_dim", "vocab_size")
    config = LLAMA | {name: known[name] for name in names} | {"architectures": [known["architecture"]]}
    assert [one for one in problems(config, kimi, kimi.geometry.max_position_embeddings) if one.fatal] == []


@pytest.mark.parametrize("sliding", [False, True])
def test_a_head_that_speculators_itself_makes_and_saves_is_sound(tmp_path, sliding):
    """Its own defaults: all three norms, full attention or a window; the configuration as its save writes it."""
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config

    target = tiny_target(tmp_path / "target")
    mapping = vocab.build(np.arange(VOCAB), DRAFT)
    layer = create_transformer_layer_config(
        str(target.path), 1, "llama", "silu", 16 if sliding else 2048, [] if sliding else [0]
    )
    model = Eagle3DraftModel.from_training_args(
        layer, t2d=mapping.t2d, d2t=mapping.d2t, draft_vocab_size=DRAFT, ttt_steps=3, draft_attn_impl="sdpa",
        verifier_name_or_path=str(target.path), target_layer_ids=[2, 5, 7], norm_before_residual=True,
        norm_before_fc=True, norm_output=True,
    )  # fmt: skip
    model.save_pretrained(tmp_path / "head")
    found = draft.preflight(tmp_path / "head", target)
    assert [one for one in found if one.fatal] == []
    assert {one.check for one in found} <= {"rope schemas"}
    loaded = draft.load(tmp_path / "head", target)
    assert loaded.config.norm_before_fc
    flat = draft.convert(tmp_path / "head", tmp_path / "flat", "llama")
    assert draft.preflight(flat, target) == []
    assert json.loads((flat / "config.json").read_text())["rope_theta"] == 5000.0
