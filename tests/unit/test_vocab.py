"""The draft vocabulary against hand-made counts and a second implementation."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import files, vocab


def test_the_most_frequent_are_taken_ascending_as_offsets():
    chosen = vocab.build(np.array([0, 5, 1, 0, 9, 5, 2]), 4, [])
    # by count: 4 (9), 1 (5), 5 (5), 6 (2)
    assert chosen.target_ids.tolist() == [1, 4, 5, 6]
    assert chosen.d2t.tolist() == [1, 3, 3, 3]
    assert chosen.d2t.dtype == torch.int64
    assert chosen.t2d.tolist() == [False, True, False, False, True, True, True]
    assert chosen.coverage(np.array([0, 1, 1, 1, 1, 0, 0])) == 0.5


def test_required_tokens_are_in_even_if_never_seen():
    assert vocab.build(np.array([9, 8, 7, 0]), 2, [3]).target_ids.tolist() == [0, 3]


def test_unseen_tokens_fill_up_lowest_first():
    assert vocab.build(np.array([0, 0, 0, 0, 3]), 3, []).target_ids.tolist() == [0, 1, 4]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.data())
def test_any_vocabulary_agrees_with_a_plain_sort(counts, data):
    size = data.draw(st.integers(1, len(counts)))
    required = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=size))
    built = vocab.build(np.array(counts), size, required)
    rest = sorted(set(range(len(counts))) - required, key=lambda i: (-counts[i], i))
    expected = sorted([*required, *rest[: size - len(required)]])
    assert built.target_ids.tolist() == expected
    assert built.t2d.nonzero().flatten().tolist() == expected
    assert vocab.problems(built.d2t, len(counts)) == []


def test_it_agrees_with_speculators():
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    counts = np.random.default_rng(0).integers(0, 50, 200)
    d2t, t2d = build_vocab_mappings_from_distribution(dict(enumerate(counts.tolist())), 64, 200)
    built = vocab.build(counts, 64)
    assert built.d2t.tolist() == d2t.tolist()
    assert built.t2d.tolist() == t2d.tolist()


@pytest.mark.parametrize(
    ("counts", "size", "required", "said"),
    [
        ([1, 2], 3, [], "draft_vocab_size=3 does not lie in 1..2"),
        ([1, 2], 0, [], "draft_vocab_size=0"),
        ([1, 2, 3], 1, [0, 1], "2 required ids do not fit"),
        ([1, 2, 3], 2, [7], r"required ids \[7\] lie outside"),
        ([1, -2, 3], 2, [], "are no counts"),
        ([], 1, [], "are no counts"),
        ([[1], [2]], 1, [], r"shape \(2, 1\)"),
        ([1.0, float("nan")], 1, [], "are no counts"),
    ],
)
def test_impossible_vocabularies_are_refused_with_the_value(counts, size, required, said):
    with pytest.raises(vocab.BadVocabulary, match=said):
        vocab.build(np.array(counts), size, required)


def test_saved_and_loaded(tmp_path):
    built = vocab.build(np.arange(10), 4, [0])
    built.save(tmp_path)
    again = vocab.load(tmp_path)
    assert torch.equal(again.d2t, built.d2t)
    assert torch.equal(again.t2d, built.t2d)
    (tmp_path / vocab.FILE).write_bytes(b"cut")
    with pytest.raises(files.BrokenFile, match=vocab.FILE):
        vocab.load(tmp_path)


@pytest.mark.parametrize(
    ("d2t", "said"),
    [
        ([0, 2, 4], "outside 0..4"),  # absolute ids 0, 2, 4 taken for offsets: 0, 3, 6
        ([3, 0, 0], "do not ascend"),
        ([1, 0, 0], "do not ascend"),  # id 1 twice
        ([-1, 0, 0], "outside"),
    ],
)
def test_a_contradictory_map_is_named(d2t, said):
    assert any(said in text for text in vocab.problems(torch.tensor(d2t), 5))
