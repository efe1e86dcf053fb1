"""Acceptance of drafted tokens: one object, whether it comes from an engine's counters or from token streams.

A *draft* is one verified proposal of at least one token; a *step* is one forward pass of the target for one
request after its first token, with or without a draft. The acceptance length includes the bonus token that
the target itself adds (vLLM's convention since vllm#17908): 1 + accepted / drafts, pooled over all drafts.
"""

from __future__ import annotations

from labkit.acceptance.counters import (
    Counters,
    CountersReset,
    ForeignTraffic,
    NoCounters,
    Unreadable,
    parse,
    snapshot,
)
from labkit.acceptance.counts import Acceptance, Conditional, Impossible, Unconditional
from labkit.acceptance.responses import from_response
from labkit.acceptance.sources import (
    between,
    from_chunks,
    from_positions,
    from_rows,
    from_steps,
    pool,
    positions,
    request_mean,
    table,
)

__all__ = [
    "Acceptance",
    "Conditional",
    "Counters",
    "CountersReset",
    "ForeignTraffic",
    "Impossible",
    "NoCounters",
    "Unconditional",
    "Unreadable",
    "between",
    "from_chunks",
    "from_positions",
    "from_response",
    "from_rows",
    "from_steps",
    "parse",
    "pool",
    "positions",
    "request_mean",
    "snapshot",
    "table",
]
