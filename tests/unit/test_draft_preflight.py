"""Every way that is known of serving a good head badly: one at a time, in both forms, and it is the one named."""

import shutil

import numpy as np
import pytest
import torch
from draft_heads import (
    DRAFT,
    VOCAB,
    H,
    N,
    change_config,
    change_tensors,
    foreign,
    layer_config,
    record,
    spoil,
    tiny_target,
)
from safetensors.torch import load_file, save_file

from labkit import draft, files, vocab
from labkit.draft import check_config
from labkit.draft.checks import UnknownEngine

LAYERS = [1, 3, 4]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def chosen():
    return vocab.build(np.random.default_rng(3).permutation(VOCAB), DRAFT, [0, 2])


@pytest.fixture(scope="module")
def good(target, chosen, tmp_path_factory):
    """The same head as the lab writes it, converted, and as another project's without the lab's record."""
    folder = tmp_path_factory.mktemp("heads")
    model = draft.build(target, chosen, LAYERS)
    told = {"layers": LAYERS, "vocabulary": chosen.digest}
    made = {"speculators": draft.export(model, folder / "speculators", verifier_name="tiny", record=told)}
    made["llama"] = draft.convert(made["speculators"], folder / "llama", "llama")
    made["foreign"] = foreign(shutil.copytree(made["llama"], folder / "foreign"))
    return made


@pytest.mark.parametrize("form", ["speculators", "llama", "foreign"])
def test_a_sound_head_has_no_problems(good, target, chosen, form):
    assert draft.preflight(good[form], target) == []
    assert draft.preflight(good[form], target, vocab=chosen) == []
    if form != "speculators":
        assert draft.preflight(good[form], target, engine="sglang") == []


def first_rows(tensors, name, rows):
    tensors[name] = tensors[name][:rows].clone()


def ids_of(tensors):
    return tensors["d2t"] + torch.arange(DRAFT)


def with_d2t(make):
    return lambda head: change_tensors(head, lambda tensors: tensors.update(d2t=make(tensors).clone()))


def with_tensor(name, make):
    return lambda head: change_tensors(head, lambda tensors: tensors.update({name: make(tensors).clone()}))


def without(name):
    return lambda head: change_tensors(head, lambda tensors: tensors.pop(name))


def both(*changes):
    def change(head):
        for one in changes:
            one(head)

    return change


def cfg(**changes):
    return lambda head: change_config(head, **changes)


def layer(**changes):
    return lambda head: layer_config(head, **changes)


def no_record(head):
    (head / "training.json").unlink(missing_ok=True)


ALL, SPEC, FLAT, OURS = (
    ("speculators", "llama", "foreign"),
    ("speculators",),
    ("llama", "foreign"),
    ("speculators", "llama"),
)
OTHER_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_theta": 1e4}
DOWN = {"speculators": "layers.0.mlp.down_proj.weight"}
RANDOM = torch.randn(VOCAB, H, generator=torch.Generator().manual_seed(9))

