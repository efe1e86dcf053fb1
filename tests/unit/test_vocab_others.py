"""Maps that others wrote: the known mistakes by their names, the right ones read."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from labkit import files, vocab

TARGETS, SIZE = 400, 100


@pytest.fixture
def built():
    return vocab.build(np.random.default_rng(0).permutation(TARGETS), SIZE, [0, 399])


def named(d2t, t2d=None):
    found = vocab.faults(d2t, TARGETS, t2d)
    assert len(found) <= 1
    return found[0] if found else ""


def test_a_sound_map_has_no_fault(built):
    assert named(built.d2t) == named(built.d2t, built.t2d) == ""
    assert vocab.problems(built.d2t, TARGETS, built.t2d) == []
    first = vocab.build(np.arange(TARGETS)[::-1], SIZE)  # the first hundred: all offsets are zero, and right
    assert vocab.problems(first.d2t, TARGETS, first.t2d) == []
    second = vocab.VocabMap.of_targets(2 * torch.arange(SIZE), TARGETS)  # every other token: offsets 0, 1, 2, ...
    assert vocab.problems(second.d2t, TARGETS, second.t2d) == []


def test_absolute_ids_are_recognised_with_and_without_t2d(built):
    assert "absolute target ids, not offsets" in named(built.target_ids)
    assert "absolute target ids, not offsets" in named(built.target_ids, built.t2d)


def test_the_default_that_nobody_replaced(built):
    assert "would become target token 2i" in named(torch.arange(SIZE), built.t2d)
    assert "would become target token 2i" in named(torch.arange(SIZE))


def test_zeros_that_nobody_filled_in(built):
    assert "never filled in" in named(torch.zeros(SIZE, dtype=torch.int64), built.t2d)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d2t: d2t.float(), "torch.float32 of shape"),
        (lambda d2t: d2t[None], r"of shape [1, 100]"),
        (lambda d2t: d2t + 200, "outside 0..399"),
        (lambda d2t: d2t - 1, "outside 0..399"),
        (lambda d2t: torch.cat([d2t[:1], d2t[:1] - 1, d2t[2:]]), "1 draft tokens to a target token that another"),
    ],
)
def test_what_leads_nowhere(built, change, said):
    assert said in named(change(built.d2t))


def test_t2d_is_bool_over_the_target_and_names_the_same(built):
    assert "t2d is torch.int64" in named(built.d2t, built.t2d.long())
    assert "not bool of [400]" in named(built.d2t, built.t2d[:399])
    assert "different tokens" in named(built.d2t, built.t2d.roll(1))


def test_an_order_by_frequency_is_no_fault_but_a_problem_for_speculators(built):
    shuffled = built.target_ids[torch.randperm(SIZE, generator=torch.Generator().manual_seed(0))]
    d2t = shuffled - torch.arange(SIZE)
    assert named(d2t, built.t2d) == ""
    assert ["do not ascend" in text for text in vocab.problems(d2t, TARGETS, built.t2d)] == [True]


def write(folder, form, d2t, t2d):
    if form == "npy":
        np.save(folder / f"d2t-{SIZE}.npy", d2t.numpy())
        np.save(folder / f"t2d-{SIZE}.npy", t2d.numpy())
        return folder
    save_file({"d2t": d2t, "t2d": t2d, "fc.weight": torch.ones(1)}, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize("form", ["npy", "head"])
@pytest.mark.parametrize("absolute", [False, True])
def test_maps_of_speculators_and_of_heads_are_read(built, tmp_path, form, absolute):
    path = write(tmp_path, form, built.target_ids if absolute else built.d2t, built.t2d)
    read = vocab.read(path, TARGETS)
    assert torch.equal(read.d2t, built.d2t)
    assert torch.equal(read.t2d, built.t2d)
    assert read.digest == built.digest


def test_the_labs_own_folder_is_read(built, tmp_path):
    built.save(tmp_path)
    assert torch.equal(vocab.read(tmp_path, TARGETS).d2t, built.d2t)


def test_speculators_own_files_are_read(tmp_path):
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    counts = np.random.default_rng(1).permutation(TARGETS)
    d2t, t2d = build_vocab_mappings_from_distribution(dict(enumerate(counts.tolist())), SIZE, TARGETS)
    read = vocab.read(write(tmp_path, "npy", d2t, t2d), TARGETS)
    assert torch.equal(read.d2t, vocab.build(counts, SIZE).d2t)


def test_wrong_maps_are_refused_by_name(built, tmp_path):
    with pytest.raises(vocab.BadVocabulary, match="2i"):
        vocab.read(write(tmp_path, "head", torch.arange(SIZE), built.t2d), TARGETS)
    save_file({"t2d": built.t2d}, tmp_path / "model.safetensors")
    with pytest.raises(vocab.BadVocabulary, match="has no d2t"):
        vocab.read(tmp_path / "model.safetensors", TARGETS)
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(files.BrokenFile, match="no readable map"):
        vocab.read(tmp_path / "model.safetensors", TARGETS)
