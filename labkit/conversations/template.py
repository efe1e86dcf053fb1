"""A conversation as the target's own chat template renders it: token ids, and a mask of what the target says."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jinja2

from labkit.conversations.forms import BadRow, Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK, UNTHINK = "<think>", "</think>"
MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
SENTINEL = "⁂"  # an answer that no template's own text begins with
Span = tuple[int, int]


def shared(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def covered(token: Span, spans: Sequence[Span]) -> bool:
    """Whether all of a token's characters lie in one of the spans."""
    return any(start <= token[0] < token[1] <= end for start, end in spans)


def touched(token: Span, spans: Sequence[Span]) -> bool:
    """Whether any of a token's characters lies in one of the spans."""
    return any(token[0] < end and token[1] > start for start, end in spans)


@dataclass
class Tokens:
    """One training row: ids, mask of trained tokens (both [T]), the answer it begins with, and remarks."""

    input_ids: list[int]
    loss_mask: list[bool]
    turn: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Piece:
    """Rendered text, where the target speaks in it, and the messages that it shows."""

    text: str
    spans: list[Span]
    messages: Messages
    turn: int = 0
    notes: tuple[str, ...] = ()


class Template:
    """A tokenizer's chat template. `options` go to the template (as `enable_thinking`)."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        train_reasoning: bool = True,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.train_reasoning, self.options = tokenizer, train_reasoning, options or {}
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.specials = {*tokenizer.all_special_tokens, *added} - {""}
        source = tokenizer.chat_template
        self.source = source if isinstance(source, str) else str((source or {}).get("default", ""))
        self.marked = bool(MARKERS.search(self.source)) and tokenizer.is_fast
        self.thinks = THINK in self.source or THINK in tokenizer.get_vocab()

    def rows(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> list[Tokens]:
        """The conversation as training rows: one where each turn's rendering goes on the one before.

        Where it does not (templates that drop the reasoning of earlier turns), a row for each answer, with the
        history as the target sees it then. Raises BadRow.
        """
        self.refuse_specials(messages)
        answers = [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]
        if not answers:
            raise BadRow("no answer")
        dressed = [self.dressed(turn) for turn in messages[: answers[-1] + 1]]
        whole = self.whole(dressed, answers, tools)
        pieces = [whole] if whole else [self.one(dressed[: i + 1], n, tools) for n, i in enumerate(answers)]
        rows = [self.tokens(piece, tools) for piece in pieces]
        if len(rows) > 1:
            rows[0].notes.append("a row for each answer: the template shows earlier turns otherwise")
        return rows

    def render(self, messages: Messages, tools: Any, prompt: bool = False) -> str:
        """The template's text, with or without the beginning of an answer; raises BadRow where it refuses."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=prompt, **self.options
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise BadRow("refused by the template", str(error)[:100]) from error

    def refuse_specials(self, messages: Messages) -> None:
        """Raise BadRow where a text spells a special token: it would end a turn in the middle of it."""
        for turn in messages:
            said = f"{turn['content']}\n{turn.get('reasoning', '')}"
            found = next((special for special in self.specials if special in said), None)
            if found:
                raise BadRow("text of a special token", found)

    def dressed(self, turn: dict[str, Any]) -> dict[str, Any]:
        """A message as servers hand it to the template: arguments as values, reasoning where it has a place."""
        turn = dict(turn)
        if turn.get("tool_calls"):
            calls = [dict(call, function=dict(call["function"])) for call in turn["tool_calls"]]
            for call in calls:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            turn["tool_calls"] = calls
        reasoning = turn.get("reasoning")
        if reasoning and "reasoning" in self.source:
            turn["reasoning_content"] = reasoning
        elif reasoning and self.thinks:
            turn["content"] = f"{THINK}\n{reasoning}\n{UNTHINK}\n\n{turn['content']}"
        return turn

    def whole(self, messages: Messages, answers: list[int], tools: Any) -> Piece | None:
        """All turns in one text, or None where the text of some turn is not how the conversation began."""
        text, spans, notes = self.render(messages, tools), [], []
        for i in answers:
            before = self.render(messages[:i], tools, prompt=True)
            after = self.render(messages[: i + 1], tools)
            if not (text.startswith(before) and text.startswith(after) and len(after) > len(before)):
                return None
            spans.append((len(before), len(after)))
            notes += self.remarks(messages[i], text[len(before) : len(after)])
        return Piece(text, spans, messages, notes=tuple(dict.fromkeys(notes)))

    def one(self, messages: Messages, turn: int, tools: Any) -> Piece:
        """The last answer alone after its history; raises BadRow where its beginning cannot be told."""
        text, notes = self.render(messages, tools), []
        before = self.render(messages[:-1], tools, prompt=True)
        start = len(before)
        if not text.startswith(before) or len(text) == start:
            said = self.render([*messages[:-1], {"role": "assistant", "content": SENTINEL}], tools)
            start = shared(before, said)
            history = shared(self.render(messages[:-1], tools), text)
            if text[:start] != before[:start] or not history < start < len(text):
                raise BadRow("no boundary", f"{before[-40:]!r} does not begin {text[-60:]!r}")
            notes.append("the template begins answers otherwise than it shows them")
        notes += self.remarks(messages[-1], text[start:])
        return Piece(text, [(start, len(text))], messages, turn, tuple(notes))

    def remarks(self, turn: dict[str, Any], said: str) -> list[str]:
        """What is lost of an answer in its rendering."""
        lost = []
        if turn.get("reasoning", "").strip() not in said:
            lost.append("the template drops reasoning")
        if any(call["function"]["name"] not in said for call in turn.get("tool_calls", [])):
            lost.append("the template drops tool calls")
        return lost

    def tokens(self, piece: Piece, tools: Any) -> Tokens:
        """Ids and mask of a piece; raises BadRow when no token is trained."""
        ids, offsets = self.encode(piece.text)
        spans = [self.trained(piece.text, *span) for span in piece.spans]
        notes = list(piece.notes)
        mask = (
            self.marks(piece, ids, offsets, tools) if self.marked else [covered(token, spans) for token in offsets]
        )
        if not self.marked and not all(piece.text[:end].endswith(tuple(self.specials)) for _, end in spans):
            notes.append("the template ends answers without a token")
        across = [any(a < start < b for start, _ in spans) for a, b in offsets]
        if any(across):
            notes.append("a token spans the beginning of an answer")
        hidden = [] if self.train_reasoning else self.thoughts(piece)
        early = spans[0][0]  # a row for one answer shows earlier ones too, which markers mark
        mask = [
            marked and not crossing and token[0] >= early and not touched(token, hidden)
            for marked, crossing, token in zip(mask, across, offsets, strict=True)
        ]
        return self.checked(Tokens(ids, mask, piece.turn, notes))

    def checked(self, row: Tokens) -> Tokens:
        """The row with one BOS; raises BadRow when nothing is trained."""
        bos = self.tokenizer.bos_token_id
        if bos is not None and row.input_ids[:2] == [bos, bos]:
            row.input_ids, row.loss_mask = row.input_ids[1:], row.loss_mask[1:]
            row.notes.append("doubled BOS taken out")
        if not any(row.loss_mask):
            raise BadRow("no trained token")
        return row

    def trained(self, text: str, start: int, end: int) -> Span:
        """The span up to the token that ends the turn; what the template writes after it is nobody's saying."""
        stop = start + len(text[start:end].rstrip())
        if not text[start:stop].endswith(tuple(self.specials)):
            close = self.tokenizer.eos_token
            if close and text.startswith(close, end):  # templates that end a turn where the next one begins
                stop = end + len(close)
        return start, stop

    def thoughts(self, piece: Piece) -> list[Span]:
        """The reasoning in each span, the tag that ends it included; raises BadRow where it has no end."""
        found = []
        for start, end in piece.spans:
            at = piece.text.find(UNTHINK, start, end)
            if at >= 0:
                found.append((start, at + len(UNTHINK)))
        answers = [turn for turn in piece.messages if turn["role"] == "assistant"][-len(piece.spans) :]
        for turn, (start, end) in zip(answers, piece.spans, strict=True):
            said = piece.text[start:end]
            if turn.get("reasoning") and turn["reasoning"] in said and UNTHINK not in said:
                raise BadRow("reasoning has no end tag")
        return found

    def encode(self, text: str) -> tuple[list[int], Sequence[Span]]:
        """Token ids and the characters of each, without the tokenizer's own BOS: the template writes its own."""
        if self.tokenizer.is_fast:
            found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            return list(found["input_ids"]), found["offset_mapping"]
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return ids, self.offsets(text, ids)

    def offsets(self, text: str, ids: list[int]) -> list[Span]:
        """Characters of each token for tokenizers that do not tell them (Kimi's tiktoken form).

        They are decoded one by one, the pieces of one character together. Raises BadRow where what they decode
        to is not the text.
        """
        found, at = [], 0
        pending: list[int] = []
        for token in ids:
            pending.append(token)
            piece = self.tokenizer.decode(pending, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if "\ufffd" in piece and not text.startswith(piece, at):  # a character of several tokens
                continue
            if not text.startswith(piece, at):
                raise BadRow("tokens do not spell the text", repr(piece[:30]))
            found += [(at, at + len(piece))] * len(pending)
            at, pending = at + len(piece), []
        if at != len(text) or pending:
            raise BadRow("tokens do not spell the text", repr(text[at : at + 30]))
        return found

    def marks(self, piece: Piece, ids: list[int], offsets: Sequence[Span], tools: Any) -> list[bool]:
        """The mask by the template's generation markers, the token that ends a turn included."""
        found = self.tokenizer.apply_chat_template(
            piece.messages,
            tools=tools or None,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self.options,
        )
        if list(found["input_ids"]) != ids:
            raise BadRow("two renderings differ")
        mask = [bool(value) for value in found["assistant_masks"]]
        ends = {self.tokenizer.convert_tokens_to_ids(token) for token in self.ends()}
        for i in range(1, len(mask)):
            end = ids[i] in ends and ids[i - 1] not in ends
            # Transformers stops at the first token of the last character, which may have several
            mask[i] = mask[i] or (mask[i - 1] and (end or offsets[i] == offsets[i - 1]))
        return mask

    def ends(self) -> set[str]:
        """Tokens that end an answer: the tokenizer's own, and what the template writes after an answer."""
        said = self.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": SENTINEL}], None)
        after = said.partition(SENTINEL)[2].lstrip()
        return {self.tokenizer.eos_token or "", *(token for token in self.specials if after.startswith(token))} - {
            ""
        }
