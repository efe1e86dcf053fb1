"""From data to the draft vocabulary: counting, what has to be in it, coverage, and the map's fingerprint."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import targets, vocab

ROWS = [([5, 5, 2, 7], [0, 1, 1, 0]), ([5, 1], [True, True]), ([], []), ([3], [False])]


def test_counts_only_where_the_mask_trains():
    ids, masks = zip(*ROWS, strict=True)
    assert vocab.count(ids, masks, 8).tolist() == [0, 1, 1, 0, 0, 2, 0, 0]


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12), max_size=9), st.integers(1, 4))
def test_counting_in_chunks_agrees_with_counting_by_hand(rows, chunk):
    expected = [sum(token == t and kept for row in rows for token, kept in row) for t in range(10)]
    ids, masks = [[t for t, _ in row] for row in rows], [[m for _, m in row] for row in rows]
    before, vocab.building.CHUNK_ROWS = vocab.building.CHUNK_ROWS, chunk
    try:
        assert vocab.count(iter(ids), iter(masks), 10).tolist() == expected
    finally:
        vocab.building.CHUNK_ROWS = before


def test_counts_are_speculators_own(tmp_path):
    from datasets import Dataset
    from speculators.train.vocab_mapping import save_token_frequency_distribution

    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 50, rng.integers(1, 30)) for _ in range(40)]
    masks = [rng.random(len(row)) < 0.6 for row in rows]
    theirs = Dataset.from_dict({"input_ids": rows, "loss_mask": masks}).with_format("torch")
    save_token_frequency_distribution(theirs, tmp_path / "freq.pt")
    frequency = torch.load(tmp_path / "freq.pt", weights_only=True)
    ours = vocab.count(rows, masks, 50)
    assert {token: n for token, n in enumerate(ours.tolist()) if n} == frequency


@pytest.mark.parametrize(
    ("ids", "masks", "said"),
    [
        ([[1, 9]], [[1, 1]], r"1\.\.9 do not lie in 0\.\.7"),
        ([[-1]], [[1]], r"-1\.\.-1"),
        ([[1, 2]], [[1]], "2 tokens"),
    ],
)
def test_data_of_another_tokenizer_are_refused(ids, masks, said):
    with pytest.raises(vocab.BadVocabulary, match=said):
        vocab.count(ids, masks, 8)


@pytest.mark.parametrize("name", ["smollm2", "mini-kimi"])
def test_every_token_that_the_template_renders_is_required(name):
    """Independently: render a conversation of known words, and take its tokens that overlap none of them."""
    tokenizer = targets.resolve(name).tokenizer()
    required = vocab.required_ids(tokenizer)
    assert set(tokenizer.all_special_ids) <= set(required)
    words = ["Quartz", "Vellum", "Nimbus"]
    roles = ["user", "assistant", "user"]
    messages = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = [(text.index(word), text.index(word) + len(word)) for word in words]
    own = [
        token
        for token, (start, end) in zip(made["input_ids"], made["offset_mapping"], strict=True)
        if not any(start < stop and end > begin for begin, stop in spans)
    ]
    assert own
    assert set(own) <= set(required)
    assert required == sorted(set(required))
    assert len(required) < 64  # nothing of the stand-ins' own words


def test_template_words_are_in_and_what_people_say_is_not():
    """SmolLM2's template writes a system prompt of its own, which nobody's data may contain."""
    tokenizer = targets.resolve("smollm2").tokenizer()
    required = set(vocab.required_ids(tokenizer))
    assert set(tokenizer("assistant", add_special_tokens=False)["input_ids"]) <= required
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in required
    assert tokenizer.convert_tokens_to_ids("ĠParis") not in required


class Template:
    """A tokenizer of letters with a template that takes no tools and no system turn."""

    all_special_ids, added_tokens_decoder, chat_template = [0], {}, "x"

    def apply_chat_template(self, messages, tokenize, **options):
        if options.get("tools") or messages[0]["role"] == "system":
            raise ValueError("no such turns")
        return "".join(f"<{m['role'][0]}>{m['content']}." for m in messages)

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(letter) for letter in text]}


def test_turns_that_a_template_refuses_are_left_out():
    assert vocab.required_ids(Template()) == sorted({0, *map(ord, "<>ua.")})
    without = Template()
    without.chat_template = None
    assert vocab.required_ids(without) == [0]


def test_more_draft_tokens_than_seen_ones_are_filled_and_said():
    counts = np.array([0, 7, 0, 0, 3, 0, 0, 0])
    built = vocab.build(counts, 5, [6])
    assert built.target_ids.tolist() == [0, 1, 2, 4, 6]  # required 6, seen 1 and 4, filled up with 0 and 2
    assert built.filled == 2
    told = vocab.summary(built, counts)
    assert (told["filled"], told["tokens_seen"], told["tokens_left_out"], told["coverage"]) == (2, 2, 0, 1.0)
    assert vocab.build(counts, 3, [6]).filled == 0


def test_padding_beyond_the_tokenizer_comes_last_and_is_never_counted():
    counts = np.array([0, 4, 0, 1, 0, 0])  # a tokenizer of 4 tokens under an embedding of 6 rows
    assert vocab.build(counts, 4, tokens=4).target_ids.tolist() == [0, 1, 2, 3]
    assert vocab.build(counts, 5, tokens=4).target_ids.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(vocab.BadVocabulary, match="token 3 was counted, but the tokenizer has 3"):
        vocab.build(counts, 4, tokens=3)


def test_coverage_by_hand():
    counts = np.array([10, 0, 30, 60])
    curve = vocab.coverage_curve(counts, sizes=[1, 2, 3, 4, 9])
    assert curve.draft_vocab_size.tolist() == [1, 2, 3, 4]  # 9 is more than the target has
    assert curve.coverage.tolist() == pytest.approx([0.6, 0.9, 1.0, 1.0])
    assert curve.filled.tolist() == [0, 0, 0, 1]
    held_out = vocab.coverage_curve(counts, sizes=[1, 2], measured=np.array([0, 1, 1, 2]))
    assert held_out.coverage.tolist() == pytest.approx([0.5, 0.75])
    required = vocab.coverage_curve(counts, [0, 1], sizes=[1, 2, 3])
    assert required.draft_vocab_size.tolist() == [2, 3]
    assert required.coverage.tolist() == pytest.approx([0.1, 0.7])


def test_coverage_at_the_sizes_that_published_heads_use():
    counts = np.random.default_rng(0).zipf(1.2, 163_840)
    sizes = vocab.coverage_curve(counts).draft_vocab_size.tolist()
    assert {8192, 16384, 32768} <= set(sizes)


@pytest.mark.parametrize(
    ("counts", "size", "required"),
    [([1, 2, 3, 5], 2, [0]), ([1, 2, 3, 4], 3, [0]), ([1, 2, 3, 4], 2, [1]), ([1, 2, 3, 4, 0], 2, [0])],
    ids=["data", "size", "required", "target"],
)
def test_a_map_made_from_anything_else_is_stale(counts, size, required, tmp_path):
    built = vocab.build(np.array([1, 2, 3, 4]), 2, [0])
    built.save(tmp_path)
    again = vocab.load(tmp_path, vocab.fingerprint(np.array([1, 2, 3, 4]), 2, [0]))
    assert (again.fingerprint, again.filled, again.digest) == (built.fingerprint, 0, built.digest)
    other = vocab.fingerprint(np.array(counts), size, required)
    assert other != built.fingerprint
    with pytest.raises(vocab.StaleVocabulary, match=f"made from data {built.fingerprint}, not from {other}"):
        vocab.load(tmp_path, other)


def test_a_map_of_unknown_origin_is_stale_too(tmp_path):
    built = vocab.build(np.arange(4), 2)
    vocab.VocabMap(built.d2t, built.t2d).save(tmp_path)
    with pytest.raises(vocab.StaleVocabulary, match="made from data unknown"):
        vocab.load(tmp_path, built.fingerprint)
