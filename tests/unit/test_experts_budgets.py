"""MoE-Spec budgets: by hand, by loops over sets, and the live model against the replay in all five families."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_models import FAMILIES, mixtral, qwen3_moe

from labkit import experts
from labkit.experts import BadBudget, Gate, Replay, Routing, Scores, UnknownGate
from labkit.experts.budgets import Windows
from labkit.experts.live import accepted
from labkit.experts.recording import routers

METHODS = ("truncation", "substitution")

# Three tokens, four experts, two each: masses 1.0, 0.6, 0.55, 0.85, so a budget of two keeps experts 0 and 3.
PROBABILITIES = np.array([[0.5, 0.3, 0.1, 0.1], [0.4, 0.1, 0.35, 0.15], [0.1, 0.2, 0.1, 0.6]])
CHOSEN = np.array([[0, 1], [0, 2], [3, 1]])


def test_a_step_of_three_tokens_by_hand():
    windows = Windows.of(Scores(*[torch.tensor(PROBABILITIES)] * 2), torch.tensor(CHOSEN), 3)
    assert windows.mass.tolist() == [pytest.approx([1.0, 0.6, 0.55, 0.85])]
    chosen, kept, changed = windows.choose(2, "truncation")
    assert chosen.tolist() == CHOSEN.tolist()
    assert kept.tolist() == [[True, False], [True, False], [True, False]]
    assert changed.all()
    chosen, kept, _changed = windows.choose(2, "substitution")
    assert [set(row) for row in chosen.tolist()] == [{0, 3}, {0, 3}, {0, 3}]
    assert kept.all()
    frame = experts.budget(CHOSEN[:, None], PROBABILITIES[:, None], 2, n=3, method="truncation").iloc[0]
    assert (frame["unique"], frame.unique_budget, frame.saved, frame.binding) == (4, 2, 0.5, 1)
    assert frame.mass_dropped == pytest.approx((0.3 + 0.35 + 0.2) / (0.8 + 0.75 + 0.8))
    assert frame.mass_held == pytest.approx(1.85 / 3)
    assert (frame.agreement, frame.same_set) == (0.5, 0)
    untouched = experts.budget(CHOSEN[:, None], PROBABILITIES[:, None], 4, n=3).iloc[0]
    assert (untouched.saved, untouched.mass_dropped, untouched.same_set) == (0, 0, 1)


def test_a_step_that_needs_no_more_than_the_budget_is_left_alone():
    # Expert 1 is nobody's first choice and has the most mass; the two that are chosen fit into the budget.
    probabilities = np.array([[0.6, 0.4, 0.0], [0.0, 0.4, 0.6]])
    frame = experts.budget(np.array([[[0]], [[2]]]), probabilities[:, None], 2, n=2)
    assert frame[["agreement", "same_set", "binding"]].to_numpy().tolist() == [[1, 1, 0]]
    frame = experts.budget(np.array([[[0]], [[2]]]), probabilities[:, None], 1, n=2)
    assert frame[["agreement", "unique_budget", "binding"]].to_numpy().tolist() == [[0, 1, 1]]


def by_loops(mass, selection, chosen, size, n, method):
    """Each token's experts under a budget of `size`, with loops and sets."""
    rows = []
    for start in range(0, len(chosen), n):
        step = range(start, min(start + n, len(chosen)))
        used = {int(e) for t in step for e in chosen[t]}
        totals = np.sum([mass[t] for t in step], axis=0)
        listed = set(np.argsort(-totals, kind="stable")[:size].tolist())
        for t in step:
            own = {int(e) for e in chosen[t]}
            if len(used) <= size or own <= listed:
                rows.append(own)
            elif method == "truncation":
                rows.append(own & listed)
            else:
                order = [int(e) for e in np.argsort(-selection[t], kind="stable") if selection[t][e] > -np.inf]
                rows.append(set([e for e in order if e in listed][: chosen.shape[1]]))
    return rows


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 9), st.integers(1, 6), st.sampled_from(METHODS))
def test_choices_under_a_budget_equal_those_by_loops(seed, tokens, size, n, method):
    rng = np.random.default_rng(seed)
    mass = rng.dirichlet(np.ones(9) * 0.3, tokens)
    selection = mass + rng.normal(0, 0.05, mass.shape)
    selection[rng.random(mass.shape) < 0.2] = -np.inf  # a group limit forbids some
    selection[:, :3] = np.where(np.isinf(selection[:, :3]), rng.random((tokens, 3)), selection[:, :3])
    chosen = np.argsort(-selection, axis=1)[:, :3]
    windows = Windows.of(Scores(torch.tensor(mass), torch.tensor(selection)), torch.tensor(chosen), n)
    new, kept, changed = windows.choose(size, method)
    expected = by_loops(mass, selection, chosen, size, n, method)
    got = [set(row[keep].tolist()) for row, keep in zip(new.numpy(), kept.numpy(), strict=True)]
    assert got == expected
    assert changed.tolist() == [set(own) != row for own, row in zip(chosen.tolist(), expected, strict=True)]
    whole = tokens // n
    if whole:
        scores = Scores(mass[:, None], selection[:, None])
        frame = experts.budget(Routing.of(chosen[:, None], 9), scores, size, n=n, method=method).iloc[0]
        steps = [expected[i * n : i * n + n] for i in range(whole)]
        assert frame.unique_budget == pytest.approx(np.mean([len(set.union(*step)) for step in steps]))
        assert (max(len(set.union(*step)) for step in steps) <= size) or frame.binding < 1
        same = [len(set(own) & row) / 3 for own, row in zip(chosen.tolist(), expected, strict=True)][: whole * n]
        assert frame.agreement == pytest.approx(np.mean(same))


