"""The head's shape from its target's: Kimi-K2.5 without weights, by hand; wrappers; norms of the 1 + w kind."""

import json

import numpy as np
import pytest
import torch
from draft_heads import CONFIG, DRAFT, VOCAB, H, tiny_target
from safetensors.torch import load_file, save_file

from labkit import draft, files, settings, targets, vocab
from labkit.draft import weights
from labkit.draft.config import both_schemas, layer_config, rope_of, written_out
from labkit.draft.forms import to_llama

KIMI_LAYERS = (2, 30, 58)  # vLLM's count for 61 layers: eagle3.md, section 4


@pytest.fixture(scope="module")
def kimi():
    return draft.configure("kimi-k2.5", draft_vocab_size=32_000, layers=KIMI_LAYERS)


def test_kimis_head_is_the_published_one_in_shape(kimi):
    """AQ-MedAI's heads: 64 heads of 128 over hidden 7168, 64 KV heads, width 18432, draft vocabulary 32,000."""
    layer = written_out(kimi.transformer_layer_config)
    expected = {
        "model_type": "llama", "hidden_size": 7168, "num_attention_heads": 64, "num_key_value_heads": 64,
        "head_dim": 128, "intermediate_size": 18432, "vocab_size": 163840, "num_hidden_layers": 1,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "bos_token_id": 163584, "eos_token_id": 163585,
        "layer_types": ["full_attention"], "sliding_window": None, "use_sliding_window": False,
        "tie_word_embeddings": False, "attention_bias": False,
    }  # fmt: skip
    assert {name: layer[name] for name in expected} == expected
    assert (kimi.draft_vocab_size, kimi.eagle_aux_hidden_state_layer_ids) == (32_000, [2, 30, 58])
    published = files.read_json(settings.root() / "data" / "drafts.json")["heads"]
    aq = next(head for head in published if head["name"] == "AQ-MedAI/Kimi-K25-eagle3")
    shared = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    assert {name: aq[name] for name in (*shared, "head_dim")} == {
        name: layer[name] for name in (*shared, "head_dim")
    }


