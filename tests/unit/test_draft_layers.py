"""Heads of several layers, and an lm_head that learns."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from labkit import draft, vocab
from labkit.draft import warm
from labkit.settings import Eagle3Pipeline
from labkit.train import start
from tests.unit import tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target.build(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def mapping():
    return vocab.build(np.arange(tiny_target.VOCAB)[::-1].copy(), 40)


def test_two_layers_start_from_the_targets_last_two(target, mapping):
    model = draft.build(target, mapping, tiny_target.AUX, num_layers=2)
    draft.warm_start(model, target)
    theirs = load_file(target.path / "model.safetensors")
    width = tiny_target.WIDTH
    for number, source in ((0, 3), (1, 4)):
        layer = model.layers[number]
        for part in ("gate_proj", "up_proj", "down_proj"):
            assert torch.equal(getattr(layer.mlp, part).weight, theirs[f"model.layers.{source}.mlp.{part}.weight"])
        own = layer.self_attn.q_proj.weight
        own = own[:, width:] if number == 0 else own  # the first layer reads [embedding, state]
        assert torch.equal(own, theirs[f"model.layers.{source}.self_attn.q_proj.weight"])
    norms = (model.layers[0].hidden_norm.weight, model.layers[1].input_layernorm.weight)
    for norm, source in zip(norms, (3, 4), strict=True):
        assert torch.equal(norm, theirs[f"model.layers.{source}.input_layernorm.weight"])
    assert len(warm.sources(target, 2)) == 2 * len(warm.sources(target, 1)) - 1  # the final norm is there once


@pytest.mark.parametrize(("choice", "learns"), [("frozen", False), ("trained", True)])
def test_lm_head_learns_where_it_is_to(target, mapping, choice, learns):
    settings = dataclasses.replace(Eagle3Pipeline(scale="smoke"), lm_head=choice, draft_layers=2)
    model = start.head(settings, target, mapping, tiny_target.AUX)
    assert model.lm_head.weight.requires_grad is learns
    assert not model.verifier_lm_head.weight.requires_grad
    assert len(model.layers) == 2
    assert torch.equal(model.lm_head.weight, model.verifier_lm_head.weight)


def test_a_head_of_two_layers_comes_back_from_its_directory(target, mapping, tmp_path):
    model = draft.build(target, mapping, tiny_target.AUX, num_layers=2)
    head = draft.export(model, tmp_path / "head", verifier_name="tiny", dtype=torch.float32)
    again = draft.load(head, target)
    assert torch.equal(again.layers[1].self_attn.q_proj.weight, model.layers[1].self_attn.q_proj.weight)
    assert not [problem for problem in draft.preflight(head, target, vocab=mapping) if problem.fatal]
