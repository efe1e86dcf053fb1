"""What the expert modules are given: every input that cannot be is refused in words, none in a stack trace."""

import numpy as np
import pytest
from moe_models import mixtral

from labkit import experts
from labkit.experts import BadBudget, BadRouting, Routing

NONE = np.zeros((0, 2, 3), int)
SOME = np.array([[[0, 1, 2], [3, 4, 5]]] * 8)
SCORES = np.random.default_rng(0).dirichlet(np.ones(8), (8, 2))


@pytest.mark.parametrize("routing", [NONE, NONE[:, :1], SOME[:1]], ids=["nothing", "no layer's", "one token"])
def test_too_little_routing_is_told_or_counted(routing):
    given = Routing.of(routing, 8)
    assert np.issubdtype(given.bounds.dtype, np.integer)
    assert experts.unique(given, 2).shape == (0, routing.shape[1])
    assert np.isnan(experts.overlap(given)).all()
    for ask in (experts.unique_table, experts.unique_by_window):
        with pytest.raises(BadRouting, match="holds such a window"):
            ask(given, ns=[2])
    with pytest.raises(BadRouting, match="names no kinds of text"):
        experts.unique_by_category(given)


@pytest.mark.parametrize("n", [0, -1, 1.5])
def test_windows_are_of_whole_tokens(n):
    for ask in (lambda: experts.unique(SOME, n), lambda: experts.unique_table(SOME, ns=[1, n])):
        with pytest.raises(BadRouting, match="windows of"):
            ask()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_experts": 2}, "names expert"),
        ({"experts": np.zeros((8, 2, 9), int)}, "9 of 8 experts"),
        ({"documents": [0]}, "document numbers for 8 tokens"),
        ({"layers": (1, 2, 3)}, "3 layer numbers for 2 layers"),
        ({"experts": SOME * 1.0}, "whole numbers"),
    ],
)
def test_routing_that_does_not_fit_is_refused(given, told):
    fitting = {"experts": SOME, "num_experts": 8, "documents": [0] * 8}
    assert experts.unique(Routing(**fitting), 2).shape == (7, 2)
    with pytest.raises(BadRouting, match=told):
        Routing(**fitting | given)


@pytest.mark.parametrize(
    ("total", "chosen", "n"), [(8, 9, 1), (8, 12, 2), (0, 0, 1), (-8, 2, 2), (8, -1, 2), (8, 2, -1)]
)
def test_an_expectation_that_nobody_has_is_refused(total, chosen, n):
    with pytest.raises(BadRouting, match="0 <= k <= N"):
        experts.expected_unique(total, chosen, n)
    with pytest.raises(BadRouting, match="0 <= k <= N"):
        experts.expected_unique(np.array([64, total]), np.array([4, chosen]), np.array([2, n]))


@pytest.mark.parametrize("wrong", [None, 0.5, "a", 1.5, 5, 4, -2])
@pytest.mark.parametrize("node", [1, 2, 3])
def test_a_tree_names_earlier_nodes_by_number(wrong, node):
    parents = [-1, 0, 1, 2]
    parents[node] = wrong
    with pytest.raises(BadRouting, match=f"node {node} of 4 has parent"):
        experts.unique_of_tree(SOME[:4], parents, 8)


@pytest.mark.parametrize("parents", [[-1, 0, 0, 1], np.array([-1, 0, 0, 1]), (-1, np.int32(0), 0, 1)])
def test_a_tree_may_come_in_any_sequence(parents):
    assert len(experts.unique_of_tree(SOME[:4], parents, 8)) == 6


@pytest.mark.parametrize("budget", [0, -1, 9, 1000, 2.5])
def test_a_budget_is_a_number_of_experts(budget):
    with pytest.raises(BadBudget, match="whole budgets from 1 to 8"):
        experts.budget(Routing.of(SOME, 8), SCORES, budget)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.1])
@pytest.mark.parametrize("method", experts.METHODS)
def test_scores_are_a_mass(value, method):
    scores = SCORES.copy()
    scores[3, 1, 5] = value
    routing = Routing.of(SOME, 8)
    for given in (scores, lambda place: scores[:, place], experts.Scores(scores, SCORES)):
        with pytest.raises(BadBudget, match=r"layer 1 .* negative, infinite or no number"):
            experts.budget(routing, given, 2, method=method)
    limited = np.where(SCORES.min() < SCORES, SCORES, -np.inf)  # what a group limit gives
    assert len(experts.budget(routing, experts.Scores(SCORES, limited), 2, method=method)) == 2


@pytest.mark.parametrize("part", [np.s_[:, :1], np.s_[:, 0], np.s_[:4], np.s_[:, :, :5]])
def test_scores_of_another_recording_are_refused(part):
    for given in (SCORES[part], experts.Scores(SCORES[part], SCORES[part])):
        with pytest.raises(BadBudget, match="scores"):
            experts.budget(Routing.of(SOME, 8), given, 2)


def test_nothing_to_replay_is_told():
    with pytest.raises(BadBudget, match="no budget"):
        experts.budget_table(Routing.of(SOME, 8), SCORES, [])


@pytest.mark.parametrize(
    ("documents", "settings", "told"),
    [
        (["a text"], {}, "is no document"),
        ([1, 2, 3], {}, "1 is no document"),
        ([[5, 6]], {"max_length": 0}, "at most 0 tokens"),
        ([[5, 6]], {"max_length": -1}, "at most -1 tokens"),
        ([], {}, "no tokens"),
        ([[]], {}, "no tokens"),
    ],
)
def test_documents_that_cannot_be_recorded_are_refused(documents, settings, told):
    with pytest.raises(BadRouting, match=told):
        experts.record(mixtral().eval(), documents, **settings)


def test_a_tree_without_nodes_is_not_recorded():
    with pytest.raises(BadRouting, match="without a node"):
        experts.record_tree(mixtral().eval(), [5], [], [])
