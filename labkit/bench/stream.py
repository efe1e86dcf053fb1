"""What one streamed answer contained and when: events of any OpenAI-compatible server to times and counts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from labkit.errors import LabError

# Reasoning that no parser took out of the text: the tags of most reasoning models, and Kimi's own.
THINK = re.compile(r"(?P<open><think>|◁think▷)|(?P<close></think>|◁/think▷)")


# The counts in a usage, or in its details.
TOKENS = ("prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens", "prompt_cache_hit_tokens")
BIGGEST = 2**31  # token ids and counts are below
FAILED = ("abort", "error", "cancelled")  # finish reasons of an answer that the server gave up


class BrokenStream(LabError):
    """A stream that began well carried an error, or ended before its finish reason."""


@dataclass
class Piece:
    """One chunk that carried output: when it came and what was in it."""

    at: float
    reasoning: str = ""
    answer: str = ""
    tool: str = ""
    tokens: list[int] | None = None
    total: int | None = None  # of the whole answer so far, where each chunk carries the usage

    @property
    def visible(self) -> bool:
        """Whether any output arrived: text, a tool call, or token ids (of a token without text)."""
        return bool(self.reasoning or self.answer or self.tool or self.tokens)


@dataclass
class Stream:
    """Collects the events of one answer; `sent` and all `at` are seconds of the same clock."""

    sent: float
    pieces: list[Piece] = field(default_factory=list)
    first_chunk: float | None = None
    usage: Mapping[str, Any] | None = None
    finish_reason: str | None = None
    finished_at: float | None = None
    prompt_ids: list[int] | None = None
    speculation: Mapping[str, Any] | None = None

    def feed(self, event: Any, at: float) -> None:
        """Take in one event; raises BrokenStream for an error inside the stream, TypeError for odd fields."""
        if not isinstance(event, Mapping):
            raise BrokenStream(f"event that is no object: {event!r:.200}", "is this an OpenAI-compatible server?")
        if event.get("error") or event.get("object") == "error":
            error = event.get("error") or event
            message = error.get("message", error) if isinstance(error, Mapping) else error
            raise BrokenStream(f"error inside the stream: {message!s:.300}", "see the server's log")
        usage = counts(event.get("usage"))
        self.usage = usage or self.usage
        self.prompt_ids = ids(event.get("prompt_token_ids")) or self.prompt_ids
        self.speculation = speculation(event) or self.speculation
        for choice in event.get("choices") or []:  # the usage chunk has none
            self.take(choice, at, usage.get("completion_tokens"))

    def take(self, choice: Mapping[str, Any], at: float, total: int | None = None) -> None:
        """Take in the choice of an event (chat delta or completion text); refuses a second one (BrokenStream)."""
        if choice.get("index"):
            raise BrokenStream(
                f"the server sent a choice {choice['index']}: several answers share one stream",
                "ask for one answer (n=1): the times of several cannot be told apart",
            )
        self.first_chunk = at if self.first_chunk is None else self.first_chunk
        delta = choice.get("delta") or {}
        self.prompt_ids = ids(choice.get("prompt_token_ids")) or self.prompt_ids
        self.usage = counts(choice.get("usage")) or self.usage  # Kimi's own API has it here
        self.speculation = speculation(choice) or self.speculation
        thought, answer = texts(delta.get("content"))
        piece = Piece(
            at,
            reasoning=text(delta.get("reasoning") or delta.get("reasoning_content") or thought),
            answer=text(answer or delta.get("refusal") or choice.get("text")),
            tool=called(delta),
            tokens=ids(choice.get("token_ids")),
            total=total,
        )
        if piece.visible:
            self.pieces.append(piece)
        if choice.get("finish_reason"):
            self.finish_reason, self.finished_at = text(choice["finish_reason"]), at

    def close(self) -> None:
        """The stream is over: sort out inline think tags; raises BrokenStream when it was cut off or given up."""
        if self.finish_reason is None:
            raise BrokenStream(
                f"the stream ended after {len(self.pieces)} chunks without a finish reason",
                "the server or something between broke it off; see the server's log",
            )
        if self.finish_reason in FAILED:
            raise BrokenStream(
                f"the server gave the answer up after {len(self.pieces)} chunks (finish reason "
                f"{self.finish_reason!r})",
                "see the server's log",
            )
        if not any(piece.reasoning for piece in self.pieces):
            move_inline_reasoning(self.pieces)

    @property
    def last(self) -> float | None:
        """When the last token came: the last chunk with output, or with the finish reason (it carries EOS)."""
        times = [*(piece.at for piece in self.pieces[-1:]), self.finished_at]
        return max((time for time in times if time is not None), default=None)

    @property
    def output_ids(self) -> list[int] | None:
        """All output token ids, where every chunk with output carried them."""
        if not self.pieces or any(piece.tokens is None for piece in self.pieces):
            return None
        return [token for piece in self.pieces for token in piece.tokens or ()]

    @property
    def chunk_tokens(self) -> list[int] | None:
        """Tokens in each chunk with output, from their ids or a usage that rises; None where neither tells."""
        if self.output_ids is not None:
            return [len(piece.tokens or ()) for piece in self.pieces]
        totals = [piece.total for piece in self.pieces if piece.total is not None]
        if not totals or len(totals) < len(self.pieces):
            return None
        found = [after - before for before, after in pairwise([0, *totals])]
        return found if min(found) >= 0 else None

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of all text that arrived: no fewer than its tokens, special ones apart."""
        return sum(
            len((piece.reasoning + piece.answer + piece.tool).encode(errors="replace")) for piece in self.pieces
        )

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive chunks with output; a chunk may hold several tokens."""
        return [after.at - before.at for before, after in pairwise(self.pieces)]

    def first(self, *, answer: bool = False) -> float | None:
        """When the first output, or the first of the answer (text or tool call), came; None if none did."""
        found = (p.at for p in self.pieces if not answer or p.answer.strip() or p.tool)
        return next(found, None)


def text(value: Any) -> str:
    """A field's text, empty for None; raises TypeError for anything else."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"text expected, not {value!r:.80}")
    return value or ""


