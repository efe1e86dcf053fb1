"""Averaged heads beside sums by hand; the form that an older vLLM serves whole."""

import numpy as np
import pytest
import torch
from draft_heads import DRAFT, VOCAB, change_config, change_tensors, tiny_target
from safetensors.torch import load_file

from labkit import draft, files, vocab
from labkit.draft import check_config

LAYERS = (2, 4, 7)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


def maps(seed):
    return vocab.build(np.random.default_rng(seed).permutation(VOCAB), DRAFT, [0])


def make(target, folder, seed, **flags):
    """A head with a vocabulary of its own and an lm_head that was trained."""
    model = draft.build(target, maps(seed), LAYERS, seed=seed, train_lm_head=True, **flags)
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn(model.lm_head.weight.shape) * 0.1)
    return draft.export(model, folder, verifier_name="tiny", dtype=torch.float32, record={"seed": seed})


def row(tensors, target_id):
    """lm_head's row for a target token, None where the head has none."""
    ids = (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).tolist()
    return tensors["lm_head.weight"][ids.index(target_id)] if target_id in ids else None


@pytest.mark.parametrize("form", ["speculators", "llama"])
def test_every_weight_lies_between_the_two_and_absent_rows_are_the_targets(target, tmp_path, form):
    heads = [make(target, tmp_path / name, seed) for name, seed in (("one", 1), ("two", 2))]
    given = draft.convert(heads[0], tmp_path / "flat", "llama") if form == "llama" else heads[0]
    out = draft.average(given, heads[1], tmp_path / "out", target=target, vocab=maps(3), share=0.75)
    one, two, mixed = (load_file(head / "model.safetensors") for head in (*heads, out))
    for name in set(one) - {"lm_head.weight", "d2t", "t2d"}:
        assert torch.allclose(mixed[name], 0.25 * one[name] + 0.75 * two[name], atol=1e-6), name
    table = load_file(target.path / "model.safetensors")["model.embed_tokens.weight"]
    kinds = set()
    for place, target_id in enumerate(maps(3).target_ids.tolist()):
        parts = [row(one, target_id), row(two, target_id)]
        kinds.add(tuple(part is None for part in parts))
        parts = [table[target_id] if part is None else part for part in parts]
        assert torch.allclose(mixed["lm_head.weight"][place], 0.25 * parts[0] + 0.75 * parts[1], atol=1e-6)
    assert len(kinds) > 2  # rows of both, of one, of none
    assert draft.preflight(out, target) == []
    assert files.read_json(out / "training.json")["averaged"] == {
        "share": 0.75,
        "first": files.read_json(heads[0] / "training.json"),
    }


def test_the_ends_are_the_heads_themselves(target, tmp_path):
    heads = [make(target, tmp_path / name, seed) for name, seed in (("one", 1), ("two", 2))]
    for share, seed in ((0.0, 1), (1.0, 2)):
        out = draft.average(*heads, tmp_path / f"end{seed}", target=target, vocab=maps(seed), share=share)
        own, end = (load_file(head / "model.safetensors") for head in (heads[seed - 1], out))
        assert all(torch.equal(own[name], end[name]) for name in own)


def test_what_lies_between_no_two_stages_is_refused(target, tmp_path):
    one, two = (make(target, tmp_path / name, seed) for name, seed in (("one", 1), ("two", 2)))
    both = {"target": target, "vocab": maps(3)}
    with pytest.raises(draft.BadShare, match=r"1\.5"):
        draft.average(one, two, tmp_path / "out", **both, share=1.5)
    with pytest.raises(draft.Occupied, match="itself"):
        draft.average(one, two, two, **both)
    change_config(two, norm_output=False)
    with pytest.raises(draft.Unlike, match="norm_output is True in"):
        draft.average(one, two, tmp_path / "out", **both)
    change_config(two, norm_output=True)
    change_tensors(two, lambda tensors: tensors.update({"fc.weight": torch.zeros(3, 3)}))
    with pytest.raises(draft.Unlike, match=r"fc\.weight"):
        draft.average(one, two, tmp_path / "out", **both)
    assert not (tmp_path / "out").exists()


OLD_READER = "norm_before_residual norm_before_fc fc_norm"


@pytest.mark.parametrize(
    ("reader", "model", "form"),
    [
        (OLD_READER, f"{OLD_READER} norm_output", "llama"),  # vLLM 0.24
        (f"{OLD_READER} norm_output", f"{OLD_READER} norm_output", "speculators"),
        (OLD_READER, OLD_READER, "speculators"),  # no form brings it: preflight says so
    ],
)
def test_the_form_that_is_served_whole(target, tmp_path, monkeypatch, reader, model, form):
    place = tmp_path / "vllm"
    for file, text in ((check_config.READERS["speculators"], reader), (check_config.DRAFT_MODEL, model)):
        (place / file).parent.mkdir(parents=True)
        (place / file).write_text(text)
    monkeypatch.setattr(check_config, "installed_vllm", lambda: place)
    head = make(target, tmp_path / "head", 1)
    found = draft.servable(head, tmp_path / "run")
    assert draft.read(found).form == form
    assert (found == head) == (form == "speculators")
    fatal = [problem for problem in draft.preflight(found, target) if problem.fatal]
    assert bool(fatal) == ("norm_output" not in model)
    unread = [problem for problem in draft.preflight(head, target) if "norm_output" in problem]
    told = ["convert-head" in problem for problem in unread]
    assert told == [True] * ("norm_output" not in reader) + [False] * ("norm_output" not in model)
