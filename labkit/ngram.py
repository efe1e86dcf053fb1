"""Prompt lookup (n-gram speculation) simulated on recorded tokens, token for token what vLLM's proposer does.

Rules of vllm/v1/spec_decode/ngram_proposer.py (read and run at vLLM 0.32.0): of the suffix of all tokens so far
take the longest n-gram, lookup_max down to lookup_min tokens, that occurred before (it may overlap the suffix);
of its occurrences take the *earliest*; propose the up to k tokens that followed it there.

Because the earliest occurrence of an n-gram does not depend on where the walk stands, it is looked up once for
every position of a sequence, and so is what would be accepted there; a configuration is then only a walk.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from labkit import acceptance
from labkit.acceptance import Acceptance
from labkit.errors import LabError

Tokens = Sequence[int] | np.ndarray

PREDICTED = "simulated on the baseline's outputs"
ENGINE = "counted by the engine"
REPLAYED = "simulated on the n-gram server's outputs"
UNKNOWN = "unknown: the servers tell neither acceptance counts nor token ids"


class BadLookup(LabError):
    """Lookup lengths or draft length that the engine would refuse."""


def simulate(
    prompt_ids: Tokens,
    output_ids: Tokens,
    *,
    k: int,
    lookup_max: int,
    lookup_min: int,
) -> Acceptance:
    """What prompt lookup would have proposed and got accepted on one greedy output.

    The walk is the engine's: the first output token comes of the prompt, every later step drafts after all
    tokens so far and moves on by the accepted tokens and the bonus. What the last step would accept beyond the
    recorded end cannot be known and counts as not accepted: for each request the engine's counters may hold up
    to k accepted tokens more. The engine's cut of drafts at the end of the model's context is left out.
    """
    check(k, lookup_max, lookup_min)
    return next(simulate_all(Recordings.of([(prompt_ids, output_ids)], lookup_max), [k], lookup_max, lookup_min))


def simulate_rows(rows: pd.DataFrame, *, k: int, lookup_max: int, lookup_min: int) -> Acceptance:
    """Pooled over benchmark rows (bench.run); all NaN where the server returned no token ids."""
    check(k, lookup_max, lookup_min)
    return next(simulate_all(Recordings.of(recorded(rows), lookup_max), [k], lookup_max, lookup_min))


def simulate_grid(
    pairs: pd.DataFrame | Iterable[tuple[Tokens, Tokens]],
    *,
    ks: Iterable[int],
    lookup_maxs: Iterable[int],
    lookup_mins: Iterable[int],
) -> pd.DataFrame:
    """Every configuration with lookup_min <= lookup_max on all outputs: a row each, pooled.

    `pairs`: benchmark rows, or (prompt ids, output ids). Columns k, lookup_max, lookup_min, acceptance_length
    (bonus included), acceptance_rate, drafting_share (of the steps), tokens_per_step, drafts, drafted, steps.
    """
    ks, maxs, mins = sorted(set(ks)), sorted(set(lookup_maxs)), sorted(set(lookup_mins))
    lookups = [(high, low) for high, low in itertools.product(maxs, mins) if low <= high]
    for k, (high, low) in itertools.product(ks, lookups):
        check(k, high, low)
    pairs = recorded(pairs) if isinstance(pairs, pd.DataFrame) else pairs
    recordings = Recordings.of(pairs, maxs[-1])
    return pd.DataFrame(
        {"k": k, "lookup_max": high, "lookup_min": low} | figures(found)
        for high, low in lookups
        for k, found in zip(ks, simulate_all(recordings, ks, high, low), strict=True)
    )


def figures(pooled: Acceptance) -> dict[str, float]:
    """The columns of a grid row that are measured."""
    return {
        "acceptance_length": pooled.mean_length,
        "acceptance_rate": pooled.rate,
        "drafting_share": pooled.drafting_share,
        "tokens_per_step": pooled.tokens_per_step,
        "drafts": pooled.drafts,
        "drafted": pooled.drafted,
        "steps": pooled.steps or 0,
    }


def recorded(rows: pd.DataFrame) -> list[tuple[Tokens, Tokens]]:
    """(prompt ids, output ids) of the rows that have them: those that succeeded on a server that returns ids."""
    columns = ["prompt_token_ids", "output_token_ids"]
    known = rows.dropna(subset=columns)
    return list(zip(known[columns[0]], known[columns[1]], strict=True))


def compare(
    baseline: pd.DataFrame, measured: pd.DataFrame, *, k: int, lookup_max: int, lookup_min: int
) -> dict[str, Acceptance]:
    """Simulated on the baseline's outputs (the prediction), the engine's own counts, simulated on its outputs.

    The last two look at the same tokens, so they differ only by what the last step of each request accepted
    beyond the end of the output. A source that knows nothing is left out.
    """
    lookup = {"k": k, "lookup_max": lookup_max, "lookup_min": lookup_min}
    found = {PREDICTED: simulate_rows(baseline, **lookup)}
    with contextlib.suppress(acceptance.NoCounters):
        found[ENGINE] = acceptance.from_rows(measured)
    found[REPLAYED] = simulate_rows(measured, **lookup)
    return {name: a for name, a in found.items() if a.steps}


def best(found: dict[str, Acceptance]) -> tuple[str, Acceptance]:
    """The most trustworthy source: the engine's counts, else a simulation; UNKNOWN, all NaN, without any."""
    for name in (ENGINE, REPLAYED, PREDICTED):
        if name in found:
            return name, found[name]
    return UNKNOWN, Acceptance(drafts=None, drafted=None, accepted_at=())


