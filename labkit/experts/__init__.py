"""Which experts a mixture of experts activates: recording it, and counting the experts that n tokens touch."""

from __future__ import annotations

from labkit.experts.recording import NotMoE, load, record
from labkit.experts.routing import BadRouting, Routing
from labkit.experts.texts import Document, documents
from labkit.experts.windows import (
    expected_unique,
    overlap,
    popularity,
    popularity_unique,
    published_reuse,
    reuse,
    reuse_curve,
    reuse_trend,
    unique,
    unique_by_category,
    unique_by_window,
    unique_table,
)

__all__ = [
    "BadRouting",
    "Document",
    "NotMoE",
    "Routing",
    "documents",
    "expected_unique",
    "load",
    "overlap",
    "popularity",
    "popularity_unique",
    "published_reuse",
    "record",
    "reuse",
    "reuse_curve",
    "reuse_trend",
    "unique",
    "unique_by_category",
    "unique_by_window",
    "unique_table",
]
