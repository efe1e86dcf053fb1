"""The settings' own point on its two sets of prompts: the benchmark's, and held-out ones of the training kind."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from labkit import acceptance, bench
from labkit.acceptance import Acceptance
from labkit.evaluation.earlier import HELD_OUT


def acceptances(rows: pd.DataFrame) -> dict[str, Acceptance]:
    """The engine's acceptance pooled over the benchmark prompts, and over the held-out ones where there are."""
    held = rows["category"] == HELD_OUT
    parts = {"engine, benchmark prompts": rows[~held], "engine, held-out prompts": rows[held]}
    return {name: acceptance.from_rows(part) for name, part in parts.items() if part["drafts"].notna().any()}


def speedups(rows: pd.DataFrame, variants: Sequence[str], seed: int) -> pd.DataFrame:
    """bench.speedup of each variant over the baseline, on benchmark and held-out prompts apart."""
    held = rows["category"] == HELD_OUT
    parts = {"benchmark": rows[~held], HELD_OUT: rows[held]}
    found = []
    for variant in variants:
        for name, part in parts.items():
            if (part["variant"] == variant).any() and (part["variant"] == "baseline").any():
                table = bench.speedup(part, "baseline", variant, seed=seed)
                found.append(table.assign(variant=variant, prompts_set=name))
    columns = ["variant", "prompts_set", "prompts", "speedup", "speedup_low", "speedup_high", "total_ratio"]
    return pd.concat(found)[[*columns, "length_drift", "same_output"]] if found else pd.DataFrame(columns=columns)