def prediction_sentence(predicted: Acceptance, *, k: int, lookup_max: int, lookup_min: int) -> str:
    """What simulate_rows says of one configuration, in Markdown."""
    if not predicted.steps:
        return "The server returned no token ids (vLLM's return_token_ids), so nothing can be simulated."
    return (
        f"With k={k} and lookup {lookup_max}..{lookup_min}, {predicted.drafting_share:.0%} of the steps find "
        f"something to draft; such a step should yield **{predicted.mean_length:.2f} tokens** "
        f"({predicted.rate:.0%} of drafted tokens accepted), an average step {predicted.tokens_per_step:.2f}. It "
        "pays if an average step of the speculating server costs less than that many plain ones."
    )


def check(k: int, lookup_max: int, lookup_min: int) -> None:
    """Raise BadLookup for a configuration that vLLM refuses."""
    if not (k >= 1 and 1 <= lookup_min <= lookup_max):
        raise BadLookup(
            f"k={k}, lookup_max={lookup_max}, lookup_min={lookup_min}",
            "k and lookup_min have to be at least 1, and lookup_min at most lookup_max",
        )


@dataclass(frozen=True)
class Recordings:
    """Recorded requests, one behind the other, with the earliest occurrence of every n-gram looked up.

    Each request has one position more than tokens: position t stands for "after its first t tokens".
    earliest[n][t]: where the n tokens that end there first occur at all in the request (t - n when only there).
    """

    tokens: np.ndarray  # [positions], -1 at each request's last
    position: np.ndarray  # [positions]: t, within the request
    offset: np.ndarray  # [positions]: where the request begins
    length: np.ndarray  # [positions]: its tokens
    first: np.ndarray  # [requests]: the position after the first output token, which the prompt's own step yields
    earliest: list[np.ndarray]

    @classmethod
    def of(cls, pairs: Iterable[tuple[Tokens, Tokens]], lookup_max: int) -> Recordings:
        """Look up n-grams of up to lookup_max tokens in (prompt ids, output ids)."""
        joined = [tuple(np.asarray(ids, np.int64) for ids in pair) for pair in pairs]
        every = [np.concatenate(pair) for pair in joined]
        sizes = np.array([len(ids) + 1 for ids in every], np.int64)
        begins = np.cumsum(sizes) - sizes
        found = [occurrences(ids, lookup_max) for ids in every]
        position = np.concatenate([NOWHERE, *map(np.arange, sizes)])
        return cls(
            tokens=np.concatenate([NOWHERE, *(np.append(ids, -1) for ids in every)]),
            position=position,
            offset=np.repeat(begins, sizes),
            length=np.repeat(sizes - 1, sizes),
            first=begins + np.array([len(prompt) + 1 for prompt, _ in joined], np.int64),
            earliest=[np.concatenate([NOWHERE, *(one[n] for one in found)]) for n in range(lookup_max + 1)],
        )

    @property
    def outputs(self) -> int:
        """Tokens that come of steps: all output tokens but the first of each request."""
        ends = self.offset[self.first - 1] + self.length[self.first - 1] if len(self.first) else self.first
        return int(np.maximum(ends - self.first, 0).sum())

    def proposals(self, lookup_max: int, lookup_min: int) -> np.ndarray:
        """Where in the request the tokens proposed at each position start, -1 without a match: [positions]."""
        starts = np.full(len(self.position), -1)
        for n in range(lookup_min, lookup_max + 1):  # longer ones replace shorter ones
            first = self.earliest[n]
            starts = np.where((first >= 0) & (first < self.position - n), first + n, starts)
        return starts

    def matches(self, starts: np.ndarray, k: int) -> np.ndarray:
        """How many of the up to k proposed tokens equal those that came: [positions]."""
        found = np.zeros(len(starts), np.int64)
        here = np.flatnonzero(starts >= 0)
        for i in range(k):
            here = here[(self.position[here] + i < self.length[here]) & (starts[here] + i < self.position[here])]
            here = here[self.tokens[self.offset[here] + starts[here] + i] == self.tokens[here + i]]
            found[here] += 1
        return found


