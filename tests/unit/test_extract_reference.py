"""Transformers as a source of states: layer ids as vLLM counts them, batches that padding does not touch."""

from __future__ import annotations

import json

import moe_models
import pytest
import tiny_target
import torch
from safetensors.torch import load_file
from tiny_target import AUX, LAYERS, VOCAB, WIDTH
from transformers import LlamaForCausalLM

from labkit import extract, targets
from labkit.extract import reference

EVERY = list(range(LAYERS + 1))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_target.build(tmp_path_factory.mktemp("tiny") / "model")


@torch.inference_mode()
def by_hand(model, ids):
    """The residual before each layer and after the last: embedding, then layer by layer."""
    inner = model.model
    hidden, place = inner.embed_tokens(torch.tensor([ids])), torch.arange(len(ids))[None]
    turned, found = inner.rotary_emb(hidden, place), []
    causal = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
    for layer in inner.layers:
        found.append(hidden[0])
        output = layer(hidden, attention_mask=causal, position_ids=place, position_embeddings=turned)
        hidden = output if isinstance(output, torch.Tensor) else output[0]
    return torch.stack([*found, hidden[0]], dim=1)


def test_states_are_those_of_a_loop_by_hand(tiny):
    ids = torch.randint(0, VOCAB, (23,)).tolist()
    model = LlamaForCausalLM.from_pretrained(tiny.path).eval()
    found = extract.Reference(tiny).states([ids], EVERY)[0]
    wanted = by_hand(model, ids)
    assert found.shape == (23, LAYERS + 1, WIDTH)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    assert torch.allclose(extract.final_head(tiny.path).logits(found[:, -1]), logits, rtol=1e-3, atol=1e-3)


def test_padding_touches_no_state(tiny):
    rows = [torch.randint(0, VOCAB, (length,)).tolist() for length in (3, 40, 17, 1)]
    model = extract.Reference(tiny)
    together = model.states(rows, [*AUX, LAYERS])
    for ids, found in zip(rows, together, strict=True):
        alone = model.states([ids], [*AUX, LAYERS])[0]
        assert found.shape == (len(ids), 4, WIDTH)
        assert torch.allclose(found, alone, rtol=1e-4, atol=1e-4)


def test_repeated_calls_give_the_same_states(tiny):
    """speculators#279: states that come from an earlier call's batch."""
    model = extract.Reference(tiny)
    first, second = [5, 9, 3, 4], [7, 7, 1, 2]
    once = model.states([first], EVERY)[0]
    other = model.states([second], EVERY)[0]
    assert torch.equal(model.states([first], EVERY)[0], once)
    assert not torch.allclose(once, other)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)


@pytest.mark.parametrize("family", ["kimi_k25", "deepseek_v3", "qwen3_moe", "mixtral"])
def test_wrappers_and_families(tmp_path, family):
    """The last state through the target's own norm and head is its logits, wherever the text model lies."""
    torch.manual_seed(0)
    moe_models.FAMILIES[family]().float().eval().save_pretrained(tmp_path)
    target = targets.Target(family, tmp_path, "made for a test")
    source = extract.Reference(target)
    ids = [5, 17, 99, 4, 63, 20]
    states = source.states([ids], [0, 1, 3])[0]
    with torch.inference_mode():
        logits = source.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        embedded = source.model.get_input_embeddings()(torch.tensor(ids))
    assert torch.equal(states[:, 0], embedded)
    assert torch.allclose(extract.final_head(tmp_path).logits(states[:, 2]), logits, rtol=1e-3, atol=1e-3)


def test_a_run_writes_the_same_form_as_an_engine(tiny, tmp_path):
    rows = tiny_target.answers(tiny, tmp_path / "data", rows=3)
    options = {"target": tiny, "layers": AUX, "backend": "transformers"}
    out = extract.run(tmp_path / "data", None, tmp_path / "states", **options)
    for row, ids in enumerate(rows.input_ids):
        path = extract.states_path(out, row)
        with path.open("rb") as file:
            described = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        assert set(described) == {"hidden_states", "token_ids"}  # no metadata, as vLLM's
        assert described["token_ids"] | {"data_offsets": 0} == {
            "dtype": "I64",
            "shape": [len(ids)],
            "data_offsets": 0,
        }
        assert described["hidden_states"]["shape"] == [len(ids), 4, WIDTH]
        assert load_file(path)["token_ids"].tolist() == ids
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("hs_*")}
    extract.run(tmp_path / "data", None, out, **options)
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("hs_*")} == before


def test_batches_are_of_like_length_and_complete():
    lengths = {row: 1 + (row * 37) % 90 for row in range(50)}
    groups = reference.batches(lengths, 200)
    assert sorted(row for group in groups for row in group) == list(range(50))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[row] for row in group) <= 200
    assert reference.batches({0: 1000}, 200) == [[0]]


def test_layers_that_cannot_be_told_are_an_error(tiny):
    model = LlamaForCausalLM.from_pretrained(tiny.path)
    with pytest.raises(extract.NoReference, match="has 0 lists of 7 layers"):
        reference.decoder_layers(model, 7)