def ids(value: Any) -> list[int] | None:
    """A field's token ids; raises TypeError for anything else."""
    sound = isinstance(value, list) and all(type(token) is int and -BIGGEST < token < BIGGEST for token in value)
    if value is not None and not sound:
        raise TypeError(f"token ids expected, not {value!r:.80}")
    return value


def count(value: Any) -> int | None:
    """A number of tokens; raises TypeError for what is none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not None and not (type(value) is int and 0 <= value < BIGGEST):
        raise TypeError(f"a number of tokens expected, not {value!r:.80}")
    return value


def counts(usage: Any) -> dict[str, Any]:
    """The counts of a usage, its details too where they are an object; empty for none. Raises TypeError."""
    found = {}
    for name, value in dict(usage or {}).items():
        if isinstance(value, Mapping) and name.endswith("_details"):
            found[name] = {inner: count(value[inner]) for inner in TOKENS if inner in value}
        elif name in TOKENS:
            found[name] = count(value)
    return found


def speculation(event: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What an event says of its request's drafts: vLLM's metrics, or SGLang's meta_info; None without."""
    told, meta = (event.get("metrics") or {}).get("speculative_decoding"), event.get("meta_info") or {}
    return told or (meta if "spec_verify_ct" in meta else None)


def texts(content: Any) -> tuple[str, str]:
    """Reasoning and answer in a delta's content, which is text or, at some servers, a list of typed parts."""
    if not isinstance(content, list):
        return "", content or ""
    parts = [part for part in content if isinstance(part, Mapping)]
    thought = [texts(part.get("thinking"))[1] for part in parts if part.get("type") == "thinking"]
    return "".join(thought), "".join(part.get("text") or "" for part in parts if part.get("type") == "text")


def called(delta: Mapping[str, Any]) -> str:
    """Name and arguments in a delta's tool calls, strung together; empty without any."""
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or []]
    found = "".join(f"{call.get('name') or ''}{call.get('arguments') or ''}" for call in calls)
    return found or ("{}" if calls else "")


def move_inline_reasoning(pieces: list[Piece]) -> None:
    """Move what stands in think tags from the answer to the reasoning.

    Reasoning reaches from the start to the closing tag (chat templates may have put the opening one into the
    prompt), or, where the tag never closes, to the end. Tags further on are part of the answer.
    """
    text = "".join(piece.answer for piece in pieces)
    opening = THINK.match(text.lstrip())
    closing = next((m for m in THINK.finditer(text) if m["close"]), None)
    earlier = next(THINK.finditer(text), None)
    if opening is None or not opening["open"]:
        if closing is None or earlier is None or not earlier["close"]:
            return
        end = closing.end()
    else:
        end = closing.end() if closing else len(text)
    position = 0
    for piece in pieces:
        inside = max(0, min(len(piece.answer), end - position))
        position += len(piece.answer)
        piece.reasoning, piece.answer = piece.answer[:inside], piece.answer[inside:]


def reasoning_share(pieces: list[Piece]) -> tuple[float, str]:
    """Share of the output that is reasoning, and from what it was told: token ids, or only characters."""
    ids = all(piece.tokens is not None for piece in pieces)
    thought = total = 0.0
    inside = False  # which side a token without text is on: that of the text before it
    for piece in pieces:
        characters = len(piece.reasoning) + len(piece.answer)
        share = len(piece.reasoning) / characters if characters else float(inside)
        weight = len(piece.tokens or ()) if ids else characters
        thought, total = thought + weight * share, total + weight
        inside = bool(piece.reasoning) and not piece.answer if characters else inside
    return (thought / total if total else 0.0), "token_ids" if ids else "characters"
