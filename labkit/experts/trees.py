"""Draft trees: the experts that a step touches when its tokens form a tree instead of a chain.

Siblings are alternatives for one position, so a recorded text holds at most one of them: a tree cannot be laid on
recorded text. Its nodes' routing has to be recorded by itself: `record_tree` runs each path from root to leaf
through the model, which gives a node what tree attention gives it; SGLang's dumps of verify passes hold it, too.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from labkit.experts.expected import expected_unique
from labkit.experts.routing import BadRouting, Routing

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def depths(parents: Sequence[int]) -> np.ndarray:
    """[nodes] depth of each node, 0 for the root; raises BadRouting unless parents come before their children.

    parents: the number of each node's parent, -1 for the root, which is node 0 (the last accepted token).
    """
    found: list[int] = []
    for node, parent in enumerate(parents):
        whole = isinstance(parent, numbers.Integral) or (hasattr(parent, "item") and parent == int(parent))
        if not whole or (parent == -1) != (node == 0) or not -1 <= parent < node:
            raise BadRouting(
                f"node {node} of {len(parents)} has parent {parent}",
                "node 0 is the root with parent -1; every other node names an earlier one",
            )
        found.append(found[parent] + 1 if node else 0)
    return np.array(found)


def path(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root to `node`."""
    nodes = [node]
    while parents[nodes[-1]] != -1:
        nodes.append(parents[nodes[-1]])
    return nodes[::-1]


def unique_of_tree(routing: Any, parents: Sequence[int], num_experts: int | None = None) -> pd.DataFrame:
    """A row a depth and layer of one tree: depth, layer, nodes, unique, unique_path, uniform.

    routing: [nodes, L, k], a row a node of the tree, or a Routing of such rows. nodes: how many lie at this depth
    or above; unique: different experts of those together, what a step touches that verifies the tree down to here;
    unique_path: the mean over the nodes at this depth of the experts of the path that leads there, what a chain of
    as many levels touches; uniform: of as many nodes if each chose at random.
    """
    given = Routing.of(routing, num_experts)
    level = depths(parents)
    if len(level) != len(given.experts) or not len(level):
        raise BadRouting(f"{len(given.experts)} rows of routing for {len(level)} nodes", "give a row a node")
    paths = [path(parents, node) for node in range(len(level))]
    rows = []
    for depth in range(int(level.max()) + 1):
        above = level <= depth
        for place, layer in enumerate(given.layers):
            experts = given.layer(place)
            chains = [len(np.unique(experts[paths[node]])) for node in np.flatnonzero(level == depth)]
            row = {"depth": depth, "layer": layer, "nodes": int(above.sum())}
            rows.append(row | {"unique": len(np.unique(experts[above])), "unique_path": float(np.mean(chains))})
    frame = pd.DataFrame(rows)
    return frame.assign(uniform=expected_unique(given.num_experts, given.chosen, frame["nodes"]))


def record_tree(
    model: PreTrainedModel, context: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
) -> Routing:
    """Routing [nodes, L, k] of a draft tree after a context, a document of its own.

    tokens: each node's token. Every path from the root to a leaf is one pass of the model after the context.
    """
    from labkit.experts.recording import record

    depths(parents)
    if len(tokens) != len(parents):
        raise BadRouting(f"{len(tokens)} tokens for {len(parents)} nodes", "give each node its token")
    if not len(parents):
        raise BadRouting("a tree without a node", "give at least the root: parent -1")
    leaves = [node for node in range(len(parents)) if node not in parents]
    paths = [path(parents, leaf) for leaf in leaves]
    texts = [[*context, *(tokens[node] for node in nodes)] for nodes in paths]
    recorded = record(model, texts, max_length=max(map(len, texts)))
    experts = np.empty((len(parents), *recorded.experts.shape[1:]), recorded.experts.dtype)
    for begin, nodes in zip(recorded.bounds[:-1], paths, strict=True):
        first = begin + len(context)
        experts[nodes] = recorded.experts[first : first + len(nodes)]
    numbers = np.zeros(len(parents), np.int32)
    return Routing(experts, recorded.num_experts, numbers, recorded.layers, ("tree",), recorded.source)


def unique_of_documents(routing: Routing) -> np.ndarray:
    """[documents, L] different experts of each whole document: of a step, where a document is a step."""
    spans = list(itertools.pairwise(routing.bounds))
    counts = np.empty((len(spans), len(routing.layers)), np.uint16)
    for place in range(len(routing.layers)):
        experts = routing.layer(place)
        counts[:, place] = [len(np.unique(experts[begin:end])) for begin, end in spans]
    return counts
