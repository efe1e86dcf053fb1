"""Do two greedy servers say the same, and where not, was it a near-tie?

Greedy speculation must give the target's own tokens. A verifying step computes several positions at once, so in
bf16 its logits differ in the last bits; where the two best tokens are that close, either may win. Any other
difference is a bug.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import httpx
import pandas as pd

from labkit.engine import OnDemand, Server, bounds, urls
from labkit.errors import LabError

# Logits of small chat models lie between 16 and 32, where bf16 numbers are 0.125 apart: two roundings.
NEAR_TIE_NATS = 0.25
ROUNDING = 1e-3  # of log-probabilities: two logits 0.25 apart come out as 0.2500001 too
TOP = 20  # log-probabilities asked for; a token that is not among them was no near-tie


class NoLogprobs(LabError):
    """The server could not be asked how likely its next tokens are."""


class NoTokenIds(LabError):
    """Rows carry no token ids, so outputs cannot be compared."""


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position where two outputs differ, their common length counting; None when they are equal."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def compare(rows: pd.DataFrame, baseline: str, variant: str) -> pd.DataFrame:
    """A row a prompt that both variants answered: first outputs compared token by token.

    Columns prompt_id category identical position baseline_token variant_token tokens prompt_token_ids prefix_ids.
    `position` counts answer tokens from 0. A missing token is -1. Raises NoTokenIds.
    """
    known = rows["output_token_ids"].notna() & rows["prompt_token_ids"].notna()
    good = rows[rows["error"].isna() & known]
    firsts = good.sort_values("repeat").drop_duplicates(["variant", "prompt_id"])
    sides = [firsts[firsts["variant"] == name].set_index("prompt_id") for name in (baseline, variant)]
    if sides[0].empty or sides[1].empty:
        raise NoTokenIds(
            f"no token ids from both {baseline!r} and {variant!r}", "compare on vLLM servers, which return them"
        )
    shared = [prompt for prompt in sides[0].index if prompt in sides[1].index]
    if not shared:
        raise NoTokenIds(
            f"{baseline!r} and {variant!r} answered no prompt both", "measure both on the same prompts"
        )
    return pd.DataFrame([compared(prompt, *(side.loc[prompt] for side in sides)) for prompt in shared])


def compared(prompt: str, one: pd.Series, other: pd.Series) -> dict[str, Any]:
    """One prompt's row."""
    outputs = [[int(token) for token in row["output_token_ids"]] for row in (one, other)]
    position = first_difference(*outputs)
    tokens = [output[position] if position is not None and position < len(output) else -1 for output in outputs]
    return {
        "prompt_id": prompt,
        "category": one["category"],
        "identical": position is None,
        "position": position,
        "baseline_token": tokens[0],
        "variant_token": tokens[1],
        "tokens": len(outputs[0]),
        "prompt_token_ids": [int(token) for token in one["prompt_token_ids"]],
        "prefix_ids": outputs[0][:position],
    }


def judge(compared_rows: pd.DataFrame, server: Server | OnDemand) -> pd.DataFrame:
    """`compare`'s rows with `gap_nats` and `near_tie`, from the baseline server's own log-probabilities.

    The baseline is given prompt and common prefix and asked for the next token: the gap is its log-probability of
    its own token less that of the variant's (infinite beyond the top 20). Identical outputs need no question.
    """
    gaps = [None if row["identical"] else gap(row, server) for row in compared_rows.to_dict("records")]
    judged = compared_rows.assign(gap_nats=pd.array(gaps, dtype="Float64"))
    judged["near_tie"] = within(judged["gap_nats"], NEAR_TIE_NATS)
    return judged.drop(columns=["prompt_token_ids", "prefix_ids"])


def within(gaps: pd.Series, nats: float) -> pd.Series:
    """Which gaps are at most so many nats; missing where the gap is."""
    return (gaps <= nats + ROUNDING).astype("boolean")


def gap(row: dict[str, Any], server: Server | OnDemand) -> float:
    """The log-probability gap in nats at the first difference of one row."""
    running = server.get() if isinstance(server, OnDemand) else server
    context = [*row["prompt_token_ids"], *row["prefix_ids"]]
    found = next_logprobs(running, context)
    best = max(found.values())
    chosen = [found.get(row[name], -math.inf) for name in ("baseline_token", "variant_token")]
    return best - min(chosen)  # both tokens were somebody's best: how far does the worse one lie below the top?


def next_logprobs(server: Server, context: list[int]) -> dict[int, float]:
    """token id: log-probability of the likeliest next tokens after `context` (vLLM's completions)."""
    body = {"model": server.model, "prompt": context, "max_tokens": 1, "temperature": 0, "logprobs": TOP}
    body |= {"return_tokens_as_token_ids": True}
    url = f"{server.base_url}/completions"
    try:
        reply = urls.post(url, body, timeout=300)
        (top,) = reply["choices"][0]["logprobs"]["top_logprobs"]
        return {int(token.removeprefix("token_id:")): float(value) for token, value in top.items()}
    except httpx.HTTPError as error:
        server.check()
        raise NoLogprobs(f"{url} did not answer: {error}", "see the server's log, then run again") from error
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise bounds.no_answer(url, reply) from error


def share_identical(judged: pd.DataFrame) -> float:
    """Share of prompts with identical outputs; NaN for none."""
    return float(judged["identical"].mean()) if len(judged) else math.nan


def unexplained(judged: pd.DataFrame) -> pd.DataFrame:
    """The rows that differ and were no near-tie: each one a bug."""
    return judged[~judged["identical"] & ~judged["near_tie"].fillna(False)]
