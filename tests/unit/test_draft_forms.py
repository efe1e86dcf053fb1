"""Both forms of a head hold the same head: bit for bit, and in what it computes, by a forward pass of our own."""

import json

import numpy as np
import pytest
import torch
from draft_heads import DRAFT, VOCAB, H, change_config, change_tensors, foreign, tiny_target
from safetensors.torch import load_file

from labkit import draft, vocab
from labkit.draft.export import UnknownForm

EPS, THETA, HEADS, KV, DIM = 1e-5, 5000.0, 4, 2, 8  # of draft_heads.CONFIG
CLASSIC = dict.fromkeys(draft.FLAGS, False)
FLAG_SETS = [
    {},
    CLASSIC,
    CLASSIC | {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    CLASSIC | {"fc_norm": True},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def chosen():
    return vocab.build(np.random.default_rng(5).permutation(VOCAB), DRAFT, [0])


@pytest.fixture(params=FLAG_SETS, ids=["lab", "classic", "speculators", "fc_norm"])
def written(request, target, chosen, tmp_path):
    """A head with weights that matter: its norms are no ones, which would hide a missing one."""
    model = draft.build(target, chosen, (2, 4, 7), **request.param)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.ndim == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    return draft.export(model, tmp_path / "one", verifier_name="tiny", dtype=torch.float32), request.param


def tensors_of(head):
    return load_file(head / "model.safetensors")


def config_of(head):
    return json.loads((head / "config.json").read_text())


def test_there_and_back_bit_for_bit(written, target, tmp_path):
    first, _ = written
    flat = draft.convert(first, tmp_path / "flat", "llama")
    back = draft.convert(flat, tmp_path / "back", "speculators")
    again = draft.convert(back, tmp_path / "again", "llama")
    assert (back / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    assert (again / "model.safetensors").read_bytes() == (flat / "model.safetensors").read_bytes()
    assert config_of(again) == config_of(flat)
    before, after = config_of(first), config_of(back)
    layer, layer_after = before.pop("transformer_layer_config"), after.pop("transformer_layer_config")
    assert {name: layer_after.get(name) for name in layer} == layer
    assert {name: after.get(name) for name in before} == before
    assert draft.preflight(flat, target) == draft.preflight(back, target) == []
    assert draft.preflight(flat, target, max_model_len=16) == []


def test_the_flat_form_is_what_vllm_and_sglang_look_for(written, tmp_path):
    flat = draft.convert(written[0], tmp_path / "flat", "llama")
    config, tensors = config_of(flat), tensors_of(flat)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 7]  # vLLM: the layers that the states enter
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]  # SGLang adds one
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == THETA
    assert "speculators_config" not in config  # vLLM would take the directory for speculators' form
    assert {name.split(".")[0] for name in tensors} - {"fc_norm", "input_norm"} == {
        "fc", "midlayer", "norm", "lm_head", "d2t", "t2d",
    }  # fmt: skip


def test_vllm_reads_the_flat_form_as_the_other(written, tmp_path):
    from transformers import AutoConfig
    from vllm.transformers_utils.configs.eagle import EAGLEConfig
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    flat = draft.convert(written[0], tmp_path / "flat", "llama")
    one = SpeculatorsConfig.from_pretrained(str(written[0]))
    two = EAGLEConfig(AutoConfig.from_pretrained(flat), method="eagle3", model_type="eagle")
    assert two.architectures == ["LlamaForCausalLMEagle3"]
    names = [*draft.FLAGS, "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "hidden_size", "head_dim"]
    names += ["num_key_value_heads", "rms_norm_eps", "vocab_size", "max_position_embeddings", "layer_types"]
    assert {name: getattr(one, name) for name in names} == {name: getattr(two, name) for name in names}
    kept = ("rope_type", "rope_theta")
    assert [[c.rope_parameters[name] for name in kept] for c in (one, two)] == [["default", THETA]] * 2


def rms(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def turned(x, positions):
    """Rotary embedding of [T, heads, DIM]: pairs are (i, i + DIM/2)."""
    angles = positions[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)  # [T, DIM/2]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., : DIM // 2], x[..., DIM // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def plain_forward(t, flags, embedding, states, ids):
    """EAGLE-3's published forward pass of one conversation: logits [T, draft vocabulary].

    t: tensors without the layer's prefix; states [T, 3H] of x_0..x_{T-1}; ids [T] the tokens after them.
    """
    if flags["norm_before_fc"]:
        states = rms(states, t["input_norm.weight"])
    if flags["fc_norm"]:
        parts = [rms(part, t[f"fc_norm.{i}.weight"]) for i, part in enumerate(states.split(H, -1))]
        states = torch.cat(parts, -1)
    hidden = states @ t["fc.weight"].T
    normed = rms(hidden, t["hidden_norm.weight"])
    residual = normed if flags["norm_before_residual"] else hidden
    both = torch.cat([rms(embedding[ids], t["input_layernorm.weight"]), normed], -1)  # [T, 2H]
    positions = torch.arange(1, len(ids) + 1).float()
    q, k, v = ((both @ t[f"self_attn.{n}_proj.weight"].T).view(len(ids), -1, DIM) for n in "qkv")
    q, k = turned(q, positions), turned(k, positions)
    k, v = (x.repeat_interleave(HEADS // KV, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
    scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(ids), -1)
    x = residual + mixed @ t["self_attn.o_proj.weight"].T
    inner = rms(x, t["post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(inner @ t["mlp.gate_proj.weight"].T) * (inner @ t["mlp.up_proj.weight"].T)
    x = x + gate @ t["mlp.down_proj.weight"].T
    return rms(x, t["norm.weight"]) @ t["lm_head.weight"].T


def model_logits(model, states, ids):
    seen = []
    handle = model.lm_head.register_forward_hook(lambda module, given, made: seen.append(made))
    with torch.inference_mode():
        model(states[None], ids[None], torch.zeros(1, len(ids), dtype=torch.long), ttt_steps=1)
    handle.remove()
    return seen[0][0]


def test_both_forms_compute_what_the_convention_says(written, target, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    first, flags = written
    flags = draft.FLAGS | flags
    flat = draft.convert(first, tmp_path / "flat", "llama")
    embedding = load_file(target.path / "model.safetensors")["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(0)
    states, ids = torch.randn(12, 3 * H, generator=generator), torch.randint(VOCAB, (12,), generator=generator)
    tensors = {name.removeprefix("midlayer."): value for name, value in tensors_of(flat).items()}
    expected = plain_forward(tensors, flags, embedding, states, ids)
    assert expected.std() > 0.1
    for head in (first, flat):
        found = model_logits(draft.load(head, target).eval(), states, ids)
        assert torch.allclose(found, expected, atol=2e-5), (found - expected).abs().max()


def test_a_head_of_another_project_loads_and_gets_its_missing_parts(target, chosen, tmp_path):
    """No t2d, no record, aux ids in eagle_config, flags unsaid: as SpecForge and others write it."""
    model = draft.build(target, chosen, (2, 5, 7), **CLASSIC)
    head = foreign(draft.export(model, tmp_path / "head", verifier_name="tiny", form="llama"))
    change_tensors(head, lambda tensors: tensors.pop("t2d"))
    change_config(head, eagle_aux_hidden_state_layer_ids=None, **dict.fromkeys(draft.FLAGS))
    change_config(head, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 5, 7]})
    loaded = draft.load(head, target)
    assert torch.equal(loaded.t2d, chosen.t2d)
    assert loaded.target_layer_ids == [2, 5, 7]
    assert {name: getattr(loaded.config, name) for name in draft.FLAGS} == CLASSIC
    made = draft.convert(head, tmp_path / "made", "speculators")
    assert draft.preflight(made, target) == []
    assert {name: config_of(made)[name] for name in draft.FLAGS} == CLASSIC


def test_unsaid_flags_of_speculators_form_become_what_vllm_reads(target, chosen, tmp_path):
    model = draft.build(target, chosen, (2, 5, 7), **CLASSIC | {"norm_before_residual": True})
    head = draft.export(model, tmp_path / "head", verifier_name="tiny")
    change_config(head, **dict.fromkeys(draft.FLAGS))
    made = draft.convert(head, tmp_path / "made", "llama")
    assert {name: config_of(made)[name] for name in draft.FLAGS} == CLASSIC | {"norm_before_residual": True}


def test_export_writes_either_form(target, chosen, tmp_path):
    model = draft.build(target, chosen, (2, 4, 7))
    flat = draft.export(model, tmp_path / "flat", verifier_name="tiny", form="llama")
    other = draft.export(model, tmp_path / "other", verifier_name="tiny")
    converted = draft.convert(other, tmp_path / "converted", "llama")
    assert (flat / "model.safetensors").read_bytes() == (converted / "model.safetensors").read_bytes()
    assert config_of(flat) == config_of(converted)
    with pytest.raises(UnknownForm, match="sglang"):
        draft.export(model, tmp_path / "no", verifier_name="tiny", form="sglang")


def test_what_has_no_flat_form_or_no_lm_head_is_refused(chosen, tmp_path):
    qwen = tiny_target(tmp_path / "qwen", model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    head = draft.export(draft.build(qwen, chosen, (2, 4, 7)), tmp_path / "head", verifier_name="qwen")
    assert draft.preflight(head, qwen) == []  # its q_norm and k_norm have a place
    with pytest.raises(draft.UnknownArchitecture, match="qwen3"):
        draft.convert(head, tmp_path / "flat", "llama")
    change_tensors(head, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(draft.BadHead, match="lm_head"):
        draft.convert(head, tmp_path / "again", "speculators")
    assert not (tmp_path / "flat").exists()


def test_a_head_over_another_target_is_refused(target, chosen, tmp_path):
    head = draft.export(draft.build(target, chosen, (2, 4, 7)), tmp_path / "head", verifier_name="tiny")
    wider = tiny_target(tmp_path / "wider", vocab_size=VOCAB * 2)
    with pytest.raises(draft.BadHead, match="64 tokens of width 32, the target has 128"):
        draft.load(head, wider)


def test_the_command_converts(target, chosen, tmp_path, capsys):
    from labkit import cli

    head = draft.export(draft.build(target, chosen, (2, 4, 7)), tmp_path / "head", verifier_name="tiny")
    cli.app(["convert-head", str(head), str(tmp_path / "flat")], standalone_mode=False)
    assert "llama form" in capsys.readouterr().out
    assert draft.read(tmp_path / "flat").form == "llama"