NOWHERE = np.zeros(0, np.int64)  # so that no recordings at all are joined, too


def occurrences(tokens: np.ndarray, lookup_max: int) -> list[np.ndarray]:
    """Recordings.earliest of one request: each n-gram is numbered by its first n - 1 tokens and its last."""
    vocabulary = int(tokens.max(initial=0)) + 1
    numbers = np.zeros(len(tokens) + 1, np.int64)  # by start; the empty n-gram is everywhere
    earliest = [numbers]
    for n in range(1, lookup_max + 1):
        count = max(len(tokens) - n + 1, 0)  # n-grams of this length
        longer = numbers[:count] * vocabulary + tokens[n - 1 : n - 1 + count]
        _, first, numbers = np.unique(longer, return_index=True, return_inverse=True)
        earliest.append(np.concatenate([np.full(len(tokens) + 1 - count, -1), first[numbers]]))
    return earliest


def walk(recordings: Recordings, matches: np.ndarray, ks: Sequence[int]) -> np.ndarray:
    """Where the steps begin, for each k: [ks, positions] of bool.

    Each step goes on after the accepted tokens and the bonus. All walks take their steps side by side: with many
    outputs that is far faster than one after the other.
    """
    whole = len(matches)
    jumps = np.concatenate([np.minimum(matches, k) + 1 for k in ks])
    lanes = np.arange(len(ks))[:, None] * whole
    at = (lanes + recordings.first).ravel()
    last = recordings.offset[recordings.first - 1] + recordings.length[recordings.first - 1]
    ends = (lanes + last).ravel()
    visited = np.zeros(len(ks) * whole, bool)
    while len(at):
        going = at < ends
        at, ends = at[going], ends[going]
        visited[at] = True
        at = at + jumps[at]
    return visited.reshape(len(ks), whole)


def simulate_all(
    recordings: Recordings, ks: Sequence[int], lookup_max: int, lookup_min: int
) -> Iterator[Acceptance]:
    """Pooled over the recordings for each k; what does not depend on k is looked up once."""
    starts = recordings.proposals(lookup_max, lookup_min)
    matches = recordings.matches(starts, max(ks))
    for k, visited in zip(ks, walk(recordings, matches, ks), strict=True):
        here = np.flatnonzero(visited)
        drafted = np.where(starts[here] >= 0, np.minimum(k, recordings.position[here] - starts[here]), 0)
        accepted = np.minimum(matches[here], k)
        yield acceptance.from_steps(drafted, accepted, k=k, tokens=recordings.outputs)
