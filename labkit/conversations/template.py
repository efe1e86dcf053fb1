"""A conversation as the target's own chat template renders it, and where in that text the target speaks."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jinja2

from labkit.conversations.forms import BadRow, Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK, UNTHINK = "<think>", "</think>"
MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
SENTINEL = "⁂"  # an answer that no template's own text begins with
APART = "a row for each answer: the template shows earlier turns otherwise"
Span = tuple[int, int]


def shared(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass(frozen=True)
class Piece:
    """Rendered text, where the target speaks in it, and the messages (as dressed) and tools that it shows."""

    text: str
    spans: list[Span]
    messages: Messages
    tools: Any = None
    turn: int = 0
    notes: tuple[str, ...] = ()


class Template:
    """A tokenizer's chat template. `options` go to the template (as `enable_thinking`)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any] | None = None) -> None:
        self.tokenizer, self.options = tokenizer, options or {}
        added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.specials = {*tokenizer.all_special_tokens, *added} - {""}
        source = tokenizer.chat_template
        self.source = source if isinstance(source, str) else str((source or {}).get("default", ""))
        self.marked = bool(MARKERS.search(self.source)) and tokenizer.is_fast
        self.thinks = THINK in self.source or THINK in tokenizer.get_vocab()

    def pieces(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> list[Piece]:
        """The conversation as one text where each turn's rendering goes on the one before.

        Where it does not (templates that drop the reasoning of earlier turns), a text for each answer, with the
        history as the target sees it then. Raises BadRow.
        """
        self.refuse_specials(messages)
        answers = [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]
        if not answers:
            raise BadRow("no answer")
        dressed = [self.dressed(turn) for turn in messages[: answers[-1] + 1]]
        if whole := self.whole(dressed, answers, tools):
            return [whole]
        found = [self.one(dressed[: i + 1], number, tools) for number, i in enumerate(answers)]
        if len(found) > 1:
            found[0] = replace(found[0], notes=(*found[0].notes, APART))
        return found

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
            arguments = [call["function"]["arguments"] for call in turn.get("tool_calls", [])]
            said = "\n".join([turn["content"], turn.get("reasoning", ""), *arguments])
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
        return Piece(text, spans, messages, tools, notes=tuple(dict.fromkeys(notes)))

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
        return Piece(text, [(start, len(text))], messages, tools, turn, tuple(notes))

    def remarks(self, turn: dict[str, Any], said: str) -> list[str]:
        """What is lost of an answer in its rendering."""
        lost = []
        if turn.get("reasoning", "").strip() not in said:
            lost.append("the template drops reasoning")
        if any(call["function"]["name"] not in said for call in turn.get("tool_calls", [])):
            lost.append("the template drops tool calls")
        return lost

    def ends(self) -> set[str]:
        """Tokens that end an answer: the tokenizer's own, and what the template writes after an answer."""
        said = self.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": SENTINEL}], None)
        after = said.partition(SENTINEL)[2].lstrip()
        known = {token for token in self.specials if after.startswith(token)}
        return known | ({self.tokenizer.eos_token} if self.tokenizer.eos_token else set())
