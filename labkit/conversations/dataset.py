"""Answers to a data set: exact tokens and a mask of what the target said, a row a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from labkit import files, runs
from labkit.conversations.answers import Sampling, TooFewAnswers, generate
from labkit.conversations.forms import BadRow, Report, without_none
from labkit.conversations.template import UNTHINK, Template
from labkit.conversations.tokens import Tokens, tokenise
from labkit.errors import LabError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "dataset.parquet"
FEWEST = 2  # trained tokens of a row: with one there is nothing for a draft to guess


class NoEndOfThought(LabError):
    """Reasoning is not to be trained, and no token says where it ends."""


def collect(
    prompts: pd.DataFrame,
    server: Any,
    out_dir: Path,
    *,
    max_length: int,
    model_key: str = "",
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    concurrency: int = 32,
    tokenizer: PreTrainedTokenizerBase | None = None,
    train_reasoning: bool = True,
    template: dict[str, Any] | None = None,
) -> pd.DataFrame:
    """The target answers the prompts (`split`'s frame) itself; writes `out_dir`/dataset.parquet; resumes.

    Columns: prompt_id category topic split messages tools prompt text input_ids loss_mask seq_len prompt_tokens
    answer_tokens finish_reason truncated turn origin model and the sampling. `input_ids` are the server's own
    prompt and answer ids (end token included), cut to `max_length` tokens; `loss_mask` is True on its answers.
    All turns of a conversation are one row as long as the server's prompt goes on the row's tokens; else a row
    begins anew (its `prompt_id` ends with -turn). `tokenizer` is needed where reasoning is not to be trained;
    `template` goes to the chat template (as {"thinking": False}).
    What was left out: `report` of the frame. Errors: those of `answers.generate`.
    """
    end = None if train_reasoning else end_of_thought(tokenizer)
    sampling = Sampling(max_tokens, temperature, top_p, seed)
    said = generate(
        prompts,
        server,
        out_dir / "answers.jsonl",
        model_key=model_key,
        sampling=sampling,
        concurrency=concurrency,
        template=template,
    )
    report, rows = Report(), []
    for prompt, answers in zip(prompts.to_dict("records"), said, strict=True):
        if not answers:
            report.add("refused by the server", prompt["prompt_id"])
        if any(len(set(answer["prompt_token_ids"][:2])) == 1 for answer in answers):
            report.add("the first token stands twice (a doubled BOS?)", prompt["prompt_id"], kept=True)
        for row, answer in of_answers(answers, end):
            last = {
                "text": answer["text"],
                "finish_reason": answer["finish_reason"],
                "model": answer.get("model", ""),
            }
            rows += kept({**prompt, **last, **sampling.options, "origin": "target"}, row, max_length, report)
    return written(rows, report, out_dir)


def of_answers(answers: list[dict[str, Any]], end: int | None) -> Iterator[tuple[Tokens, dict[str, Any]]]:
    """Rows of one conversation from the server's ids, each with its last answer; `end` hides the reasoning."""
    row, last = None, {}
    for turn, answer in enumerate(answers):
        asked, said = answer["prompt_token_ids"], answer["token_ids"]
        if row is None or asked[: len(row.input_ids)] != row.input_ids:
            if row is not None:
                yield row, last
            row = Tokens([], [], turn)
        mask = [True] * len(said) if end is None else spoken_aloud(said, answer, end)
        row.loss_mask += [False] * (len(asked) - len(row.input_ids)) + mask
        row.input_ids, last = asked + said, answer
    if row is not None:
        yield row, last


def end_of_thought(tokenizer: PreTrainedTokenizerBase | None) -> int:
    """The token that ends reasoning; raises NoEndOfThought for a target that has none."""
    token = tokenizer.get_vocab().get(UNTHINK) if tokenizer is not None else None
    if token is None:
        raise NoEndOfThought(
            f"the target's tokenizer has no token {UNTHINK}, so its reasoning cannot be told apart",
            "leave train_reasoning at True",
        )
    return int(token)


def spoken_aloud(said: list[int], answer: dict[str, Any], end: int) -> list[bool]:
    """Mask of an answer without its reasoning; an answer cut in its reasoning has nothing else."""
    if end in said:
        start = said.index(end) + 1
    else:
        start = len(said) if answer.get("reasoning") and not answer["text"] else 0
    return [i >= start for i in range(len(said))]


def render(
    prompts: pd.DataFrame,
    tokenizer: PreTrainedTokenizerBase,
    out_dir: Path,
    *,
    max_length: int,
    train_reasoning: bool = True,
    template: dict[str, Any] | None = None,
) -> pd.DataFrame:
    """The data set's own answers (off-policy), as the target's chat template renders them; columns as `collect`.

    Rows that the template cannot show exactly are left out and counted (`report`). A set made of the same
    conversations in the same way is not made again. The text is nobody's greedy choice, so `temperature` is 1.
    Raises TooFewAnswers when no row is left.
    """
    made_of = files.digest(
        [
            [list(prompts.prompt_id), list(prompts.split)],
            str(tokenizer.chat_template),
            tokenizer.get_vocab(),
            max_length,
            train_reasoning,
            template,
            [files.digest(list(messages)) for messages in prompts.messages],
        ]
    )
    if (out_dir / FILE).exists() and (earlier := load(out_dir)).attrs.get("made_of") == made_of:
        return earlier
    known, report, rows = Template(tokenizer, template), Report(), []
    sampling = {"max_tokens": 0, "temperature": 1.0, "top_p": 1.0, "seed": 0}
    for prompt in runs.progress(prompts.to_dict("records"), "tokens", total=len(prompts)):
        try:
            tools = json.loads(prompt.get("tools") or "[]")
            found = tokenise(known, list(prompt["messages"]), tools, train_reasoning)
        except BadRow as error:
            report.add(error.kind, f"{prompt['prompt_id']}: {error.what}")
            continue
        answers = [turn["content"] for turn in prompt["messages"] if turn["role"] == "assistant"]
        for number, row in enumerate(found):
            last = {"text": answers[row.turn if len(found) > 1 else -1], "finish_reason": "stop", "model": ""}
            rows += kept({**prompt, **last, **sampling, "origin": "dataset"}, row, max_length, report)
            for note in row.notes:
                report.add(note, f"{prompt['prompt_id']}, row {number}", kept=True)
    return written(rows, report, out_dir, made_of)


def kept(prompt: dict[str, Any], row: Tokens, max_length: int, report: Report) -> list[dict[str, Any]]:
    """The row cut to `max_length`, or none (counted) when too few trained tokens are left of it."""
    ids, mask = row.input_ids[:max_length], row.loss_mask[:max_length]
    if sum(mask) < FEWEST:
        long = len(row.input_ids) > max_length and sum(row.loss_mask) >= FEWEST
        where = f"{prompt['prompt_id']}: {len(row.input_ids)} tokens"
        report.add("nothing trained within max_length" if long else "answer of less than two tokens", where)
        return []
    truncated = len(row.input_ids) > max_length
    if truncated:
        report.add("cut at max_length", f"{prompt['prompt_id']}: {len(row.input_ids)} tokens", kept=True)
    elif prompt["finish_reason"] == "length":
        report.add("answer cut at max_tokens", prompt["prompt_id"], kept=True)
    name = f"{prompt['prompt_id']}-{row.turn}" if row.turn else prompt["prompt_id"]
    opening = before_answer(prompt["messages"], row.turn)
    columns = {
        "prompt_id": name,
        "messages": opening,
        "prompt": opening[-1]["content"],
        "input_ids": ids,
        "loss_mask": mask,
        "seq_len": len(ids),
        "prompt_tokens": mask.index(True),
        "answer_tokens": sum(mask),
        "finish_reason": "length" if truncated else prompt["finish_reason"],
        "truncated": truncated,
        "turn": row.turn,
    }
    return [{**prompt, **columns}]


def before_answer(messages: list[dict[str, Any]], turn: int) -> list[dict[str, Any]]:
    """The messages before answer number `turn`."""
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: places[turn]] if turn < len(places) else messages