def raw_scores(model, run):
    """What each router gave of itself, and the result of `run`; the first hooks on a router see that."""
    heard: dict[int, list] = {}
    hooks = [
        router.register_forward_hook(lambda m, i, o, layer=layer: heard.setdefault(layer, []).append(o))
        for layer, router in routers(model).items()
    ]
    with torch.no_grad():
        result = run()
    for hook in hooks:
        hook.remove()
    return {layer: outputs[-1] for layer, outputs in heard.items()}, result


def rule_by_hand(router, logits):
    """(mass, selection, weights of listed experts) of one token, in float64 and from the configuration alone."""
    exp = np.exp(logits - logits.max())
    probabilities = exp / exp.sum()
    if hasattr(router, "e_score_correction_bias"):
        scores = 1 / (1 + np.exp(-logits))
        selection = scores + router.e_score_correction_bias.double().numpy()
        groups = selection.reshape(router.num_group, -1)
        best = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(axis=1))[router.topk_group :]
        groups = groups.copy()
        groups[best] = -np.inf

        def weights(listed):
            return scores[listed] / scores[listed].sum() * router.routed_scaling_factor

        return scores / scores.sum(), groups.ravel(), weights
    if type(router).__name__ == "GptOssTopKRouter":
        return probabilities, probabilities, lambda listed: exp[listed] / exp[listed].sum()
    divide = getattr(router, "norm_topk_prob", True)
    return (
        probabilities,
        probabilities,
        lambda listed: probabilities[listed] / (probabilities[listed].sum() if divide else 1),
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_live_model_routes_as_the_replay(family, method):
    torch.manual_seed(3)
    model = FAMILIES[family]().eval()
    tokens, n, size = torch.tensor([list(range(5, 44))]), 4, 3 if family == "mixtral" else 5
    assert tokens.shape[1] % n  # the last step is shorter

    def live():
        with experts.budgeted(model, size, n, method):
            return raw_scores_after(model, tokens)

    raw, replaced = raw_scores(model, live)
    for layer, router in routers(model).items():
        logits, _weights, own = (part.double().numpy() for part in raw[layer])
        rules = [rule_by_hand(router, row) for row in logits]
        mass, selection = (np.stack([rule[i] for rule in rules]) for i in (0, 1))
        expected = by_loops(mass, selection, own.astype(int), size, n, method)
        _logits, weights, chosen = (part.numpy() for part in replaced[layer])
        assert [set(c[w != 0].tolist()) for c, w in zip(chosen, weights, strict=True)] == expected
        assert any(row != set(o) for row, o in zip(expected, own.astype(int).tolist(), strict=True))
        for t, listed in enumerate(map(sorted, expected)):
            got = dict(zip(chosen[t].tolist(), weights[t].tolist(), strict=True))
            before = dict(zip(own[t].astype(int).tolist(), raw[layer][1][t].tolist(), strict=True))
            by_rule = rules[t][2](listed) if method == "substitution" else [before[e] for e in listed]
            assert [got[e] for e in listed] == pytest.approx(list(by_rule), rel=1e-4)
    assert not [m for m in model.modules() if m._forward_hooks]


def raw_scores_after(model, tokens):
    """What each router's output is after the hooks that are there already."""
    return raw_scores(model, lambda: model(input_ids=tokens, use_cache=False))[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_replay_of_recorded_routing_is_the_live_choice_of_the_first_layer(family):
    torch.manual_seed(5)
    model = FAMILIES[family]().eval()
    document = list(range(20, 52))
    routing = experts.record(model, [document])
    raw, _out = raw_scores(model, lambda: model(input_ids=torch.tensor([document]), use_cache=False))
    first = routing.layers[0]
    gate = Gate.of(routers(model)[first])
    chosen, kept, _changed = Windows.of(gate.scores(raw[first][0]), raw[first][2], 4).choose(4, "truncation")
    with experts.budgeted(model, 4, 4, "truncation"), torch.no_grad():
        _logits, weights, live = raw_scores_after(model, torch.tensor([document]))[first]
    assert torch.equal(live, chosen)
    assert torch.equal(weights != 0, kept)
    assert not kept.all()
    np.testing.assert_array_equal(np.sort(chosen.numpy()), np.sort(routing.experts[:, 0]))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_that_nobody_exceeds_changes_no_bit(family, method):
    torch.manual_seed(7)
    model = FAMILIES[family]().eval()
    document = list(range(30, 60))
    n, routing = 2, experts.record(model, [document])
    tokens = torch.tensor([document])
    with torch.no_grad():
        plain = model(input_ids=tokens).logits
        steps = [routing.experts[i : i + n, at] for i in range(0, 30, n) for at in range(len(routing.layers))]
        enough = max(len(np.unique(step)) for step in steps)
        for size in {routing.num_experts, enough}:
            with experts.budgeted(model, size, n, method):
                assert torch.equal(model(input_ids=tokens).logits, plain)
        with experts.budgeted(model, enough - 1, n, method):
            assert not torch.equal(model(input_ids=tokens).logits, plain)
        assert torch.equal(model(input_ids=tokens).logits, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gate_gives_the_routers_own_scores_and_weights(family):
    torch.manual_seed(9)
    model = FAMILIES[family]().eval()
    raw, _out = raw_scores(model, lambda: model(input_ids=torch.tensor([list(range(9, 40))])))
    for layer, router in routers(model).items():
        logits, weights, chosen = raw[layer]
        gate = Gate.of(router)
        scores = gate.scores(logits)
        for t in range(len(chosen)):
            mass, selection, by_rule = rule_by_hand(router, logits[t].double().numpy())
            np.testing.assert_allclose(scores.mass[t].numpy(), mass, rtol=1e-5)
            np.testing.assert_allclose(scores.selection[t].numpy(), selection, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(weights[t].numpy(), by_rule(chosen[t].numpy()), rtol=1e-5)
        gate.check((logits, weights, chosen))
        with pytest.raises(UnknownGate, match=gate.kind):
            gate.check((logits, weights * 1.5, chosen))


def test_weights_that_are_not_normalised_stay_so():
    torch.manual_seed(2)
    model = qwen3_moe().eval()
    for router in routers(model).values():
        router.norm_topk_prob = False
    with experts.budgeted(model, 12, 4), torch.no_grad():  # Gate.check runs on every pass
        (_logits, weights, _chosen) = raw_scores_after(model, torch.tensor([[5, 6, 7]]))[1]
    assert (weights.sum(dim=1) < 0.99).all()


def test_scores_in_a_stream_give_the_table_of_scores_in_memory():
    torch.manual_seed(4)
    model = FAMILIES["deepseek_v3"]().eval()
    documents = [list(range(3, 26)), list(range(40, 50)), [7, 8]]
    replay = Replay([3, 6, 16], n=4)
    routing = experts.record(model, documents, max_length=11, listeners=[replay])
    parts = [document[i : i + 11] for document in documents for i in range(0, len(document), 11)]
    layers = {layer: [] for layer in routing.layers}
    for part in parts:
        raw, _out = raw_scores(model, lambda part=part: model(input_ids=torch.tensor([part])))
        for layer, router in routers(model).items():
            layers[layer].append(Gate.of(router).scores(raw[layer][0]))
    joined = [
        [torch.cat([getattr(scores, name) for scores in layers[layer]]).numpy() for layer in routing.layers]
        for name in ("mass", "selection")
    ]
    scores = Scores(*(np.stack(part, axis=1) for part in joined))
    table = experts.budget_table(routing, scores, [3, 6, 16], n=4)
    pd.testing.assert_frame_equal(replay.table(), table)
    by_place = experts.budget_table(routing, lambda at: Scores(joined[0][at], joined[1][at]), [3, 6, 16], n=4)
    pd.testing.assert_frame_equal(by_place, table)
    everything = table[table.budget == 16]
    assert (everything.mass_held == 1).all()
    assert (everything.same_set == 1).all()
    unique = [
        len(np.unique(routing.experts[a : a + 4, at]))
        for begin, end in zip(routing.bounds[:-1], routing.bounds[1:], strict=True)
        for a in range(begin, end - 3, 4)
        for at in range(2)
    ]
    assert table["unique"].to_numpy() == pytest.approx(np.mean(unique))
    with pytest.raises(BadBudget, match="scores"):
        experts.budget(routing, scores.mass[1:], 3)


@pytest.mark.parametrize(
    ("size", "n", "method"), [(0, 4, "truncation"), (7, 4, "truncation"), (2, 0, "truncation"), (2, 4, "no")]
)
def test_impossible_budgets_are_refused(size, n, method):
    with pytest.raises(BadBudget), experts.budgeted(mixtral(), size, n, method):
        pass
    with pytest.raises(BadBudget):
        experts.budget(np.zeros((4, 1, 1), int), np.ones((4, 1, 6)), size, n=n, method=method)


def test_acceptance_under_a_budget_by_hand():
    # Two steps of four: three drafts each; the first agrees on two in a row, the second on none.
    said = np.array([5, 6, 7, 9, 1, 2, 3, 4, 8])
    drafted = np.array([5, 6, 0, 9, 0, 2, 3, 4])
    assert accepted([said], [drafted], 4) == (3 + 1) / 2
    assert accepted([said], [said], 4) == 4
    assert accepted([said], [drafted], 1) == 1


def test_live_quality_against_passes_of_its_own():
    torch.manual_seed(6)
    model = mixtral().eval()
    rng = np.random.default_rng(0)
    documents = [rng.integers(5, 120, 22).tolist(), rng.integers(5, 120, 13).tolist(), [9]]
    frame = experts.live_budget(model, None, documents, [3, 6], n=4, max_length=16).set_index(["method", "budget"])
    texts = [documents[0][:16], documents[0][16:], documents[1]]

    def passes(size, method):
        found = []
        for text in texts:
            with experts.budgeted(model, size, 4, method), torch.no_grad():
                found.append(
                    torch.log_softmax(model(input_ids=torch.tensor([text])).logits[0].double(), -1).numpy()
                )
        return found

    plain = passes(6, "truncation")
    for method in METHODS:
        budgeted = passes(3, method)
        nll = [
            -logp[t, text[t + 1]] for logp, text in zip(budgeted, texts, strict=True) for t in range(len(text) - 1)
        ]
        row = frame.loc[(method, 3)]
        assert row.perplexity == pytest.approx(np.exp(np.mean(nll)), rel=1e-4)
        greedy = [logp.argmax(axis=1) for logp in budgeted]
        target = [logp.argmax(axis=1) for logp in plain]
        assert row.greedy_agreement == pytest.approx(np.mean(np.concatenate(greedy) == np.concatenate(target)))
        lengths = []
        for own, reference in zip(greedy, target, strict=True):
            for start in range(0, len(own) - 3, 4):
                length = 1
                for i in range(3):
                    if own[start + i] != reference[start + i]:
                        break
                    length += 1
                lengths.append(length)
        assert row.acceptance_length_target == pytest.approx(np.mean(lengths))
        assert row.unique_budget <= 3
        assert row.perplexity_ratio_low < row.perplexity_ratio < row.perplexity_ratio_high
        full = frame.loc[(method, 6)]
        assert (full.perplexity_ratio, full.greedy_agreement, full.acceptance_length_target) == (1, 1, 4)
    bare = frame.loc[("none", 6)]
    assert (bare.perplexity_ratio, bare.saved) == (1, 0)
    assert bare["unique"] > 3
    with pytest.raises(BadBudget, match="no tokenizer"):
        experts.live_budget(model, None, ["text"], [3])
    with pytest.raises(BadBudget, match="no text"):
        experts.live_budget(model, None, [[1, 2]], [3])


def test_the_pareto_front_by_hand():
    frame = pd.DataFrame({"unique_budget": [4, 3, 3, 2, 5], "greedy_agreement": [0.9, 0.9, 0.8, 0.7, 1.0]})
    assert experts.pareto(frame).index.tolist() == [3, 1, 4]


def test_figures_show_the_frames_values():
    from labkit.plots import experts as figures

    probabilities = np.repeat(PROBABILITIES[:, None], 2, axis=1)
    table = experts.budget_table(np.repeat(CHOSEN[:, None], 2, axis=1), probabilities, [2, 3, 4], n=3)
    axes = figures.plot_budget(table, quality="mass_dropped", model="tiny")
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    for method in METHODS:
        part = table[table.method == method].sort_values("unique_budget")
        assert lines[method] == part[["unique_budget", "mass_dropped"]].to_numpy().tolist()
    assert {text.get_text() for text in axes.texts} == {"B=2", "B=3", "B=4"}
    assert "lossy" in axes.get_title()
    frame = experts.coverage(np.array([0, 0, 0, 1]).reshape(4, 1, 1), [1, 2], num_experts=2)
    lines = {line.get_label(): line.get_ydata().tolist() for line in figures.plot_coverage(frame).get_lines()}
    assert lines["mean over layers"] == [75, 100]
    assert lines["equal use"] == [50, 100]
