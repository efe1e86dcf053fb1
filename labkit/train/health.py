"""When a training is beyond hope: no finite gradient any more, or too many broken conversations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from labkit.errors import LabError

PATIENCE = 3  # steps in a row without a finite gradient before a training is given up
BAD_SHARE = 0.1  # of the conversations seen: more without finite states than this is no accident
FEW = 2  # broken conversations say nothing about the share


class Diverged(LabError):
    """The loss is no longer a number."""


class BadSamples(LabError):
    """Too many conversations have states that are not finite."""


def refuse_divergence(rows: Sequence[Mapping[str, float]], total: int) -> None:
    """Raise Diverged where the last steps of `total` had no finite gradient: each of them changed nothing."""
    newest = rows[-PATIENCE:]
    if len(newest) == PATIENCE and not any(math.isfinite(row["grad_norm"]) for row in newest):
        raise Diverged(
            f"the loss is {newest[-1]['loss']} and the gradient is not finite in {PATIENCE} steps in a row, up to "
            f"step {int(newest[-1]['step']) + 1} of {total}",
            "lower learning_rate",
        )


def refuse_bad_data(left_out: float, seen: float, names: Mapping[str, int]) -> None:
    """Raise BadSamples where more than a few and a tenth of the conversations seen, or all, were left out."""
    if left_out > max(FEW, BAD_SHARE * seen) or left_out == seen > 0:
        raise BadSamples(
            f"{left_out:.0f} of {seen:.0f} conversations have states that are not finite, such as "
            f"{', '.join(list(names)[:3])}",
            "extract.verify names them all; extract again without prefix caching, in bf16 instead of FP8",
        )