def written(rows: list[dict[str, Any]], report: Report, out_dir: Path, made_of: str = "") -> pd.DataFrame:
    """The frame of all rows, saved; raises TooFewAnswers when there is none."""
    if not rows:
        raise TooFewAnswers(
            f"no conversation has an answer to train on; the commonest reason: {report.commonest()}",
            "raise max_model_len or max_tokens; a data set without answers needs answers=target",
        )
    frame = pd.DataFrame(rows)
    frame.attrs = {"report": report.rows, "made_of": made_of}
    files.write_parquet(out_dir / FILE, frame)
    return frame


def load(dataset_dir: Path) -> pd.DataFrame:
    """The data set that `collect` or `render` wrote; raises BrokenFile, also where columns hold other things."""
    frame = files.read_parquet(path := dataset_dir / FILE)
    try:
        if "messages" in frame:
            frame["messages"] = [[turn_of(turn) for turn in messages] for messages in frame.messages]
        if {"input_ids", "loss_mask"} <= {*frame}:
            refuse_uneven(frame)
    except (TypeError, ValueError) as error:
        raise files.BrokenFile(f"{path} is no data set ({error})", f"delete {path} and run again") from error
    return frame


def turn_of(value: Any) -> dict[str, Any]:
    """A stored turn of a conversation; raises TypeError for anything else."""
    if not isinstance(value, Mapping):
        raise TypeError(f"a turn of its messages is {value!r:.60}")
    return without_none(value)


def refuse_uneven(frame: pd.DataFrame) -> None:
    """Raise ValueError where a row's loss mask is not as long as its tokens."""
    apart = frame.input_ids.map(len) != frame.loss_mask.map(len)
    if apart.any():
        raise ValueError(f"row {apart.idxmax()}: the loss mask is not as long as the tokens")
