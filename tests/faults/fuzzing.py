"""What the fuzzers share: how many inputs in how many parts, a limit in seconds, and values of any kind."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.faults import figures

PARTS = 4  # so that no part of the whole count takes minutes
LIMIT_S = 60
STRUCTURED = settings(
    max_examples=300 if figures.SOAK else 20,
    deadline=None,
    database=None,
    derandomize=not figures.SOAK,
    suppress_health_check=list(HealthCheck),
)
parts = pytest.mark.parametrize("part", range(PARTS))
LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["user", "X", "1e999"]),
)
VALUE = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def share(name: str) -> int:
    """How many inputs a part draws; counted for the summary."""
    count = figures.inputs() // PARTS
    figures.DONE[f"fuzzed {name}"] += count
    return count
