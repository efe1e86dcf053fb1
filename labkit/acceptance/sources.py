"""Acceptance from wherever it is known: counts by position, steps of a stream, counters, benchmark rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from labkit.acceptance.counters import Counters, ForeignTraffic, NoCounters
from labkit.acceptance.counts import Acceptance, Conditional, Impossible, Unconditional


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
    whole = [int(n) if math.isfinite(n) else -1 for n in accepted_at]
    rates = isinstance(accepted_at, (Unconditional, Conditional))
    if rates or any(n != given for n, given in zip(whole, accepted_at, strict=True)):
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
    if d.shape != a.shape:
        raise Impossible(f"{d.size} steps drafted, {a.size} accepted", "give both for every step")
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


def from_chunks(chunks: Iterable[Sequence[int]], *, k: int, every_step_drafts: bool) -> Acceptance:
    """Acceptance from token streams alone: tokens of each chunk, a list a request, first token first.

    A chunk is taken for one step, so it holds at most k + 1 tokens: Impossible where one holds more (a stream
    interval above 1, or a server that merges steps when the client is slow). Empty chunks are left out. Where
    every step drafts (a draft model, EAGLE), drafts, length and positions follow, as if each draft had k tokens.
    Where not (n-gram), a chunk of one token may have been a rejected draft or none: only `tokens_per_step` and
    `accepted` are known. The last step of a request may be cut off at its end; counts are then a little low.
    """
    yields = [[n for n in request if n][1:] for request in chunks]
    steps = [n for request in yields for n in request]
    if max(steps, default=1) > k + 1:
        raise Impossible(
            f"a chunk holds {max(steps)} tokens, a step yields at most {k + 1} with k={k}",
            "serve with a stream interval of 1 and measure one request at a time, or read the server's counters",
        )
    accepted = [n - 1 for n in steps]
    if every_step_drafts:
        return from_steps([k] * len(steps), accepted, k=k)
    return Acceptance(None, None, (), steps=len(steps), tokens=sum(steps), accepted_sum=sum(accepted))


def pool(parts: Iterable[Acceptance]) -> Acceptance:
    """Counts of several runs added up; what one of them does not know, the sum does not know either."""
    parts = list(parts)
    k = max((len(part.accepted_at) for part in parts), default=0)
    eligible = [part.eligible_at for part in parts]
    told = all(part.accepted_sum is None for part in parts)
    return Acceptance(
        drafts=_sum_known([part.drafts for part in parts]),
        drafted=_sum_known([part.drafted for part in parts]),
        accepted_at=_add([part.accepted_at for part in parts], k) if told else (),
        eligible_at=None if None in eligible or not told else _add([e for e in eligible if e is not None], k),
        steps=_sum_known([part.steps for part in parts]),
        tokens=_sum_known([part.tokens for part in parts]),
        accepted_sum=None if told else sum(part.accepted for part in parts),
    )


def _add(counts: Sequence[Sequence[int]], k: int) -> tuple[int, ...]:
    """Sums by position of tuples that may be shorter than k."""
    return tuple(sum(int(c[i]) for c in counts if i < len(c)) for i in range(k))


def _sum_known(values: Sequence[int | None]) -> int | None:
    """The sum, or None where one value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def between(before: Counters, after: Counters, *, expect_tokens: int | None = None) -> Acceptance:
    """Acceptance of what a server did between two snapshots; no drafts in between give NaN rates, not an error.

    Raises CountersReset when the server restarted in between, NoCounters when it does not count drafts, and, with
    `expect_tokens` (what the caller was sent), ForeignTraffic when the server generated something else too.
    Steps are tokens - requests - accepted: the engine does not count them. Tokens that a last step yields
    beyond the end of a request are accepted but not generated, so `steps` is a little low where requests are
    short; it is never below the drafts.

    SGLang counts verify calls, tokens and requests, all when a request finishes. Each of its steps verifies, so
    accepted = tokens - requests - verify calls, of the tokens that were kept; drafted tokens and positions are
    unknown. Its own length, completion_tokens / verify calls, counts each request's first token as well.
    """
    delta = before.until(after)
    if expect_tokens is not None and delta.generated != expect_tokens:
        raise foreign(delta.generated, expect_tokens)
    tokens = delta.generated - delta.requests
    if not delta.counts_accepted:
        return of_verified(delta.drafts, tokens)
    accepted = delta.accepted if delta.accepted is not None else sum(delta.accepted_at)
    return Acceptance(
        drafts=delta.drafts,
        drafted=delta.drafted if "drafted" in delta.values else None,
        accepted_at=delta.accepted_at,
        steps=max(tokens - accepted, delta.drafts),
        tokens=tokens,
        accepted_sum=accepted,
    )


