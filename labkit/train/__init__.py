"""Training of the head on extracted states, and the acceptance that an engine would see with it."""

from __future__ import annotations

from labkit.train.batches import LeakedSplit, NoTrainingData, Sample, load_samples
from labkit.train.health import BadSamples, Diverged
from labkit.train.job import BadJob, launch_command, write_job
from labkit.train.loop import Watcher
from labkit.train.metrics import MetricsLost, read_metrics
from labkit.train.onthefly import NoTransformersTarget, OnTheFly
from labkit.train.peer import UnorderedSplits, for_speculators, speculators_command
from labkit.train.running import run
from labkit.train.simulation import simulate, walk
from labkit.train.start import BadStart
from labkit.train.start import refuse as refuse_start
from labkit.train.stopping import Flag, Stopped
from labkit.train.unroll import BadLoss, loss_config

__all__ = [
    "BadJob",
    "BadLoss",
    "BadSamples",
    "BadStart",
    "Diverged",
    "Flag",
    "LeakedSplit",
    "MetricsLost",
    "NoTrainingData",
    "NoTransformersTarget",
    "OnTheFly",
    "Sample",
    "Stopped",
    "UnorderedSplits",
    "Watcher",
    "for_speculators",
    "launch_command",
    "load_samples",
    "loss_config",
    "read_metrics",
    "refuse_start",
    "run",
    "simulate",
    "speculators_command",
    "walk",
    "write_job",
]
