"""What may make decode faster before anyone speculates: other ways to share a model between ranks."""

from __future__ import annotations

from labkit.fixes.choosing import FIXES, Fix, UnknownFix, applicable, choose
from labkit.fixes.measuring import compared, measure, sentence
from labkit.fixes.predicting import predict

__all__ = ["FIXES", "Fix", "UnknownFix", "applicable", "choose", "compared", "measure", "predict", "sentence"]
