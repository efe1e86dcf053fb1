"""Prompts, the target's own answers to them, and the tokens and loss masks that training reads."""

from __future__ import annotations

from labkit.conversations.answers import ServerLost, TooFewAnswers, lost, opened
from labkit.conversations.dataset import collect, load, token_counts
from labkit.conversations.sources import BadPromptFile, TooFewPrompts, prompts, read, split, templated

__all__ = [
    "BadPromptFile",
    "ServerLost",
    "TooFewAnswers",
    "TooFewPrompts",
    "collect",
    "load",
    "lost",
    "opened",
    "prompts",
    "read",
    "split",
    "templated",
    "token_counts",
]
