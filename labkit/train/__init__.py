"""Training of the head on extracted states, and the acceptance that an engine would see with it."""

from __future__ import annotations

from labkit.train.batches import NoTrainingData, Sample, load_samples
from labkit.train.loop import Diverged, run
from labkit.train.simulation import simulate, walk

__all__ = ["Diverged", "NoTrainingData", "Sample", "load_samples", "run", "simulate", "walk"]
