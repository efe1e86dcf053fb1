"""One request as one row: definitions of every column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from labkit import acceptance
from labkit.acceptance import Acceptance
from labkit.bench.stream import Stream, count, ids, reasoning_share
from labkit.errors import LabError

Row = dict[str, Any]
SPECIAL_TOKENS = 16  # that an answer may have without text: ends, tags, markers of tool calls

# Times run from the moment the request was sent; NaN (tokens: NA) where they do not exist or the request failed.
COLUMNS = {
    "variant": "string",
    "prompt_id": "string",
    "category": "string",
    "prompt_source": "string",  # the file that the prompt is from, with its version or digest
    "repeat": "Int64",
    "model": "string",
    "concurrency": "Int64",
    "max_tokens": "Int64",
    "seed": "Int64",
    "extra_body": "string",  # what the request had beyond the lab's own fields, as JSON; empty for nothing
    "session": "string",  # when the first timed request of its level was sent (UTC): a resumed run has several
    "started_s": "float64",  # since then
    "ttft_ms": "float64",  # first token of any kind: reasoning, answer, tool call, token id; not the role chunk
    "ttft_answer_ms": "float64",  # first text of the answer
    "first_chunk_ms": "float64",  # first chunk at all, often only the role
    "e2e_ms": "float64",  # last token
    "decode_ms": "float64",  # first token to last token
    "tpot_ms": "float64",  # decode_ms / (tokens_timed - 1); NaN below two tokens, or where they are not known
    "tokens_prompt": "Int64",
    "tokens_cached": "Int64",  # of the prompt, from the server's prefix cache, where it says so
    "tokens_reasoning": "Int64",
    "tokens_answer": "Int64",
    "tokens_total": "Int64",
    "tokens_streamed": "Int64",  # ids that arrived; below tokens_total the server sent less than it counted
    "tokens_timed": "Int64",  # 1 + those after the first chunk: all, where that held one and nothing was hidden
    "tokens_source": "string",  # usage, token_ids, or chunks (a lower bound)
    "reasoning_source": "string",  # usage, token_ids, stream, characters (an estimate), or unknown
    "reasoning_hidden": "boolean",  # tokens were generated and counted, but never streamed
    "chunks": "Int64",  # with output
    "chunk_tokens": "object",  # tokens of each of them, where ids or a running usage tell
    "gaps_ms": "object",  # between chunks with output; a gap is not an ITL where a chunk holds several tokens
    "finish_reason": "string",
    "budget_exhausted": "boolean",  # max_tokens were spent before the answer began
    "error": "string",
    "drafts": "Int64",
    "drafted": "Int64",
    "accepted": "Int64",
    "accepted_at": "object",  # by draft position; empty where the engine tells only their sum (SGLang)
    "eligible_at": "object",
    "acceptance_source": "string",  # response (its own account), counters (/metrics), or why there is none
    "prompt_token_ids": "object",
    "output_token_ids": "object",
    "reasoning_text": "string",
    "answer_text": "string",
}


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a frame with every column, and always the same types."""
    table = typed(pd.DataFrame(list(rows), columns=list(COLUMNS)))
    lists = [name for name, kind in COLUMNS.items() if kind == "object"]
    return table.assign(**{name: table[name].where(table[name].notna(), None) for name in lists})


def typed(table: pd.DataFrame) -> pd.DataFrame:
    """The columns in order and of their types; those that an older table lacks are empty."""
    return table.reindex(columns=list(COLUMNS)).astype(COLUMNS)


def of_stream(stream: Stream) -> Row:
    """The measured columns of a request that ended well."""
    row = counts(stream) | times(stream)
    timed = row["tokens_timed"] or 0
    if timed >= 2 and row["decode_ms"] > 0:
        row["tpot_ms"] = row["decode_ms"] / (timed - 1)
    row["budget_exhausted"] = stream.finish_reason == "length" and stream.first(answer=True) is None
    row["finish_reason"] = storable(stream.finish_reason or "") or None
    whole = row["tokens_streamed"] == row["tokens_total"]  # a part of the ids would replay as another answer
    row["prompt_token_ids"], row["output_token_ids"] = stream.prompt_ids, stream.output_ids if whole else None
    row["reasoning_text"] = storable("".join(piece.reasoning for piece in stream.pieces))
    row["answer_text"] = storable("".join(piece.answer for piece in stream.pieces))
    if stream.speculation:
        row |= of_response(stream.speculation, row["tokens_total"])
    return row


