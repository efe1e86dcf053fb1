"""What the cost model says of each point: measured acceptance length over measured step times of the baseline."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd

from labkit import bench, draft
from labkit.acceptance import Acceptance
from labkit.costmodel import MeasuredSteps, Range, calibrate
from labkit.costmodel.drafting import drafts, head_gigabytes
from labkit.costmodel.step import BadEstimate
from labkit.costmodel.weights import weights
from labkit.targets import Geometry

RESAMPLES = 500
NAMES = ("predicted", "predicted_low", "predicted_high", "step_ms_predicted", "step_ms_measured")


class Predictor:
    """Predicts a speedup: acceptance length x t(1) / (t(k + 1) + k t_draft), all t of the baseline's server.

    t_draft: the head's bytes for one drafted token at the rate at which t(1) reads the target's, times the
    overhead of data/drafts.json, whose interval is wide.
    """

    def __init__(self, times: pd.DataFrame, geometry: Geometry | None, head: Path, seed: int = 0) -> None:
        """`times`: bench.step_times; without them, or without the target's geometry, nothing is predicted."""
        self.seed = seed
        self.steps: MeasuredSteps | None = None
        known = times.dropna(subset=["step_ms"])
        plain = known[(known["n"] == 1) & (known["streams"] == 1)]["step_ms"]
        if len(plain) and geometry is not None:
            self.steps = calibrate(known, draft_ms=draft_range(float(plain.iloc[0]), geometry, head))

    def of(self, rows: pd.DataFrame, accepted: Acceptance | None, k: int, streams: int) -> dict[str, float]:
        """predicted speedup (with _low, _high), step_ms_predicted, and what one took (step_ms_measured).

        NaN where the acceptance is unknown, or steps of so many tokens were not timed.
        """
        found = dict.fromkeys(NAMES, math.nan)
        if streams == 1 and rows["drafts"].notna().any():
            own = bench.speculating_step_times(rows, self.seed)
            drafting = own[own["tokens_are"] == "drafted"]["step_ms"]
            found["step_ms_measured"] = float(drafting.iloc[0]) if len(drafting) else math.nan
        if accepted is None or not accepted.drafts or self.steps is None:
            return found
        try:
            low, middle, high = self.steps.speedup(length_range(rows, accepted, self.seed), k, streams)
            step = self.steps.step_range_ms(k + 1, streams).mid + k * self.steps.draft_ms.mid
        except BadEstimate:
            return found
        return found | {
            "predicted": middle,
            "predicted_low": low,
            "predicted_high": high,
            "step_ms_predicted": step,
        }


def draft_range(plain_ms: float, geometry: Geometry, head: Path) -> Range:
    """ms of one drafted token, from the bytes of the head and of the target and the target's plain step."""
    config = draft.read(head).config
    facts = dict(config["transformer_layer_config"]) | {"method": "eagle3"}
    facts["draft_vocab_size"] = config["draft_vocab_size"]
    each, _once = head_gigabytes(facts, 1)
    share = each / float(weights(geometry, 1)["gb_per_rank"].sum())
    return Range(*(plain_ms * share * factor for factor in Range.of(drafts()["overhead"])))


def length_range(rows: pd.DataFrame, accepted: Acceptance, seed: int) -> Range:
    """The acceptance length with its 95% bootstrap interval over requests; exact where only a total is known."""
    known = rows[rows["drafts"].notna()]
    known = known[known["drafts"] > 0]
    middle = accepted.mean_length
    if len(known) < 2:
        return Range.of(middle)
    counts = known[["accepted", "drafts"]].to_numpy(float)
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(counts), (RESAMPLES, len(counts)))
    sums = counts[picks].sum(axis=1)
    low, high = np.quantile(1 + sums[:, 0] / sums[:, 1], [0.025, 0.975])
    return Range(min(low, middle), middle, max(high, middle))
