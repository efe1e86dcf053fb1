"""What this run of the suite did to the lab: counted here, printed at its end, noted in LOG.md."""

from __future__ import annotations

import os
from collections import Counter

SOAK = os.environ.get("LABKIT_SOAK") == "1"
DONE: Counter[str] = Counter()


def inputs(normal: int = 2_000, soak: int = 100_000) -> int:
    """How many inputs a fuzzing test draws: all of them only under `make soak`."""
    return soak if SOAK else normal


def summary() -> str:
    """The figures in one line."""
    fuzzed = {name.removeprefix("fuzzed "): n for name, n in DONE.items() if name.startswith("fuzzed ")}
    each = ", ".join(f"{name} {n:,}" for name, n in sorted(fuzzed.items()))
    return (
        f"{DONE['faults']:,} faults injected, {sum(fuzzed.values()):,} inputs fuzzed ({each or 'none'}), "
        f"{DONE['kills']:,} kills survived"
    )
