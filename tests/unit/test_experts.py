"""Recording against routers recomputed from scratch, windows against sets, expectations against closed forms."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_models import FAMILIES, SMALL, mixtral
from transformers import LlamaConfig, LlamaForCausalLM

from labkit import experts
from labkit.experts import BadRouting, NotMoE, Routing
from labkit.experts.texts import SOURCES
from labkit.files import BrokenFile

LAYERS = {
    "deepseek_v3": (1, 2),
    "kimi_k25": (1, 2),
    "qwen3_moe": (1,),
    "mixtral": (0, 1, 2),
    "gpt_oss": (0, 1, 2),
}


def chosen_by_hand(router: torch.nn.Module, states: np.ndarray) -> list[set[int]]:
    """The experts of each token from the router's weights alone, in float64, expert by expert."""
    weight = router.weight.detach().double().numpy()
    logits = states @ weight.T
    if getattr(router, "bias", None) is not None:
        logits = logits + router.bias.detach().double().numpy()
    if not hasattr(router, "e_score_correction_bias"):
        return [set(np.argsort(-row)[: router.top_k].tolist()) for row in logits]
    scores = 1 / (1 + np.exp(-logits)) + router.e_score_correction_bias.double().numpy()
    chosen = []
    for row in scores:
        groups = row.reshape(router.num_group, -1)
        best_two = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        kept = set(np.argsort(-best_two)[: router.topk_group].tolist())
        size = groups.shape[1]
        order = [int(e) for e in np.argsort(-row) if int(e) // size in kept]
        chosen.append(set(order[: router.top_k]))
    return chosen


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_routing_is_the_routers_own(family):
    torch.manual_seed(1)
    model = FAMILIES[family]().eval()
    documents = [list(range(5, 45)), list(range(60, 71))]
    routing = experts.record(model, documents)
    assert routing.layers == LAYERS[family]
    assert routing.documents.tolist() == [0] * 40 + [1] * 11
    heard: dict[int, np.ndarray] = {}
    routers = [m for n, m in model.named_modules() if type(m).__name__.lower().endswith("topkrouter")]
    for place, router in enumerate(routers):
        router.register_forward_pre_hook(
            lambda m, i, place=place: heard.update({place: i[0].reshape(-1, 32).double().numpy()})
        )
    with torch.no_grad():
        model(input_ids=torch.tensor([documents[0]]))
    for place, router in enumerate(routers):
        by_hand = chosen_by_hand(router, heard[place])
        assert [set(row.tolist()) for row in routing.experts[:40, place]] == by_hand
        assert len({frozenset(s) for s in by_hand}) > 3  # the choice varies with the token
    assert routing.num_experts == model.get_parameter(parameter_of(model)).shape[0]


def parameter_of(model: torch.nn.Module) -> str:
    name = next(n for n, m in model.named_modules() if type(m).__name__.lower().endswith("topkrouter"))
    return f"{name}.weight"


def test_a_dense_model_is_refused():
    with pytest.raises(NotMoE, match="LlamaForCausalLM"):
        experts.record(LlamaForCausalLM(LlamaConfig(**SMALL)), [[1, 2, 3]])


def test_long_documents_are_cut_and_hooks_come_off():
    torch.manual_seed(0)
    model = mixtral().eval()
    routing = experts.record(model, [list(range(1, 26)), [7, 8]], max_length=10)
    assert np.bincount(routing.documents).tolist() == [10, 10, 5, 2]
    second = experts.record(model, [list(range(11, 21))])
    np.testing.assert_array_equal(routing.experts[10:20], second.experts)  # a cut starts a new context
    with pytest.raises(IndexError):
        experts.record(model, [[5_000]])
    assert not [m for m in model.modules() if m._forward_hooks]
    with pytest.raises(BadRouting, match="no tokens"):
        experts.record(model, [])


def random_routing(seed: int, tokens: int, layers: int, n_experts: int, chosen: int, documents: int) -> Routing:
    rng = np.random.default_rng(seed)
    drawn = rng.random((tokens, layers, n_experts)).argsort(axis=2)[:, :, :chosen]
    numbers = np.sort(rng.integers(0, documents, tokens)) if documents else rng.integers(0, 3, tokens)
    return Routing(drawn, n_experts, numbers.astype(np.int32))


def by_sets(routing: Routing, n: int) -> list[list[int]]:
    """Unique experts of every window, with Python sets; a window holds tokens of one uninterrupted document."""
    rows = []
    for start in range(len(routing.experts) - n + 1):
        window = slice(start, start + n)
        if len(set(routing.documents[window].tolist())) == 1:
            layers = routing.experts[window].transpose(1, 0, 2)
            rows.append([len(set(layer.ravel().tolist())) for layer in layers])
    return rows


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.integers(1, 3),
    st.sampled_from([3, 63, 64, 65, 200, 384]),
    st.integers(0, 4),
    st.integers(1, 20),
)
def test_unique_experts_equal_those_counted_with_sets(seed, tokens, layers, n_experts, documents, n):
    routing = random_routing(seed, tokens, layers, n_experts, 3, documents)
    expected = by_sets(routing, n)
    got = experts.unique(routing, n)
    assert got.shape == (len(expected), layers)
    assert got.tolist() == expected
    as_tensor = torch.from_numpy(routing.experts)
    np.testing.assert_array_equal(experts.unique(as_tensor, n, documents=routing.documents), got)


