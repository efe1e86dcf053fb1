"""Which experts a mixture of experts activates: recording, counting what n tokens touch, and budgets."""

from __future__ import annotations

from labkit.experts.budgets import METHODS, BadBudget, Replay, budget, budget_table, budgets_to_try
from labkit.experts.expected import (
    expected_unique,
    popularity,
    popularity_unique,
    published_reuse,
    reuse,
    reuse_curve,
    reuse_trend,
)
from labkit.experts.gates import Gate, Scores, UnknownGate
from labkit.experts.live import budgeted, live_budget, pareto
from labkit.experts.readers import from_sglang, from_sglang_dump, from_vllm
from labkit.experts.recording import NotMoE, load, record
from labkit.experts.routing import BadRouting, Routing
from labkit.experts.sharing import coverage, overlap, overlap_table
from labkit.experts.texts import Document, documents
from labkit.experts.told import (
    budget_sentence,
    budgets_beside,
    headline,
    recorded_sentence,
    reuse_sentence,
    sharing_sentence,
    unique_sentence,
)
from labkit.experts.trees import record_tree, unique_of_documents, unique_of_tree
from labkit.experts.windows import unique, unique_by_category, unique_by_window, unique_table

__all__ = [
    "METHODS",
    "BadBudget",
    "BadRouting",
    "Document",
    "Gate",
    "NotMoE",
    "Replay",
    "Routing",
    "Scores",
    "UnknownGate",
    "budget",
    "budget_sentence",
    "budget_table",
    "budgeted",
    "budgets_beside",
    "budgets_to_try",
    "coverage",
    "documents",
    "expected_unique",
    "from_sglang",
    "from_sglang_dump",
    "from_vllm",
    "headline",
    "live_budget",
    "load",
    "overlap",
    "overlap_table",
    "pareto",
    "popularity",
    "popularity_unique",
    "published_reuse",
    "record",
    "record_tree",
    "recorded_sentence",
    "reuse",
    "reuse_curve",
    "reuse_sentence",
    "reuse_trend",
    "sharing_sentence",
    "unique",
    "unique_by_category",
    "unique_by_window",
    "unique_of_documents",
    "unique_of_tree",
    "unique_sentence",
    "unique_table",
]
