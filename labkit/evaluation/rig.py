"""Points of the sweep on whatever servers stand: kept on disk, never measured twice, side by side or alone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd

from labkit import acceptance, bench, engine, files, targets
from labkit.acceptance import Acceptance
from labkit.bench import attached
from labkit.bench.conditions import attached_digest
from labkit.bench.measure import asked_as, journal_of, on_disk, served_as
from labkit.bench.rows import frame, typed
from labkit.evaluation.candidates import BASELINE, EAGLE3, NGRAM, Candidate, label_of
from labkit.settings import Evaluation

MARKS = ["variant", "k", "streams", "temperature"]  # what names a point
COUNTS = ("drafts", "drafted", "steps", "tokens", "accepted_sum")


class Rig:
    """The candidates, the servers of those that stand now, and all rows that were measured so far."""

    def __init__(self, settings: Evaluation, found: dict[str, Candidate], also: Sequence[Path]) -> None:
        """Nothing is started. `flags`, set later: vLLM's options where servers share a GPU."""
        self.settings, self.candidates, self.also = settings, found, list(also)
        self.flags: dict[str, float] = {}
        self.target = settings.target if settings.server else targets.resolve(settings.target)
        self.servers: dict[str, engine.OnDemand] = {}
        self.frames: list[pd.DataFrame] = []
        self.counts: dict[tuple[Any, ...], Acceptance] = {}

    @contextlib.contextmanager
    def serving(self, labels: Iterable[str]) -> Iterator[None]:
        """These servers stand while the block runs, each from when something has to be measured on it."""
        labels = list(labels)
        with contextlib.ExitStack() as stack:
            for label in labels:
                each = self.candidates[label]
                options = {} if each.url else self.options_of(each)
                self.servers[label] = stack.enter_context(
                    engine.on_demand(self.target, each.variant, url=each.url, **options)
                )
            try:
                yield
            finally:
                for label in labels:
                    del self.servers[label]

    def options_of(self, each: Candidate) -> dict[str, Any]:
        """engine.serve's options for a candidate."""
        options = served_as(self.settings) | dict(each.options)
        options["max_num_seqs"] = max(options["max_num_seqs"], self.settings.tokens_a_step)
        if each.label not in (BASELINE, NGRAM, label_of(self.settings.num_speculative_tokens)):
            options["log_dir"] = self.settings.folder / each.label
        if self.flags:
            options["flags"] = self.flags
        return options

    def at(self, streams: int, temperature: float, repeats: int) -> SimpleNamespace:
        """The settings under which one point is measured, as bench.fingerprint reads them."""
        values = dataclasses.asdict(self.settings) | {"concurrency": streams, "temperature": temperature}
        return SimpleNamespace(**values | {"repeats": repeats, "folder": self.settings.folder})

    def measure(
        self, labels: Sequence[str], prompts: pd.DataFrame, *, streams: int = 0, temperature: float = 0.0
    ) -> None:
        """Rows of one point for each candidate: those on disk, the others measured side by side on their servers.

        `streams` of 0: the settings' concurrency, with all repeats; points of the sweep have `sweep_repeats`.
        """
        own = not streams and not temperature
        repeats = self.settings.repeats if own else self.settings.sweep_repeats
        at = self.at(streams or self.settings.concurrency, temperature, repeats)
        if prompts.empty:
            return
        digests = {label: self.digest(self.candidates[label], prompts, at) for label in labels}
        kept = {label: on_disk(label, digests[label], (self.settings.folder, *self.also)) for label in labels}
        missing = [n for n in labels if kept[n] is None and self.candidates[n].measurable]
        kept |= self.measured(missing, prompts, at, digests) if missing else {}
        for label, rows in kept.items():
            self.add(self.candidates[label], frame([]) if rows is None else rows, at, digests[label])

    def digest(self, each: Candidate, prompts: pd.DataFrame, at: Any) -> str:
        """What the rows of one candidate depend on, as bench.measure_variant has it."""
        found = bench.fingerprint(at, each.variant, prompts, url=each.url, **each.options)
        if not each.url:
            return found
        return attached_digest([at.folder, *self.also], each.label, found, each.url, at.model)

    def measured(
        self, labels: Sequence[str], prompts: pd.DataFrame, at: Any, digests: dict[str, str]
    ) -> dict[str, pd.DataFrame]:
        """Measure a point on the servers of `labels` by turns and save its rows and counts."""
        for label in labels:
            attached.refuse_wrong(self.settings, self.candidates[label].variant)
        journals = {label: journal_of(at.folder, label, digests[label]) for label in labels}
        for journal in journals.values() if os.environ.get("LABKIT_FORCE") else ():
            journal.discard()
        sides = bench.run_together(
            self.started(labels),
            prompts,
            {label: journal.path for label, journal in journals.items()},
            **asked_as(at),
        )
        found, chosen = {}, bench.as_prompts(prompts)
        for label, side in sides.items():
            if label != BASELINE and self.candidates[label].url:
                attached.refuse_another_method(side.frame(chosen), self.candidates[label].url)
            if side.counts:
                self.save_counts(label, digests[label], acceptance.pool(side.counts))
            found[label] = bench.measure(at.folder, label, digests[label], lambda s=side: s.checked(chosen))
        return found

    def started(self, labels: Sequence[str]) -> dict[str, engine.Server]:
        """The servers, started where they are not yet: on a shared GPU the first alone, then the others at once.

        The first one leaves compiled kernels behind. One that fails beside others is started again alone.
        """

        def attempt(label: str) -> None:
            with contextlib.suppress(engine.EngineFailed):
                self.servers[label].get()

        if self.flags and len(labels) > 2:
            self.servers[labels[0]].get()
            with ThreadPoolExecutor() as pool:
                list(pool.map(attempt, labels[1:]))
        return {label: self.servers[label].get() for label in labels}

    def save_counts(self, label: str, digest: str, found: Acceptance) -> None:
        """Keep what the server's own counters said of a point with overlapping requests."""
        told = {name: getattr(found, name) for name in COUNTS} | {"accepted_at": list(found.accepted_at)}
        files.write_json(self.settings.folder / "measured" / f"{label}-{digest}.counts.json", told)

    def add(self, each: Candidate, rows: pd.DataFrame, at: Any, digest: str) -> None:
        """Take rows into the record, marked with their point."""
        marks = {"variant": each.variant, "k": each.k, "streams": at.concurrency, "temperature": at.temperature}
        self.frames.append(typed(rows).assign(**marks))
        path = self.settings.folder / "measured" / f"{each.label}-{digest}.counts.json"
        if path.exists():
            told = files.read_json(path)
            self.counts[tuple(marks.values())] = Acceptance(**told | {"accepted_at": tuple(told["accepted_at"])})

    def rows(self) -> pd.DataFrame:
        """All rows, with columns k, streams and temperature beside bench.run's."""
        found = [rows for rows in self.frames if len(rows)] or [self.frames[0]]
        return pd.concat(found, ignore_index=True)

    def best_k(self) -> int:
        """The k of the head that decodes fastest at the settings' own concurrency; their own k if unmeasured."""
        rows = self.rows()
        mine = rows[(rows["variant"] == EAGLE3) & (rows["temperature"] == 0) & (rows["error"].isna())]
        mine = mine[(mine["streams"] == self.settings.concurrency) & (mine["category"] != "held-out")]
        if mine.empty:
            return self.settings.num_speculative_tokens
        return int(bench.summary(mine, by=["k"]).set_index("k")["tok_s"].idxmax())
