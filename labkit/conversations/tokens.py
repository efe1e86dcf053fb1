"""Rendered conversations as training rows: the tokenizer's ids, and a mask of the tokens that the target says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.conversations.forms import BadRow, Messages
from labkit.conversations.template import UNTHINK, Piece, Span, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Tokens:
    """One training row: ids, mask of trained tokens (both [T]), the answer it begins with, and remarks."""

    input_ids: list[int]
    loss_mask: list[bool]
    turn: int = 0
    notes: list[str] = field(default_factory=list)


def tokenise(
    template: Template,
    messages: Messages,
    tools: list[dict[str, Any]] | None = None,
    train_reasoning: bool = True,
) -> list[Tokens]:
    """A conversation as training rows: one, or one an answer (`Template.pieces`); raises BadRow.

    The ids are the whole text's, without a BOS of the tokenizer's own. Trained is what the target says: from where
    the template's beginning of an answer ends to the token that ends the turn, or what the template's generation
    markers enclose and that token; without `train_reasoning` only what follows the reasoning.
    """
    return [row_of(template, piece, train_reasoning) for piece in template.pieces(messages, tools)]


def row_of(template: Template, piece: Piece, train_reasoning: bool) -> Tokens:
    """Ids and mask of a piece."""
    ids, offsets = encode(template.tokenizer, piece.text)
    spans, notes = [trained(template, piece.text, *span) for span in piece.spans], list(piece.notes)
    begin, end = offsets.T
    if template.marked:
        mask = marks(template, piece, ids, offsets)
    else:
        mask = np.any([(begin >= start) & (begin < end) & (end <= stop) for start, stop in spans], axis=0)
        if not all(piece.text[:stop].endswith(tuple(template.specials)) for _, stop in spans):
            notes.append("the template ends answers without a token")
    across = np.any([(begin < start) & (start < end) for start, _ in spans], axis=0)
    if across.any():
        notes.append("a token spans the beginning of an answer")
    mask &= ~across & (begin >= spans[0][0])  # a row for one answer shows earlier ones too, which markers mark
    for start, stop in [] if train_reasoning else thoughts(piece):
        mask &= (begin >= stop) | (end <= start)
    return checked(template, Tokens(ids, mask.tolist(), piece.turn, notes))


def checked(template: Template, row: Tokens) -> Tokens:
    """The row with one BOS; raises BadRow when nothing is trained."""
    bos = template.tokenizer.bos_token_id
    if bos is not None and row.input_ids[:2] == [bos, bos]:
        row.input_ids, row.loss_mask = row.input_ids[1:], row.loss_mask[1:]
        row.notes.append("doubled BOS taken out")
    if not any(row.loss_mask):
        raise BadRow("no trained token")
    return row


def trained(template: Template, text: str, start: int, end: int) -> Span:
    """The span up to the token that ends the turn; what the template writes after it is nobody's saying."""
    stop = start + len(text[start:end].rstrip())
    if not text[start:stop].endswith(tuple(template.specials)):
        close = template.tokenizer.eos_token
        if close and text.startswith(close, end):  # templates that end a turn where the next one begins
            stop = end + len(close)
    return start, stop


def thoughts(piece: Piece) -> list[Span]:
    """The reasoning in each span, the tag that ends it included; raises BadRow where it has no end."""
    answers = [turn for turn in piece.messages if turn["role"] == "assistant"][-len(piece.spans) :]
    found = []
    for turn, (start, end) in zip(answers, piece.spans, strict=True):
        at = piece.text.find(UNTHINK, start, end)
        if at >= 0:
            found.append((start, at + len(UNTHINK)))
        elif turn.get("reasoning") and turn["reasoning"] in piece.text[start:end]:
            raise BadRow("reasoning has no end tag")
    return found


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], np.ndarray]:
    """Token ids and the characters of each [T, 2], without a BOS of the tokenizer's: the template writes one."""
    if tokenizer.is_fast:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(found["input_ids"]), np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids, np.array(spelled(tokenizer, text, ids), dtype=np.int64).reshape(-1, 2)


def spelled(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int]) -> list[Span]:
    """Characters of each token for tokenizers that do not tell them (Kimi's tiktoken form).

    They are decoded one by one, the pieces of one character together. Raises BadRow where what they decode to is
    not the text.
    """
    found: list[Span] = []
    at, pending = 0, []
    for token in ids:
        pending.append(token)
        piece = tokenizer.decode(pending, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if "\ufffd" in piece and not text.startswith(piece, at):  # a character of several tokens
            continue
        if not text.startswith(piece, at):
            raise BadRow("tokens do not spell the text", repr(piece[:30]))
        found += [(at, at + len(piece))] * len(pending)
        at, pending = at + len(piece), []
    if at != len(text) or pending:
        raise BadRow("tokens do not spell the text", repr(text[at : at + 30]))
    return found


def marks(template: Template, piece: Piece, ids: list[int], offsets: np.ndarray) -> np.ndarray:
    """The mask by the template's generation markers, the token that ends a turn included."""
    found = template.tokenizer.apply_chat_template(
        piece.messages,
        tools=piece.tools or None,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **template.options,
    )
    if list(found["input_ids"]) != ids:
        raise BadRow("two renderings differ")
    mask = [bool(value) for value in found["assistant_masks"]]
    ends = set(template.tokenizer.convert_tokens_to_ids(sorted(template.ends())))
    shared = (offsets[1:] == offsets[:-1]).all(axis=1)  # characters with the token before
    for i in range(1, len(mask)):
        end = ids[i] in ends and ids[i - 1] not in ends
        # Transformers stops at the first token of the last character, which may have several
        mask[i] = mask[i] or (mask[i - 1] and (end or shared[i - 1]))
    return np.array(mask)
