"""Acceptance from wherever it is known: counts by position, steps of a stream, counters, benchmark rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from labkit.acceptance.counters import Counters, ForeignTraffic, NoCounters
from labkit.acceptance.counts import Acceptance, Impossible


def from_positions(
    accepted_at: Sequence[int],
    *,
    drafts: int,
    drafted: int | None = None,
    eligible_at: Sequence[int] | None = None,
    steps: int | None = None,
    tokens: int | None = None,
) -> Acceptance:
    """Acceptance from counts (not rates) by position; `drafted` defaults to full-length drafts."""
    whole = [int(n) for n in accepted_at]
    if any(n != given for n, given in zip(whole, accepted_at, strict=True)):
        raise Impossible(f"accepted_at={tuple(accepted_at)} holds rates", "give counts, not rates")
    return Acceptance(
        drafts=drafts,
        drafted=drafts * len(whole) if drafted is None else drafted,
        accepted_at=tuple(whole),
        eligible_at=None if eligible_at is None else tuple(int(n) for n in eligible_at),
        steps=steps,
        tokens=tokens,
    )


def from_steps(
    drafted: Sequence[int] | np.ndarray, accepted: Sequence[int] | np.ndarray, *, k: int, tokens: int | None = None
) -> Acceptance:
    """Acceptance from the number of drafted and accepted tokens of each step; steps without a draft have 0, 0."""
    d, a = np.asarray(drafted, np.int64), np.asarray(accepted, np.int64)
    wrong = np.flatnonzero((a < 0) | (a > d) | (d > k))
    if len(wrong):
        step = wrong[0]
        raise Impossible(f"step {step} drafted {d[step]} and accepted {a[step]} with k={k}", "check the source")
    return Acceptance(
        drafts=int((d > 0).sum()),
        drafted=int(d.sum()),
        accepted_at=tuple(int((a > i).sum()) for i in range(k)),
        eligible_at=tuple(int(((d > i) & (a >= i)).sum()) for i in range(k)),
        steps=len(d),
        tokens=tokens if tokens is not None else int(a.sum()) + len(a),
    )


def pool(parts: Iterable[Acceptance]) -> Acceptance:
    """Counts of several runs added up; what one of them does not know, the sum does not know either."""
    parts = list(parts)
    k = max((len(part.accepted_at) for part in parts), default=0)
    eligible = [part.eligible_at for part in parts]
    return Acceptance(
        drafts=sum(part.drafts for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted_at=_add([part.accepted_at for part in parts], k),
        eligible_at=None if None in eligible else _add([e for e in eligible if e is not None], k),
        steps=_sum_known([part.steps for part in parts]),
        tokens=_sum_known([part.tokens for part in parts]),
    )


def _add(counts: Sequence[Sequence[int]], k: int) -> tuple[int, ...]:
    """Sums by position of tuples that may be shorter than k."""
    return tuple(sum(int(c[i]) for c in counts if i < len(c)) for i in range(k))


def _sum_known(values: Sequence[int | None]) -> int | None:
    """The sum, or None where one value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def between(before: Counters, after: Counters, *, expect_tokens: int | None = None) -> Acceptance:
    """Acceptance of what a server did between two snapshots.

    Raises CountersReset when the server restarted in between, NoCounters when it does not speculate, and, with
    `expect_tokens` (what the caller was sent), ForeignTraffic when the server generated something else too.
    Steps are tokens - requests - accepted: the engine does not count them. Tokens that a last step yields
    beyond the end of a request are accepted but not generated, so `steps` is a little low where requests are
    short; it is never below the drafts.
    """
    delta = before.until(after)
    if expect_tokens is not None and delta.generated != expect_tokens:
        raise ForeignTraffic(
            f"the server generated {delta.generated} tokens where this client was sent {expect_tokens}",
            "measure on a server that nobody else uses",
        )
    tokens = delta.generated - delta.requests
    return Acceptance(
        drafts=delta.drafts,
        drafted=delta.drafted,
        accepted_at=delta.accepted_at,
        steps=max(tokens - sum(delta.accepted_at), delta.drafts),
        tokens=tokens,
    )


def from_rows(rows: pd.DataFrame) -> Acceptance:
    """Acceptance pooled over benchmark rows (bench.run) that carry the engine's counts.

    Raises NoCounters where no row does. Steps are the chunks after the first: vLLM streams one a step.
    """
    known = rows[rows["drafts"].notna()] if "drafts" in rows else rows.iloc[:0]
    if known.empty:
        raise NoCounters(
            f"none of {len(rows)} rows carries acceptance counts",
            "serve with --per-request-spec-decode-metrics detailed, or measure with concurrency=1 on a server "
            "whose /metrics counts drafts (vLLM with a speculative configuration)",
        )
    return pool(_of_row(row) for row in known.to_dict("records"))


def _of_row(row: Mapping[str, Any]) -> Acceptance:
    """Acceptance of one request."""
    eligible = row.get("eligible_at")
    eligible = None if eligible is None or isinstance(eligible, float) else eligible  # NaN after a concat
    return Acceptance(
        drafts=int(row["drafts"]),
        drafted=int(row["drafted"]),
        accepted_at=tuple(int(n) for n in row["accepted_at"]),
        eligible_at=None if eligible is None else tuple(int(n) for n in eligible),
        steps=max(int(row["chunks"]) - 1, 0),
        tokens=max(int(row["tokens_total"]) - 1, 0),
    )


def table(named: Mapping[str, Acceptance]) -> pd.DataFrame:
    """A row each: the definitions side by side, acceptance length with the bonus token."""
    return pd.DataFrame(
        {
            "source": name,
            "acceptance_length": a.mean_length,
            "acceptance_rate": a.rate,
            "drafts": a.drafts,
            "drafted": a.drafted,
            "accepted": a.accepted,
            "steps": a.steps,
            "drafting_share": a.drafting_share,
            "tokens_per_step": a.tokens_per_step,
        }
        for name, a in named.items()
    )


def positions(named: Mapping[str, Acceptance]) -> pd.DataFrame:
    """by_position of several sources below each other, with a column `source`."""
    return pd.concat(
        [a.by_position().assign(source=name) for name, a in named.items()] or [pd.DataFrame()], ignore_index=True
    )