def test_windows_cross_no_document_even_when_its_number_returns():
    experts_of = np.array([[[0]], [[1]], [[2]], [[3]]])
    routing = Routing(experts_of, 4, np.array([7, 5, 5, 7]))
    assert experts.unique(routing, 2).tolist() == [[2]]
    assert experts.unique(routing, 3).shape == (0, 1)
    touching = Routing(experts_of, 4, np.array([1, 1, 1, 1]))
    assert experts.unique(touching, 4).tolist() == [[4]]


@pytest.mark.parametrize("n", [0, -1])
def test_windows_start_at_one_token(n):
    with pytest.raises(BadRouting):
        experts.unique(random_routing(0, 5, 1, 4, 2, 1), n)


# moe.md section 2, rows 1 and 2
@pytest.mark.parametrize(
    ("total", "n", "expected"),
    [
        (384, 1, 8),
        (384, 2, 15.83),
        (384, 3, 23.50),
        (384, 4, 31.01),
        (384, 5, 38.37),
        (384, 6, 45.57),
        (384, 8, 59.52),
        (384, 16, 109.82),
        (256, 4, 30.5),
        (256, 8, 57.4),
        (256, 16, 102.0),
    ],
)
def test_expected_unique_check_values(total, n, expected):
    assert experts.expected_unique(total, 8, n) == pytest.approx(expected, abs=0.05 if total == 256 else 0.005)


def test_popularity_against_enumeration():
    # Ten tokens, one expert each, with shares .5 .3 .2: two draws hit the same one with .25 + .09 + .04.
    routing = np.array([0] * 5 + [1] * 3 + [2] * 2).reshape(10, 1, 1)
    assert experts.popularity_unique(routing, 3, 2) == pytest.approx([2 - 0.38])
    assert experts.popularity_unique(routing, 3, 1) == pytest.approx([1])


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.integers(2, 16))
def test_popularity_never_exceeds_uniform(seed, n):
    routing = random_routing(seed, 30, 2, 12, 3, 1)
    assert (experts.popularity_unique(routing, 12, n) <= experts.expected_unique(12, 3, n) + 1e-9).all()


def test_independent_routing_has_reuse_one_inside_its_interval():
    routing = random_routing(11, 20_000, 2, 32, 4, 1)
    table = experts.unique_by_window(routing, ns=[1, 2, 8])
    assert np.isnan(table["reuse"][0])
    assert table["reuse"][1:].to_numpy() == pytest.approx([1, 1], abs=0.01)
    assert ((table["low"] <= table["uniform"]) & (table["uniform"] <= table["high"]))[1:].all()
    assert experts.overlap(routing) == pytest.approx([4 / 32] * 2, abs=0.01)


def test_tokens_that_share_everything_have_reuse_zero():
    routing = np.tile(np.array([1, 5, 9]), (50, 2, 1))
    table = experts.unique_table(routing, 16, ns=[2, 6])
    assert table["unique_mean"].tolist() == [3.0] * 4
    assert table["reuse"].tolist() == [0.0] * 4
    assert experts.overlap(routing).tolist() == [1.0, 1.0]


