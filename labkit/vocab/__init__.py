"""The draft's vocabulary: the most frequent target tokens, and the maps between the two numberings.

`d2t` holds offsets, as vLLM, speculators and EAGLE read it: target id = draft id + d2t[draft id].
"""

from __future__ import annotations

from labkit.vocab.building import SIZES, build, count, coverage_curve, fingerprint, refuse_impossible, summary
from labkit.vocab.mapping import FILE, BadVocabulary, StaleVocabulary, VocabMap, load
from labkit.vocab.required import required_ids
from labkit.vocab.semantics import faults, problems, read

__all__ = [
    "FILE",
    "SIZES",
    "BadVocabulary",
    "StaleVocabulary",
    "VocabMap",
    "build",
    "count",
    "coverage_curve",
    "faults",
    "fingerprint",
    "load",
    "problems",
    "read",
    "refuse_impossible",
    "required_ids",
    "summary",
]
