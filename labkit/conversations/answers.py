"""The target answers the prompts through its server, turn by turn; each answer is kept as it comes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pandas as pd

from labkit import files
from labkit.conversations.asking import everything, opened, post
from labkit.conversations.forms import Messages
from labkit.conversations.store import Store, is_sound
from labkit.engine import bounds
from labkit.errors import LabError


class TooFewAnswers(LabError):
    """The server refused so many requests that what is left is no data set."""


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; all of it stands in the data set and decides which stored answers can be used."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """As the chat API takes it."""
        return vars(self).copy()


@dataclass(frozen=True)
class Dialogue:
    """One prompt's conversation with the target: which turns it has to say, and which it has said."""

    prompt_id: str
    messages: Messages
    tools: list[dict[str, Any]]
    model_key: str
    sampling: Sampling
    template: dict[str, Any] = field(default_factory=dict)

    @property
    def places(self) -> list[int]:
        """Where the target speaks: for each answer the number of messages before it."""
        own = [i for i, turn in enumerate(self.messages) if turn["role"] == "assistant"]
        return own if self.messages[-1]["role"] == "assistant" else [*own, len(self.messages)]

    def key(self, turn: int, history: Messages) -> str:
        """The name of an answer in the store."""
        parts: list[Any] = [self.model_key, self.sampling.options, self.prompt_id]
        if turn or self.template:
            parts += [turn, history, self.template]
        return files.digest(parts)

    def walk(self, store: Store) -> tuple[list[dict[str, Any]], tuple[str, Messages] | None]:
        """The answers that the store has, and key and messages of the next one to ask for (None: all said).

        Later turns follow the target's own answers, reasoning included; where the result of a tool follows, the
        data set's call stays in the history, because the result is that call's. A cut answer ends it all, and
        so does a refused one after the first.
        """
        history: Messages = []
        said: list[dict[str, Any]] = []
        for turn, place in enumerate(self.places):
            history += self.messages[len(history) : place]
            key = self.key(turn, history)
            answer = store.rows.get(key)
            if answer is None or ("error" in answer and not said):
                return said, (key, history)
            if "error" in answer:  # a later turn that no longer fits: the conversation ends before it
                break
            said.append(answer)
            if answer["finish_reason"] != "stop":
                break
            kept = place + 1 < len(self.messages) and self.messages[place + 1]["role"] == "tool"
            history.append(self.messages[place] if kept else spoken(answer))
        return said, None

    def body(self, history: Messages) -> dict[str, Any]:
        """The request for the next answer. Calls are wanted as the target writes them: no parser has a say."""
        body = {"messages": history, "return_token_ids": True, **self.sampling.options}
        if self.tools:
            body |= {"tools": self.tools, "tool_choice": "none"}
        return body | ({"chat_template_kwargs": self.template} if self.template else {})


def spoken(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer as a message of the history, its reasoning kept."""
    reasoning = answer.get("reasoning")
    return {"role": "assistant", "content": answer["text"]} | ({"reasoning": reasoning} if reasoning else {})


def dialogues(
    prompts: pd.DataFrame, model_key: str, sampling: Sampling, template: dict[str, Any] | None = None
) -> list[Dialogue]:
    """A dialogue for each prompt, in order."""
    tools = prompts["tools"] if "tools" in prompts else [""] * len(prompts)
    return [
        Dialogue(prompt_id, list(messages), json.loads(text) if text else [], model_key, sampling, template or {})
        for prompt_id, messages, text in zip(prompts.prompt_id, prompts.messages, tools, strict=True)
    ]


def generate(
    prompts: pd.DataFrame,
    server: Any,
    store_path: Path,
    *,
    model_key: str,
    sampling: Sampling,
    concurrency: int = 32,
    template: dict[str, Any] | None = None,
) -> list[list[dict[str, Any]]]:
    """The target's answers to every prompt, in order, a list of turns each; only what is missing is asked for.

    `server` as `asking.opened` takes it: a call that starts one is only made when something is missing.
    `model_key` tells one target from another in the store. A prompt whose first answer was refused has an empty
    list. Raises ServerLost, TooFewAnswers, DiskFull.
    """
    store = Store(store_path)
    known = dialogues(prompts, model_key, sampling, template)
    wanted = [(dialogue, len(dialogue.places) - len(said)) for dialogue, said, _ in missing(known, store)]
    if wanted:
        store_path.parent.mkdir(parents=True, exist_ok=True)
        with opened(server) as running:
            everything(
                [dialogue for dialogue, _ in wanted],
                lambda client, dialogue: converse(client, running, dialogue, store),
                running,
                store,
                concurrency=concurrency,
                total=sum(turns for _, turns in wanted),
                name="answers",
            )
    refuse_if_broken(known, store)
    return [dialogue.walk(store)[0] for dialogue in known]


def missing(dialogues: list[Dialogue], store: Store) -> list[tuple[Dialogue, list[dict[str, Any]], str]]:
    """The dialogues that are not at their end, with what was said and the key of the next answer."""
    walked = [(dialogue, *dialogue.walk(store)) for dialogue in dialogues]
    return [(dialogue, said, following[0]) for dialogue, said, following in walked if following]


def converse(client: httpx.Client, server: Any, dialogue: Dialogue, store: Store) -> None:
    """Ask for one dialogue's missing turns; each is stored before anything else can go wrong."""
    _, following = dialogue.walk(store)
    while following:
        key, history = following
        reply = post(
            client, f"{server.base_url}/chat/completions", {"model": server.model, **dialogue.body(history)}
        )
        answer = reply if "error" in reply else understood(reply, server)
        store.add({"key": key, **answer})
        if "error" in answer:
            return
        _, following = dialogue.walk(store)


def understood(reply: dict[str, Any], server: Any) -> dict[str, Any]:
    """What the store keeps of a chat completion; raises NoAnswer, and LabError where it gives no token ids."""
    try:
        answer = read(reply, server)
    except (LookupError, TypeError, AttributeError):
        raise bounds.no_answer(server.base_url, reply) from None
    if not answer["prompt_token_ids"] or answer["token_ids"] is None:
        raise LabError(
            f"the server at {server.base_url} returns no token ids",
            "use vLLM 0.11 or newer as the server: tokens and loss masks have to be exact",
        )
    if not is_sound(answer):
        raise bounds.no_answer(server.base_url, reply)
    return answer


def read(reply: dict[str, Any], server: Any) -> dict[str, Any]:
    """What a chat completion says; raises as Python does for one of another shape."""
    choice = reply["choices"][0]
    said = choice["message"]
    reasoning = said.get("reasoning") or said.get("reasoning_content")
    return {
        "prompt_token_ids": reply.get("prompt_token_ids"),
        "token_ids": choice.get("token_ids"),
        "finish_reason": choice["finish_reason"],
        "text": said.get("content") or "",
        "model": reply.get("model") or server.model,
    } | ({"reasoning": reasoning} if reasoning else {})


def refuse_if_broken(dialogues: list[Dialogue], store: Store) -> None:
    """Raise TooFewAnswers when half of the prompts or more were refused or answered with nothing."""
    bad = [(said, key) for _, said, key in missing(dialogues, store) if not said]
    empty = sum(not answers[0]["token_ids"] for d in dialogues if (answers := d.walk(store)[0]))
    if 2 * (len(bad) + empty) >= len(dialogues):
        reason = store.rows.get(bad[0][1], {}).get("error") if bad else "the answers are empty"
        raise TooFewAnswers(
            f"{len(bad) + empty} of {len(dialogues)} prompts got no answer; the first reason: {reason}",
            "lower max_tokens or raise max_model_len, or look into the server's log",
        )