def test_published_reuse_is_as_the_facts_have_it():
    # moe.md section 1: 0.79 at n=2, 0.58 to 0.72 at 4 and 5, 0.51 to 0.57 at 15 and 16
    frame = experts.published_reuse()
    by_length = {n: sorted(part["reuse"].round(2)) for n, part in frame.groupby("n")}
    assert by_length[2] == [0.79]
    assert (min(by_length[4]), max(by_length[5])) == pytest.approx((0.59, 0.72))
    assert (min(by_length[16]), max(by_length[15])) == pytest.approx((0.51, 0.57))


def test_the_trend_is_the_line_and_its_band_the_farthest_point():
    # r = 0.9 - 0.1 log2 n exactly, then one point moved by 0.08 up and its mirror image down: the line stays.
    frame = pd.DataFrame({"n": [2, 4, 8, 16], "reuse": [0.8, 0.7, 0.6, 0.5]})
    for n, (low, mid, high) in experts.reuse_trend(frame).items():
        assert (low, mid, high) == pytest.approx([0.9 - 0.1 * np.log2(n)] * 3)
    both = pd.concat([frame, frame.assign(reuse=frame.reuse + 0.08), frame.assign(reuse=frame.reuse - 0.08)])
    assert experts.reuse_trend(both, [1, 4]) == {4: pytest.approx((0.62, 0.7, 0.78))}
    assert experts.reuse_trend(both.assign(reuse=both.reuse + 0.6), [2])[2] == pytest.approx((1, 1, 1))
    assert experts.reuse_curve(frame.assign(reuse=[np.nan, 0.7, 0.6, 0.5])) == {4: 0.7, 8: 0.6, 16: 0.5}


def test_categories_are_kept_apart():
    experts_of = np.array([[[0]], [[1]], [[0]], [[0]]])
    routing = Routing(experts_of, 4, np.array([0, 0, 1, 1]), categories=("mixed", "same"))
    frame = experts.unique_by_category(routing, ns=[2])
    assert frame[["category", "tokens", "unique_mean"]].to_numpy().tolist() == [
        ["mixed", 2, 2.0],
        ["same", 2, 1.0],
    ]


def test_a_table_without_any_window_says_so():
    with pytest.raises(BadRouting, match="record more text"):
        experts.unique_table(np.zeros((3, 1, 1), int), 4, ns=[9])


@pytest.mark.parametrize(
    ("array", "count", "named"),
    [
        (np.zeros((3, 2)), 4, "shape"),
        (np.zeros((3, 2, 1)), 4, "float64"),
        (np.full((3, 2, 1), 4), 4, "expert 4"),
        (np.full((3, 2, 1), -1), 4, "lowest -1"),
    ],
)
def test_bad_routing_is_named(array, count, named):
    with pytest.raises(BadRouting, match=named):
        Routing.of(array, count)
    with pytest.raises(BadRouting, match="document numbers"):
        Routing.of(np.zeros((3, 2, 1), int), 4, documents=[0, 0])


def test_routing_survives_its_file(tmp_path):
    routing = Routing(
        np.arange(24, dtype=np.uint16).reshape(4, 3, 2), 384, np.array([0, 0, 1, 1]), (1, 2, 5), ("a", "b"), "here"
    )
    routing.save(tmp_path / "routing.safetensors")
    back = Routing.load(tmp_path / "routing.safetensors")
    np.testing.assert_array_equal(back.experts, routing.experts)
    np.testing.assert_array_equal(back.documents, routing.documents)
    assert (back.num_experts, back.layers, back.categories, back.source) == (384, (1, 2, 5), ("a", "b"), "here")
    assert back.experts.dtype == np.uint16
    (tmp_path / "routing.safetensors").write_bytes(b"no")
    with pytest.raises(BrokenFile, match=r"routing\.safetensors"):
        Routing.load(tmp_path / "routing.safetensors")


class Words:
    """A tokenizer that numbers words."""

    def __call__(self, text: str, **_options: object) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


def test_documents_hold_every_category_and_the_tokens_asked_for():
    found = experts.documents(Words(), 20_000, seed=3)
    tokens = {category: sum(len(d.tokens) for d in found if d.category == category) for category in SOURCES}
    assert sum(tokens.values()) == 20_000
    assert min(tokens.values()) > 1_000
    assert [d.tokens for d in found] == [d.tokens for d in experts.documents(Words(), 20_000, seed=3)]
    assert [d.tokens for d in found] != [d.tokens for d in experts.documents(Words(), 20_000, seed=4)]