def test_kimis_rope_is_the_targets_in_both_schemas(kimi):
    layer = written_out(kimi.transformer_layer_config)
    new, old = layer["rope_parameters"], layer["rope_scaling"]
    scaling = {"factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
    assert {name: new[name] for name in scaling} == {name: old[name] for name in scaling} == scaling
    assert new["rope_theta"] == layer["rope_theta"] == 50_000.0
    assert new["rope_type"] == old["rope_type"] == old["type"] == "yarn"


def test_kimis_tensors_and_parameters_by_hand(kimi):
    needed = draft.shapes(
        kimi.to_dict() | {"transformer_layer_config": written_out(kimi.transformer_layer_config)}
    )
    h, q, width, size = 7168, 64 * 128, 18432, 32_000
    expected = {
        "fc.weight": [h, 3 * h],
        "layers.0.self_attn.q_proj.weight": [q, 2 * h],
        "layers.0.self_attn.k_proj.weight": [q, 2 * h],
        "layers.0.self_attn.v_proj.weight": [q, 2 * h],
        "layers.0.self_attn.o_proj.weight": [h, q],
        "layers.0.mlp.gate_proj.weight": [width, h],
        "layers.0.mlp.up_proj.weight": [width, h],
        "layers.0.mlp.down_proj.weight": [h, width],
        "layers.0.input_layernorm.weight": [h],
        "layers.0.hidden_norm.weight": [h],
        "layers.0.post_attention_layernorm.weight": [h],
        "norm.weight": [h],
        "lm_head.weight": [size, h],
        "d2t": [size],
        "t2d": [163_840],
    }
    assert needed == expected
    trained = sum(np.prod(shape) for name, shape in needed.items() if name not in ("lm_head.weight", "d2t", "t2d"))
    # fc 154,140,672; q, k, v 117,440,512 each; o 58,720,256; gate, up, down 132,120,576 each; four norms 28,672
    assert trained == 154_140_672 + 3 * 117_440_512 + 58_720_256 + 3 * 132_120_576 + 28_672 == 961_572_864
    assert np.prod(needed["lm_head.weight"]) == 229_376_000


def test_kimis_model_has_these_tensors(kimi):
    """speculators' class on the meta device: shapes without 5 GB of numbers."""
    from speculators.models.eagle3 import Eagle3DraftModel

    with torch.device("meta"):
        model = Eagle3DraftModel(kimi)
    config = kimi.to_dict() | {"transformer_layer_config": written_out(kimi.transformer_layer_config)}
    frozen = ("embed_tokens", "verifier")
    made = {name: list(t.shape) for name, t in model.state_dict().items() if not name.startswith(frozen)}
    assert made == draft.shapes(config)


@pytest.mark.parametrize("name", ["kimi-k2.5", "mini-kimi"])
def test_rope_turns_alike_in_training_and_in_vllm(name):
    """Transformers' angles (speculators trains with them) against vLLM's, from the two forms that are written."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    config = draft.configure(name, draft_vocab_size=1024, layers=(1, 2, 3))
    layer = config.transformer_layer_config
    flat = to_llama(config.to_dict() | {"transformer_layer_config": written_out(layer)})
    read = AutoConfig.for_model(**{key: value for key, value in flat.items() if key != "labkit"})
    at = torch.tensor([0, 1, 7, 500, 4095, 4096, 8000])
    rotary = LlamaRotaryEmbedding(layer)
    cos, sin = (part[0, :, : layer.head_dim // 2] for part in rotary(torch.zeros(1), at[None]))
    with set_current_vllm_config(VllmConfig()):
        served = get_rope(
            layer.head_dim,
            layer.max_position_embeddings,
            rope_parameters=dict(read.rope_parameters),
            dtype=torch.float32,
        )
    theirs_cos, theirs_sin = served.cos_sin_cache[at].chunk(2, dim=-1)
    assert torch.allclose(cos, theirs_cos, atol=2e-3)
    assert torch.allclose(sin, theirs_sin, atol=2e-3)


def test_old_and_new_rope_schemas_are_read_alike():
    old = {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", "factor": 64.0}}
    new = {"rope_parameters": {"rope_type": "yarn", "factor": 64.0, "rope_theta": 5e4}}
    nested = {
        "rope_parameters": {"full_attention": new["rope_parameters"], "sliding_attention": {"rope_theta": 1e4}}
    }
    assert rope_of(old) == rope_of(new) == rope_of(nested) == new["rope_parameters"]
    assert rope_of({"rope_theta": 1e6, "rope_scaling": None}) == {"rope_type": "default", "rope_theta": 1e6}
    assert rope_of({}) == {"rope_type": "default", "rope_theta": 1e4}
    assert rope_of(both_schemas(rope_of(old))) == rope_of(old)
    assert rope_of({k: v for k, v in both_schemas(rope_of(old)).items() if k != "rope_parameters"}) == rope_of(old)


def test_the_layer_of_a_llama_target_is_the_targets_own(tmp_path):
    layer = layer_config(tiny_target(tmp_path / "t"))
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"):
        assert getattr(layer, name) == CONFIG[name]
    assert layer.rope_parameters == CONFIG["rope_parameters"]


def test_unknown_or_excluding_flags_are_refused():
    with pytest.raises(draft.UnknownArchitecture, match="norm_after"):
        draft.configure("kimi-k2.5", draft_vocab_size=16, layers=KIMI_LAYERS, norm_after=True)
    with pytest.raises(draft.UnknownArchitecture, match="mutually exclusive"):
        draft.configure("kimi-k2.5", draft_vocab_size=16, layers=KIMI_LAYERS, norm_before_fc=True, fc_norm=True)


@pytest.mark.parametrize("name", ["mini-kimi", "mini-kimi text"])
def test_mini_kimi_in_its_wrapper_and_without(name, tmp_path):
    target = targets.resolve("mini-kimi")
    whole = load_file(target.path / "model.safetensors")
    path = target.geometry.wrapper
    target = targets.text_model(target) if name.endswith("text") else target
    mapping = vocab.build(np.arange(4096)[::-1], 512, vocab.required_ids(target.tokenizer()))
    model = draft.build(target, mapping, (1, 3, 4))
    assert torch.equal(model.verifier_norm.weight, whole[f"{path}.norm.weight"].float())
    assert torch.equal(model.embed_tokens.weight, whole[f"{path}.embed_tokens.weight"].float())
    assert model.layers[0].self_attn.head_dim == 64  # the values' width: 56 = 224 / 4 is no size that engines take
    head = draft.export(model, tmp_path / "head", verifier_name=target.name)
    assert draft.preflight(head, target) == []
    assert draft.preflight(draft.convert(head, tmp_path / "flat", "llama"), target, engine="sglang") == []


def test_a_decoy_norm_in_a_multimodal_checkpoint_is_not_taken(tmp_path):
    """speculators#1038: the shortest name that ends alike is another part's."""
    folder = tmp_path / "target"
    folder.mkdir()
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": CONFIG,
    }
    files.write_json(folder / "config.json", config)
    tensors = {
        "language_model.model.embed_tokens.weight": torch.randn(VOCAB, H),
        "language_model.lm_head.weight": torch.randn(VOCAB, H),
        "language_model.model.norm.weight": torch.full((H,), 2.0),
        "vision.model.norm.weight": torch.full((H,), 7.0),
        "vision.embed_tokens.weight": torch.zeros(VOCAB, H),
        "vision.lm_head.weight": torch.zeros(VOCAB, H),
    }
    save_file(tensors, folder / "model.safetensors")
    target = targets.Target("decoy", folder, "made for a test")
    chosen = vocab.build(np.arange(VOCAB), DRAFT)
    model = draft.build(target, chosen, (2, 5, 7))
    assert torch.equal(model.verifier_norm.weight, tensors["language_model.model.norm.weight"])
    assert torch.equal(model.embed_tokens.weight, tensors["language_model.model.embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight, tensors["language_model.lm_head.weight"][chosen.target_ids])


def test_norms_of_the_one_plus_w_kind_train_against_the_right_logits(tmp_path):
    """The verifier's logits in training equal those of the target's own norm module."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

    target = tiny_target(tmp_path / "target", model_type="qwen3_5_text")
    stored = load_file(target.path / "model.safetensors")
    model = draft.build(target, vocab.build(np.arange(VOCAB), VOCAB), (2, 5, 7))
    norm = Qwen3_5RMSNorm(H, eps=CONFIG["rms_norm_eps"])
    norm.load_state_dict({"weight": stored["model.norm.weight"]})
    states = torch.randn(5, H, generator=torch.Generator().manual_seed(0))
    expected = norm(states) @ stored["model.embed_tokens.weight"].T
    assert torch.allclose(model.verifier_lm_head(model.verifier_norm(states)), expected, atol=1e-4)
    draft.warm_start(model, target)
    assert torch.equal(model.norm.weight.data, stored["model.norm.weight"] + 1)


def test_an_embedding_with_more_rows_than_the_vocabulary_is_cut(tmp_path):
    target = tiny_target(tmp_path / "target")
    config = json.loads((target.path / "config.json").read_text())
    files.write_json(target.path / "config.json", config | {"vocab_size": VOCAB - 4})
    stored = load_file(target.path / "model.safetensors")["model.embed_tokens.weight"]
    padded = targets.Target("padded", target.path, "made for a test")
    model = draft.build(padded, vocab.build(np.arange(VOCAB - 4), DRAFT), (2, 5, 7))
    assert torch.equal(model.embed_tokens.weight, stored[: VOCAB - 4])


def test_missing_weights_are_named(tmp_path):
    target = tiny_target(tmp_path / "target")
    tensors = load_file(target.path / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, target.path / "model.safetensors")
    with pytest.raises(draft.MissingWeights, match=r"model\.norm\.weight"):
        draft.build(target, vocab.build(np.arange(VOCAB), DRAFT), (2, 5, 7))
    assert weights.rows(target.path, ["model.norm.weight"], [0]) is None
