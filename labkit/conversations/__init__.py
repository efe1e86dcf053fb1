"""Prompts, the target's own answers to them, and the tokens and loss masks that training reads."""

from __future__ import annotations

from labkit.conversations.answers import TooFewAnswers
from labkit.conversations.asking import ServerLost, lost, opened
from labkit.conversations.copies import near_copies, without_copies
from labkit.conversations.dataset import NoEndOfThought, collect, load, render
from labkit.conversations.forms import BadRow
from labkit.conversations.raw import BadPromptFile, DatasetUnreachable, presets
from labkit.conversations.sources import TooFewPrompts, prompts, read, report, split, templated
from labkit.conversations.synthesis import NoSynthesis, synthesise
from labkit.conversations.template import Template
from labkit.conversations.tokens import tokenise

__all__ = [
    "BadPromptFile",
    "BadRow",
    "DatasetUnreachable",
    "NoEndOfThought",
    "NoSynthesis",
    "ServerLost",
    "Template",
    "TooFewAnswers",
    "TooFewPrompts",
    "collect",
    "load",
    "lost",
    "near_copies",
    "opened",
    "presets",
    "prompts",
    "read",
    "render",
    "report",
    "split",
    "synthesise",
    "templated",
    "tokenise",
    "without_copies",
]