def test_few_tokens_still_hold_every_category():
    found = experts.documents(Words(), 512, seed=0)
    assert {document.category for document in found} == set(SOURCES)
    assert sum(len(document.tokens) for document in found) == 512


def test_documents_end_when_all_text_is_used_up(monkeypatch):
    sources = {"a": lambda: ["x " * 300], "b": lambda: ["y " * 20, "z", " "]}
    monkeypatch.setattr("labkit.experts.texts.SOURCES", sources)
    found = experts.documents(Words(), 10_000)
    assert sorted((d.category, len(d.tokens)) for d in found) == [("a", 300), ("b", 1), ("b", 20)]


def test_coverage_of_the_top_experts_by_hand():
    # Ten tokens, one expert each of four: used 5, 3, 2 and 0 times.
    routing = np.array([2] * 5 + [0] * 3 + [3] * 2).reshape(10, 1, 1)
    frame = experts.coverage(routing, [1, 2, 3, 4], num_experts=4)
    assert frame["coverage"].tolist() == pytest.approx([0.5, 0.8, 1, 1])
    assert frame["uniform"].tolist() == [0.25, 0.5, 0.75, 1]
    assert experts.coverage(routing, num_experts=4)["top"].tolist() == [1, 2, 3, 4]
    for tops in ([0], [5], []):
        with pytest.raises(BadRouting, match="of 4 experts"):
            experts.coverage(routing, tops, num_experts=4)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 4), st.integers(1, 5))
def test_overlap_equals_that_counted_with_sets(seed, tokens, documents, distance):
    routing = random_routing(seed, tokens, 2, 12, 3, documents)
    shares = []
    for p in range(distance, tokens):
        if len(set(routing.documents[p - distance : p + 1].tolist())) == 1:
            pair = routing.experts[p], routing.experts[p - distance]
            shares.append([len(set(a.tolist()) & set(b.tolist())) / 3 for a, b in zip(*pair, strict=True)])
    expected = np.mean(shares, axis=0) if shares else [np.nan] * 2
    np.testing.assert_allclose(experts.overlap(routing, distance=distance), expected)
    with pytest.raises(BadRouting, match="0 apart"):
        experts.overlap(routing, distance=0)


def test_overlap_beside_what_independence_gives():
    routing = random_routing(5, 20_000, 1, 16, 4, 1)
    frame = experts.overlap_table(routing, [1, 8])
    assert frame["uniform"].tolist() == [0.25, 0.25]
    assert frame["popularity"].tolist() == pytest.approx([0.25, 0.25], rel=0.01)
    assert frame["overlap"].tolist() == pytest.approx([0.25, 0.25], rel=0.02)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 400), st.integers(1, 6))
def test_the_mean_of_all_lengths_equals_that_of_windows_counted_with_sets(seed, tokens, documents):
    routing = random_routing(seed, tokens, 2, 24, 3, documents)
    by_hand = {n: by_sets(routing, n) for n in (1, 2, 3, 7, 16)}
    table = experts.unique_table(routing, ns=by_hand)
    for n, counts in by_hand.items():
        part = table[table["n"] == n]["unique_mean"].tolist()
        assert part == (pytest.approx(np.mean(counts, axis=0).tolist()) if counts else [])
    by_window = experts.unique_by_window(routing, ns=by_hand)
    assert by_window["unique_mean"].tolist() == pytest.approx([np.mean(c) for c in by_hand.values() if c])


def test_the_interval_is_students_of_equal_stretches():
    # 400 tokens, windows of one: twenty stretches of twenty tokens that choose 1 or 2 experts.
    rng = np.random.default_rng(2)
    experts_of = np.stack([np.zeros(400, int), rng.integers(0, 2, 400)], axis=1)[:, None]
    means = [np.mean([len(set(row.tolist())) for row in part[:, 0]]) for part in np.split(experts_of, 20)]
    half = 2.093 * np.std(means, ddof=1) / 20**0.5  # t of 19 degrees of freedom, from a printed table
    row = experts.unique_by_window(experts_of, 2, ns=[1]).iloc[0]
    assert (row.low, row.high) == pytest.approx((np.mean(means) - half, np.mean(means) + half), rel=1e-4)