# forms, the check that names it, what its sentence has to say, the damage
BREAKS = [
    (ALL, "positions", "max_position_embeddings is 64, the target's is 128", cfg(max_position_embeddings=64)),
    (ALL, "positions", "max_position_embeddings is not said", cfg(max_position_embeddings=None)),
    (SPEC, "rope", "rope_parameters is", both(layer(**OTHER_ROPE), no_record)),
    (FLAT, "rope", "rope_parameters is", both(layer(**OTHER_ROPE), no_record)),
    (OURS, "trained with", "rope_parameters is", layer(**OTHER_ROPE)),
    (ALL, "rope schemas", "they differ", cfg(rope_theta=1e6)),
    (ALL, "rope schemas", "older than Transformers 5", cfg(rope_theta=None, rope_scaling=None)),
    (ALL, "vocabulary size", "vocab_size is 32, the target's is 64", both(cfg(vocab_size=32), without("t2d"))),
    (ALL, "geometry", "hidden_size is 16", cfg(hidden_size=16)),
    (SPEC, "draft vocabulary", "draft_vocab_size is 100", cfg(draft_vocab_size=100)),
    (FLAT, "draft vocabulary", "draft_vocab_size is 100", cfg(draft_vocab_size=100)),
    (OURS, "layer ids", "layer ids are [1, 2, 4], but the head was trained on [1, 3, 4]",
     cfg(eagle_aux_hidden_state_layer_ids=[1, 2, 4])),
    (ALL, "layer ids", "do not ascend within 0..10", cfg(eagle_aux_hidden_state_layer_ids=[4, 3, 1])),
    (ALL, "layer ids", "do not ascend within 0..10", cfg(eagle_aux_hidden_state_layer_ids=[1, 3, 19])),
    (SPEC, "layer ids", "names no eagle_aux", cfg(eagle_aux_hidden_state_layer_ids=None)),
    (SPEC, "layer counting", f"write {[2, N // 2, N - 3]} for vLLM",
     both(cfg(eagle_aux_hidden_state_layer_ids=[1, N // 2 - 1, N - 4]), no_record)),
    (("foreign",), "layer counting", "stand in eagle_config alone",
     cfg(eagle_aux_hidden_state_layer_ids=None)),
    (("foreign",), "layer counting", "as SpecForge, TorchSpec and ModelOpt count",
     cfg(eagle_aux_hidden_state_layer_ids=None,
         eagle_config={"eagle_aux_hidden_state_layer_ids": [1, N // 2 - 1, N - 4]})),
    (SPEC, "norm flags", "does not say norm_before_residual", both(cfg(norm_before_residual=None), no_record)),
    (SPEC, "norm flags", "does not say norm_output", both(cfg(norm_output=None), no_record)),
    (OURS, "trained with", "norm_output is False, the head was trained with True", cfg(norm_output=False)),
    (OURS, "trained with", "norm_before_residual is True", cfg(norm_before_residual=True)),
    (ALL, "norm flags", "the engine leaves that norm out",
     with_tensor("input_norm.weight", lambda t: torch.ones(3 * H))),
    (FLAT, "tied", "takes the embedding for lm_head", cfg(tie_word_embeddings=True)),
    (SPEC, "files", "speculators_model_type is 'eagle'", cfg(speculators_model_type="eagle")),
    (ALL, "files", "cannot be read", lambda h: (h / "model.safetensors").write_bytes(b"cut")),
    (ALL, "files", "cannot be read", lambda h: (h / "config.json").write_text("{")),
    (ALL, "files", "cannot be read", lambda h: (h / "config.json").unlink()),
    (ALL, "files", "pytorch_model.bin", lambda h: (h / "model.safetensors").rename(h / "pytorch_model.bin")),
    (ALL, "missing", "has no lm_head.weight: vLLM would draft with random numbers", without("lm_head.weight")),
    (ALL, "missing", "has no fc.weight", without("fc.weight")),
    (SPEC, "missing", "has no layers.0.mlp.down_proj", without("layers.0.mlp.down_proj.weight")),
    (FLAT, "missing", "has no layers.0.mlp.down_proj", without("midlayer.mlp.down_proj.weight")),
    (ALL, "missing map", "has no d2t", without("d2t")),
    (SPEC, "missing map", "has no t2d", without("t2d")),
    (ALL, "shapes", "lm_head.weight has shape [15, 32] instead of [16, 32]",
     lambda h: change_tensors(h, lambda t: first_rows(t, "lm_head.weight", 15))),
    (ALL, "finite", "fc.weight holds NaN", lambda h: change_tensors(h, spoil("fc.weight"))),
    (ALL, "finite", "lm_head.weight is zero throughout",
     with_tensor("lm_head.weight", lambda t: t["lm_head.weight"] * 0)),
    (ALL, "finite", "fc.weight is int8", with_tensor("fc.weight", lambda t: t["fc.weight"].to(torch.int8))),
    (ALL, "files", "config.json: it is '[1]'", lambda h: (h / "config.json").write_text("[1]")),
    (SPEC, "files", "rope_parameters is 'yarn'", layer(rope_parameters="yarn")),
    (FLAT, "files", "rope_scaling is '[1]'", cfg(rope_scaling=[1])),
    (OURS, "files", "training.json: it is '[1]'", lambda h: (h / "training.json").write_text("[1]")),
    (OURS, "files", "training.json cannot be read", lambda h: (h / "training.json").write_text("{")),
    (OURS, "files", "trained_with is 'x'", lambda h: record(h, trained_with="x")),
    (SPEC, "proposal", "vLLM refuses the head", cfg(speculators_config="x")),
    (SPEC, "proposal", "vLLM refuses the head", cfg(speculators_config={"proposal_methods": []})),
    (ALL, "unknown tensors", "model.norm.weight", with_tensor("model.norm.weight", lambda t: t["norm.weight"])),
    (("foreign",), "map", "absolute target ids, not offsets", with_d2t(ids_of)),
    (("foreign",), "map", "0, 1, 2, ...: a default", with_d2t(lambda t: torch.arange(DRAFT))),
    (("foreign",), "map", "never filled in", with_d2t(lambda t: torch.zeros(DRAFT, dtype=torch.int64))),
    (("foreign",), "map", "outside 0..63", with_d2t(lambda t: t["d2t"] + 60)),
    (("foreign",), "map", "not one whole number", with_d2t(lambda t: t["d2t"].float())),
    (ALL, "map", "d2t and t2d name different tokens", with_tensor("t2d", lambda t: t["t2d"].roll(1))),
    (OURS, "stale map", "training.json says", lambda h: record(h, vocabulary="0" * 16)),
    (("foreign",), "embedding", "its rows are not the target's",
     with_tensor("embed_tokens.weight", lambda t: RANDOM)),
    (("foreign",), "embedding", "it has shape [32, 32]",
     with_tensor("embed_tokens.weight", lambda t: RANDOM[:32])),
    (ALL, "window", "no sliding_window says",
     both(layer(layer_types=["sliding_attention"]), no_record)),
    (OURS, "trained with", "layer_types is ['sliding_attention']",
     layer(layer_types=["sliding_attention"], sliding_window=16)),
    (ALL, "window", "engines attend to all", layer(use_sliding_window=True, sliding_window=16)),
]  # fmt: skip
CASES = [(form, *rest) for forms, *rest in BREAKS for form in forms]


@pytest.mark.parametrize(
    ("form", "check", "said", "damage"), CASES, ids=[f"{n}-{c[0]}-{c[1]}" for n, c in enumerate(CASES)]
)
def test_each_damage_is_named_and_nothing_else(good, target, tmp_path, form, check, said, damage):
    head = shutil.copytree(good[form], tmp_path / "head")
    damage(head)
    found = draft.preflight(head, target)
    assert {problem.check for problem in found} == {check}, found
    assert any(said in problem for problem in found), found
    assert all(problem.where and problem.what and problem.remedy for problem in found)


def other_rows(target, ids):
    return load_file(target.path / "model.safetensors")["model.embed_tokens.weight"][ids].bfloat16()


def test_lm_head_cut_by_offsets_instead_of_ids_is_named(good, target, tmp_path):
    head = shutil.copytree(good["foreign"], tmp_path / "head")
    change_tensors(head, lambda t: t.update({"lm_head.weight": other_rows(target, t["d2t"])}))
    found = draft.preflight(head, target)
    assert [problem.check for problem in found] == ["lm_head rows"]
    assert "at the offsets of d2t" in found[0]


def test_the_map_of_another_training_is_named(good, target, tmp_path):
    """Consistent in itself, ascending, of the right size: only lm_head's rows tell."""
    head = shutil.copytree(good["foreign"], tmp_path / "head")
    other = vocab.build(np.random.default_rng(8).permutation(VOCAB), DRAFT)
    change_tensors(head, lambda t: t.update(d2t=other.d2t, t2d=other.t2d))
    assert [problem.check for problem in draft.preflight(head, target)] == ["stale map"]
    other = vocab.build(np.arange(VOCAB), DRAFT)
    assert {problem.check for problem in draft.preflight(good["llama"], target, vocab=other)} == {"stale map"}


def test_a_trained_lm_head_is_no_false_alarm(good, target, tmp_path):
    """Heads that train lm_head drift from the target's rows, or start from noise: their makers' business."""
    head = shutil.copytree(good["foreign"], tmp_path / "head")
    generator = torch.Generator().manual_seed(4)
    change_tensors(
        head, lambda t: t.update({"lm_head.weight": torch.randn(DRAFT, H, generator=generator).bfloat16()})
    )
    assert draft.preflight(head, target) == []


def test_the_targets_own_embedding_is_no_false_alarm(good, target, tmp_path):
    head = shutil.copytree(good["foreign"], tmp_path / "head")
    change_tensors(head, lambda t: t.update({"embed_tokens.weight": other_rows(target, torch.arange(VOCAB))}))
    assert draft.preflight(head, target) == []


def test_a_map_in_order_of_frequency_serves_and_is_sorted_for_training(good, target, chosen, tmp_path):
    """ModelOpt's and NeMo's maps do not ascend; engines do not mind, speculators' lm_head[t2d] does."""
    head = shutil.copytree(good["foreign"], tmp_path / "head")
    order = torch.randperm(DRAFT, generator=torch.Generator().manual_seed(2))

    def shuffle(tensors):
        tensors["d2t"] = ids_of(tensors)[order] - torch.arange(DRAFT)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order].clone()

    change_tensors(head, shuffle)
    assert draft.preflight(head, target) == []
    model = draft.load(head, target)
    assert torch.equal(model.d2t, chosen.d2t)
    assert torch.equal(
        model.lm_head.weight, load_file(good["llama"] / "model.safetensors")["lm_head.weight"].float()
    )


@pytest.mark.parametrize(
    ("form", "changes", "check"),
    [
        ("speculators", {}, "form"),
        ("llama", {"norm_before_residual": True}, "norm flags"),
        ("llama", {"draft_vocab_size": None}, "draft vocabulary"),
        ("llama", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}}, "layer counting"),
        ("foreign", {"layer_types": ["sliding_attention"], "sliding_window": 16}, "window"),
    ],
)
def test_what_sglang_does_not_do_is_named(good, target, tmp_path, form, changes, check):
    head = shutil.copytree(good[form], tmp_path / "head")
    change_config(head, **changes)
    assert check in {problem.check for problem in draft.preflight(head, target, engine="sglang")}


def test_sliding_windows_that_vllm_honours_are_no_problem(good, target, tmp_path):
    """speculators' default heads slide; vLLM 0.32 reads layer_types."""
    head = shutil.copytree(good["foreign"], tmp_path / "head")
    layer_config(head, layer_types=["sliding_attention"], sliding_window=16)
    assert draft.preflight(head, target) == []


def test_shorter_contexts_may_be_served_with_fewer_positions(good, target, tmp_path):
    head = shutil.copytree(good["foreign"], tmp_path / "head")
    change_config(head, max_position_embeddings=64)
    assert draft.preflight(head, target, max_model_len=64) == []
    assert draft.preflight(head, target, max_model_len=65) != []


def test_a_padded_vocabulary_is_told_from_a_wrong_one(good, target, tmp_path, monkeypatch):
    """A tokenizer of 60 tokens under an embedding of 64 rows: a head that says 60 took the tokenizer's number."""
    monkeypatch.setattr(type(target), "tokenizer", lambda self: range(60))
    head = shutil.copytree(good["llama"], tmp_path / "head")
    change_config(head, vocab_size=60)
    change_tensors(head, lambda tensors: tensors.pop("t2d"))
    found = draft.preflight(head, target)
    assert [problem.check for problem in found] == ["vocabulary size"]
    assert "its embedding is padded" in found[0]


def test_gemmas_norm_is_named_for_heads_that_speculators_trained(good, tmp_path):
    target = tiny_target(tmp_path / "target", model_type="qwen3_5_text")
    head = shutil.copytree(good["speculators"], tmp_path / "head")
    assert [
        p.check for p in draft.preflight(head, target)
    ] == []  # the lab's own heads train against the right norm
    (head / "training.json").unlink()
    assert [(p.check, p.fatal) for p in draft.preflight(head, target)] == [("1+w norm", False)]


def test_a_head_of_another_project_is_judged_but_not_refused_for_its_own_rope(good, target, tmp_path):
    head = shutil.copytree(good["foreign"], tmp_path / "head")
    layer_config(head, **OTHER_ROPE)
    assert [(p.check, p.fatal) for p in draft.preflight(head, target)] == [("rope", False)]


def test_an_mla_head_is_looked_at_as_far_as_heads_are_alike(good, target, tmp_path):
    head = shutil.copytree(good["foreign"], tmp_path / "head")
    change_config(head, architectures=["Eagle3DeepseekV2ForCausalLM"])
    assert draft.preflight(head, target) == []
    change_tensors(head, lambda tensors: tensors.pop("lm_head.weight"))
    assert [problem.check for problem in draft.preflight(head, target)] == ["missing"]
    with pytest.raises(draft.UnknownArchitecture, match="Eagle3DeepseekV2ForCausalLM"):
        draft.load(head, target)


def test_shards_are_read_through_their_index(good, target, tmp_path):
    head = shutil.copytree(good["foreign"], tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    (head / "model.safetensors").unlink()
    halves = {"a.safetensors": sorted(tensors)[::2], "b.safetensors": sorted(tensors)[1::2]}
    for name, names in halves.items():
        save_file({one: tensors[one] for one in names}, head / name)
    index = {"weight_map": {one: name for name, names in halves.items() for one in names}}
    files.write_json(head / "model.safetensors.index.json", index)
    assert draft.preflight(head, target) == []
    (head / "b.safetensors").unlink()
    assert [problem.check for problem in draft.preflight(head, target)] == ["files"]


def test_an_unknown_engine_is_an_error(good, target):
    with pytest.raises(UnknownEngine, match="trtllm"):
        draft.preflight(good["llama"], target, engine="trtllm")


@pytest.mark.parametrize(
    ("form", "file"),
    [
        ("speculators", "transformers_utils/configs/speculators/algos.py"),
        ("speculators", "model_executor/models/llama_eagle3.py"),
        ("llama", "model_executor/models/llama_eagle3.py"),
    ],
)
def test_a_flag_that_the_installed_vllm_does_not_read_is_named(good, target, tmp_path, monkeypatch, form, file):
    """vLLM before #46488 dropped norm_output of speculators' form without a word."""
    known = [flag for flag in draft.FLAGS if flag != "norm_output"]
    for name in ("transformers_utils/configs/speculators/algos.py", "model_executor/models/llama_eagle3.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(" ".join(known if name == file else draft.FLAGS))
    monkeypatch.setattr(check_config, "installed_vllm", lambda: tmp_path)
    found = draft.preflight(good[form], target)
    assert [problem.check for problem in found] == ["norm flags"]
    assert f"does not read norm_output ({file.split('/')[-1]})" in found[0]
    monkeypatch.setattr(check_config, "installed_vllm", lambda: None)
    assert draft.preflight(good[form], target) == []


@pytest.mark.parametrize("place", ["itself", "through a link", "others' files", "a file"])
def test_a_conversion_never_costs_a_file_of_others(good, tmp_path, place):
    """The folder is replaced whole: it has to be new, empty, or hold nothing but a head."""
    head, out = shutil.copytree(good["speculators"], tmp_path / "head"), tmp_path / "out"
    if place == "itself":
        out = head
    elif place == "through a link":
        out.symlink_to(head)
    elif place == "a file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "thesis.txt").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(draft.Occupied):
        draft.convert(head, out, "llama")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_earlier_conversion_is_written_over(good, tmp_path):
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        assert draft.read(draft.convert(good["speculators"], tmp_path / "empty", "llama")).form == "llama"
