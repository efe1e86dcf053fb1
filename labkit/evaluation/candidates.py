"""The servers that are held against each other: no speculation, n-gram, and the head at several k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit import files
from labkit.settings import Evaluation, NgramBaseline

LOOKUP = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
BASELINE, NGRAM, EAGLE3 = "baseline", "ngram", "eagle3"


@dataclass(frozen=True)
class Candidate:
    """One way to serve the target: an engine variant with its options; `k` is 0 without speculation.

    `url`: an attached server's address. `measurable`: whether there is one, or the lab may start one.
    """

    variant: str
    k: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    url: str = ""
    measurable: bool = True

    @property
    def label(self) -> str:
        """What its rows' files are called."""
        return f"{self.variant}-k{self.k}" if self.variant == EAGLE3 else self.variant


def candidates(settings: Evaluation, head: Path, also: Sequence[Path] = ()) -> dict[str, Candidate]:
    """All candidates by label: baseline, n-gram with notebook 02's lookup (`also`), the head at each k.

    Where the baseline is attached, nothing is started here: n-gram is not measured then, and the head only at
    `variant_server`.
    """
    earlier = [files.read_json(path / "run.json")["settings"] for path in also if (path / "run.json").exists()]
    source = earlier[0] if earlier else vars(NgramBaseline())
    lookup = {name: source[name] for name in LOOKUP}
    free = not settings.server
    found = [
        Candidate(BASELINE, url=settings.server),
        Candidate(NGRAM, lookup["num_speculative_tokens"], lookup, measurable=free),
    ]
    for k in settings.ks:
        options = {"head": str(head), "num_speculative_tokens": k}
        url = settings.variant_server
        found.append(Candidate(EAGLE3, k, options, url=url, measurable=free or bool(url)))
    return {each.label: each for each in found}


def label_of(k: int) -> str:
    """The label of the head at k."""
    return Candidate(EAGLE3, k).label