def foreign(generated: int, expected: int) -> ForeignTraffic:
    """The error for a server that generated other tokens than this client was sent."""
    times = generated // expected if expected and generated % expected == 0 else 0
    doubled = f"; exactly {times} times: do {times} API servers count the same tokens (vllm#18053)?"
    return ForeignTraffic(
        f"the server generated {generated} tokens where this client was sent {expected}{doubled * (times > 1)}",
        "measure on a server that nobody else uses",
    )


def of_verified(verified: int, tokens: int, drafted: int | None = None, accepted: int | None = None) -> Acceptance:
    """Acceptance where each step verifies a draft: `tokens` came of `verified` steps, first tokens left out."""
    return Acceptance(
        drafts=verified,
        drafted=drafted,
        accepted_at=(),
        steps=verified,
        tokens=tokens,
        accepted_sum=tokens - verified if accepted is None else accepted,
    )


def from_rows(rows: pd.DataFrame) -> Acceptance:
    """Acceptance pooled over benchmark rows (bench.run) that carry the engine's counts; NoCounters if none does.

    Steps are the chunks after the first, or where that is more (a server may send two steps as one chunk) the
    tokens after the first that no accepted draft explains.
    """
    return pool(_of_row(row) for row in counted(rows).to_dict("records"))


def request_mean(rows: pd.DataFrame) -> float:
    """Mean over requests of each one's acceptance length, as SpecForge reports it; NaN without drafts.

    Every request weighs the same here, and every draft in `from_rows(rows).mean_length`: where answers differ in
    length the two differ, so say which (vllm#42508).
    """
    lengths = [_of_row(row).mean_length for row in counted(rows).to_dict("records")]
    known = [length for length in lengths if not math.isnan(length)]
    return sum(known) / len(known) if known else math.nan


def counted(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that carry the engine's counts; raises NoCounters where no row does."""
    known = rows[rows["drafts"].notna()] if "drafts" in rows else rows.iloc[:0]
    if known.empty:
        raise NoCounters(
            f"none of {len(rows)} rows carries acceptance counts",
            "serve with --per-request-spec-decode-metrics detailed, or measure with concurrency=1 on a server "
            "whose /metrics counts drafts (vLLM with a speculative configuration); from_chunks reads what streams "
            "tell by themselves",
        )
    return known


def _of_row(row: Mapping[str, Any]) -> Acceptance:
    """Acceptance of one request."""
    at, eligible = (_positions(row.get(name)) for name in ("accepted_at", "eligible_at"))
    drafts, accepted, tokens = int(row["drafts"]), int(row["accepted"]), max(int(row["tokens_total"]) - 1, 0)
    return Acceptance(
        drafts=drafts,
        drafted=None if pd.isna(row["drafted"]) else int(row["drafted"]),
        accepted_at=at or (),
        eligible_at=eligible,
        steps=max(int(row["chunks"]) - 1, tokens - accepted, drafts),
        tokens=tokens,
        accepted_sum=None if at else accepted,
    )


def _positions(counts: Any) -> tuple[int, ...] | None:
    """Counts by position of a row's cell; None where it is empty (NaN after a concat)."""
    return None if counts is None or isinstance(counts, float) else tuple(int(n) for n in counts)


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
