"""The arms of error bars."""

from __future__ import annotations

import pandas as pd


def arms(middle: pd.Series, low: pd.Series, high: pd.Series) -> list[pd.Series]:
    """How far an interval reaches below and above; 0 without one.

    Of equal values a bootstrap's ends are these values but for the last bit, and matplotlib refuses arms below 0.
    """
    return [(middle - low).fillna(0).clip(lower=0), (high - middle).fillna(0).clip(lower=0)]