def storable(text: str) -> str:
    """Text as files take it: halves of a character that came in two chunks put together, others replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def times(stream: Stream) -> Row:
    """The time columns, milliseconds."""

    def since(at: float | None) -> float:
        return np.nan if at is None else (at - stream.sent) * 1e3

    first, last = stream.first(), stream.last
    return {
        "ttft_ms": since(first),
        "ttft_answer_ms": since(stream.first(answer=True)),
        "first_chunk_ms": since(stream.first_chunk),
        "e2e_ms": since(last),
        "decode_ms": np.nan if first is None or last is None else (last - first) * 1e3,
        "chunks": len(stream.pieces),
        "gaps_ms": [gap * 1e3 for gap in stream.gaps],
    }


def counts(stream: Stream) -> Row:
    """The token columns and where each count comes from."""
    usage = stream.usage or {}
    total, source = usage.get("completion_tokens"), "usage"
    total = None if total == 0 and stream.pieces else total  # a gateway that counts nothing
    ids = stream.output_ids
    if total is None:
        total, source = (len(stream.pieces), "chunks") if ids is None else (len(ids), "token_ids")
    reasoning, reasoning_source, hidden = reasoning_tokens(stream, total)
    return {
        "tokens_prompt": usage.get("prompt_tokens", len(stream.prompt_ids) if stream.prompt_ids else None),
        "tokens_cached": cached(usage),
        "tokens_reasoning": reasoning,
        "tokens_answer": None if reasoning is None else total - reasoning,
        "tokens_total": total,
        "tokens_streamed": None if ids is None else len(ids),
        "tokens_timed": timed(stream, total, reasoning, hidden),
        "tokens_source": source,
        "reasoning_source": reasoning_source,
        "reasoning_hidden": hidden,
        "chunk_tokens": stream.chunk_tokens,
    }


def cached(usage: Mapping[str, Any]) -> int | None:
    """Prompt tokens from the prefix cache: OpenAI's, vLLM's and SGLang's place, DeepSeek's, Kimi's."""
    details = usage.get("prompt_tokens_details") or {}
    places = (details.get("cached_tokens"), usage.get("prompt_cache_hit_tokens"), usage.get("cached_tokens"))
    return next((place for place in places if place is not None), None)


def timed(stream: Stream, total: int, reasoning: int | None, hidden: bool) -> int | None:
    """One more than the tokens that arrived after the first chunk: decode_ms is their time, not the first chunk's.

    A first chunk of several tokens is what stream intervals and hidden reasoning make of it (genai-bench#81).
    """
    if hidden:
        return None if reasoning is None else total - reasoning
    tokens = stream.chunk_tokens
    return total - (tokens[0] - 1 if tokens and tokens[0] else 0)


def reasoning_tokens(stream: Stream, total: int) -> tuple[int | None, str, bool]:
    """Reasoning tokens, their source, and whether they were generated but never streamed.

    The usage is believed, but not a 0 beside reasoning that was streamed (sglang#17156). Without any text of an
    answer all tokens are reasoning, the end-of-sequence token too, which vLLM counts to the answer. A usage that
    counts more tokens than bytes of text arrived hides reasoning even where it does not say so: how much of
    either there was is not known then.
    """
    usage = stream.usage or {}
    details = usage.get("completion_tokens_details") or {}
    told = details.get("reasoning_tokens", usage.get("reasoning_tokens"))
    streamed = any(piece.reasoning for piece in stream.pieces)
    answered = stream.first(answer=True) is not None
    if not answered and (streamed or told):
        return total, "stream" if streamed else "usage", not streamed
    if told or (told == 0 and not streamed):
        return min(int(told), total), "usage", not streamed and told > 0
    if stream.output_ids is None and total > stream.bytes + SPECIAL_TOKENS:
        return None, "unknown", True
    if not streamed:
        return 0, "stream", False
    share, source = reasoning_share(stream.pieces)
    return round(total * share), source, False


def of_response(told: Mapping[str, Any], tokens: int) -> Row:
    """The acceptance columns from a response's own account; the server may change its shape; the times stay."""
    try:
        found = of_acceptance(acceptance.from_response(told, tokens), "response")
        for name in ("drafts", "drafted", "accepted"):
            count(found[name])
        ids(found["accepted_at"]), ids(found["eligible_at"])
        return found
    except LabError as error:
        return {"acceptance_source": f"unusable: {error.what}"}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return {"acceptance_source": f"unusable: unknown shape of the response's account ({error!r})"[:300]}


def of_acceptance(accepted: Acceptance, source: str) -> Row:
    """The acceptance columns of a request."""
    return {
        "drafts": accepted.drafts,
        "drafted": accepted.drafted,
        "accepted": accepted.accepted,
        "accepted_at": list(accepted.accepted_at) or None,
        "eligible_at": None if accepted.eligible_at is None else list(accepted.eligible_at),
        "acceptance_source": source,
    }
