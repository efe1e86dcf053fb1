"""What notebook 04 does, a step a module: expectation, data, states, training, outcome."""

from __future__ import annotations

from labkit.pipeline.data import answers, copies, prompts
from labkit.pipeline.expectation import PROMPT_TOKENS, Estimate, describe, estimate, refuse_choices, work_of
from labkit.pipeline.extraction import (
    UnusableStates,
    await_other_shards,
    checked,
    refuse,
    split_on_disk,
    states,
)
from labkit.pipeline.outcome import conclusion, costs, headline, told
from labkit.pipeline.servers import extract_server, extracting, layers, plain_server, serve, serving
from labkit.pipeline.training import (
    calibrate,
    counts,
    elsewhere,
    elsewhere_told,
    head,
    trial_training,
    vocabulary,
    vocabulary_of,
    vocabulary_told,
)

__all__ = [
    "PROMPT_TOKENS",
    "Estimate",
    "UnusableStates",
    "answers",
    "await_other_shards",
    "calibrate",
    "checked",
    "conclusion",
    "copies",
    "costs",
    "counts",
    "describe",
    "elsewhere",
    "elsewhere_told",
    "estimate",
    "extract_server",
    "extracting",
    "head",
    "headline",
    "layers",
    "plain_server",
    "prompts",
    "refuse",
    "refuse_choices",
    "serve",
    "serving",
    "split_on_disk",
    "states",
    "told",
    "trial_training",
    "vocabulary",
    "vocabulary_of",
    "vocabulary_told",
    "work_of",
]
