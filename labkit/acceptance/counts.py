"""Counts of drafts and what became of them, and the rates derived from these; the two kinds of rate kept apart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from labkit.errors import LabError


class Impossible(LabError):
    """Counts that no engine can produce, for example more accepted than drafted tokens."""


@dataclass(frozen=True)
class _Rates:
    """Rates by draft position, first position first. The two kinds have no arithmetic in common, on purpose."""

    values: tuple[float, ...]

    __array_ufunc__ = None  # nor in numpy, which would take them for lists of numbers

    def __iter__(self) -> Iterator[float]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, position: int) -> float:
        return self.values[position]


class Unconditional(_Rates):
    """a_i: share of all drafts whose token i was accepted (what vLLM reports)."""

    @property
    def mean_length(self) -> float:
        """Acceptance length, bonus included: 1 + the sum of a_i."""
        return 1 + sum(self.values)

    def conditional(self) -> Conditional:
        """c_i = a_i / a_(i-1), the bonus counting as a_0 = 1; too low where drafts differ in length."""
        before = (1.0, *self.values)
        return Conditional(tuple(a / b if b else math.nan for b, a in itertools.pairwise(before)))


class Conditional(_Rates):
    """c_i: share of drafts with token i accepted among those that had one, and all before it accepted."""

    def unconditional(self) -> Unconditional:
        """a_i = c_1 ... c_i, for drafts that are all of full length."""
        return Unconditional(tuple(itertools.accumulate(self.values, lambda a, b: a * b)))


@dataclass(frozen=True)
class Acceptance:
    """Pooled counts of drafts and what became of them; every rate is derived from these.

    accepted_at[i]: drafts whose token i was accepted; empty where the source tells only their sum, `accepted_sum`.
    eligible_at[i]: drafts that had a token i and all tokens before it accepted; None where the source does not
    tell (an engine's counters). `drafts` (streams alone) and `drafted` (SGLang's counters) are None where unknown:
    rates that need them are NaN then. `tokens` are those that came of the `steps`, the first token of each request
    left out; both None where unknown.
    """

    drafts: int | None
    drafted: int | None
    accepted_at: tuple[int, ...]
    eligible_at: tuple[int, ...] | None = None
    steps: int | None = None
    tokens: int | None = None
    accepted_sum: int | None = None

    def __post_init__(self) -> None:
        """Refuse counts that contradict each other."""
        most = math.inf if self.drafts is None else self.drafts
        ladder = (most, *self.accepted_at)
        falling = all(after <= before for before, after in itertools.pairwise(ladder))
        torn = bool(self.accepted_at) and self.accepted != sum(self.accepted_at)
        over = self.drafted is not None and self.accepted > self.drafted
        if self.eligible_at is not None:  # a draft that had a token accepted had that token
            over |= len(self.eligible_at) != len(self.accepted_at)
            over |= any(had < n for had, n in zip(self.eligible_at, self.accepted_at, strict=False))
        if min(*ladder, self.accepted) < 0 or not falling or torn or over:
            raise Impossible(
                f"drafts {self.drafts}, drafted {self.drafted}, accepted {self.accepted}, by position "
                f"{self.accepted_at}" + (f" of {self.eligible_at}" if self.eligible_at is not None else ""),
                "accepted counts must fall with the position, stay below the drafts and add up; were conditional "
                "counts, or counters of different moments, mixed?",
            )
        if self.accepted_at:
            object.__setattr__(self, "accepted_sum", None)  # said once: equal counts are equal objects

    @property
    def accepted(self) -> int:
        """Accepted draft tokens, bonus tokens not counted."""
        return sum(self.accepted_at) if self.accepted_sum is None else self.accepted_sum

    @property
    def mean_length(self) -> float:
        """Tokens that a drafting step yields, bonus included; NaN without drafts or a count of them."""
        return 1 + self.accepted / self.drafts if self.drafts else math.nan

    @property
    def rate(self) -> float:
        """Accepted / drafted, bonus not counted; NaN without drafts, or where drafted tokens are not counted."""
        return self.accepted / self.drafted if self.drafted else math.nan

    @property
    def per_position(self) -> Unconditional:
        """a_i, over all drafts."""
        return Unconditional(tuple(n / self.drafts if self.drafts else math.nan for n in self.accepted_at))

    @property
    def conditional(self) -> Conditional:
        """c_i; exact where eligible_at is known, otherwise a_i / a_(i-1)."""
        if self.eligible_at is None:
            return self.per_position.conditional()
        pairs = zip(self.accepted_at, self.eligible_at, strict=True)
        return Conditional(tuple(n / of if of else math.nan for n, of in pairs))

    @property
    def tokens_per_step(self) -> float:
        """Tokens a step yields, steps without a draft included; NaN where unknown."""
        return self.tokens / self.steps if self.steps and self.tokens is not None else math.nan

    @property
    def drafting_share(self) -> float:
        """Share of the steps that had a draft; NaN where unknown."""
        return self.drafts / self.steps if self.steps and self.drafts is not None else math.nan

    def by_position(self) -> pd.DataFrame:
        """A row a position (1 first): accepted, unconditional and conditional rate."""
        return pd.DataFrame(
            {
                "position": range(1, len(self.accepted_at) + 1),
                "accepted": self.accepted_at,
                "unconditional_rate": self.per_position.values,
                "conditional_rate": self.conditional.values,
            }
        )
