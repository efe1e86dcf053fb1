"""Tokens that a draft has to be able to propose whether or not the data had them: specials, and the template's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM, QUESTION, ANSWER, THOUGHT = "Zsystem0", "Zquestion1", "Zanswer2", "Zthought3"
NAME, RESULT, ARGUMENT, VALUE = "Zname4", "Zresult5", "Zargument6", "Zvalue7"
CONTENTS = (SYSTEM, QUESTION, ANSWER, THOUGHT, NAME, RESULT, ARGUMENT, VALUE)
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": QUESTION,
        "parameters": {"type": "object", "properties": {ARGUMENT: {"type": "string"}}, "required": [ARGUMENT]},
    },
}


def required_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the special tokens and of every token that the chat template itself renders, ascending.

    The template is rendered with stand-ins for what people and the model say; whatever is left between them is
    the template's own: role headers, end marks, tool and reasoning marks, a built-in system prompt.
    """
    added = tokenizer.added_tokens_decoder
    found = {*tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)}
    for text in rendered(tokenizer):
        for piece in between(text):
            found |= set(tokenizer(piece, add_special_tokens=False)["input_ids"])
    return sorted(found)


def rendered(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """What the template makes of each kind of conversation that it takes; kinds that it refuses are left out."""
    if not tokenizer.chat_template:
        return
    for messages, options in conversations():
        try:
            yield str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except (TemplateError, ValueError, TypeError, KeyError):
            continue  # a template without tools, system turns or reasoning says so by failing


def conversations() -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Messages and template options: plain, several turns, ready for an answer, with reasoning, with tools."""
    user, answer = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
    system = {"role": "system", "content": SYSTEM}
    thought = answer | {"reasoning_content": THOUGHT, "reasoning": THOUGHT}
    call = {"id": NAME, "type": "function", "function": {"name": NAME, "arguments": {ARGUMENT: VALUE}}}
    calling = {"role": "assistant", "content": ANSWER, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": NAME, "name": NAME, "content": RESULT}
    yield [user, answer], {}
    yield [system, user, answer, user, answer], {}
    yield [user], {"add_generation_prompt": True}
    yield [user], {"add_generation_prompt": True, "enable_thinking": False}
    yield [user, thought], {}
    yield [user, calling, result, answer], {"tools": [TOOL]}


def between(text: str) -> list[str]:
    """The parts of a rendered conversation that are none of the stand-ins."""
    for content in CONTENTS:
        text = text.replace(content, "\0")
    return [piece for piece in text.split("\0") if piece]
