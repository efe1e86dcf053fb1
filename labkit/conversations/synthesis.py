"""Prompts that the target writes itself: after the beginning of a user's turn it goes on as a user would."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pandas as pd

from labkit import files
from labkit.conversations import sources
from labkit.conversations.asking import everything, opened, post
from labkit.conversations.forms import Report
from labkit.conversations.store import WRITTEN, Store, is_sound
from labkit.conversations.template import SENTINEL, Template
from labkit.conversations.tokens import encode
from labkit.engine import bounds
from labkit.errors import LabError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEWEST_CHARACTERS = 8
TRIES = 4  # requests for each prompt wanted, at most: what a target cannot do it will not do later


class NoSynthesis(LabError):
    """The target does not write enough usable prompts by itself."""


@dataclass(frozen=True)
class Opening:
    """The text of the template up to where a user begins to write: its ids, and what ends the turn."""

    prompt: list[int]
    stop_token_ids: list[int]
    stop: list[str]


def opening(tokenizer: PreTrainedTokenizerBase, template: dict[str, Any] | None = None) -> Opening:
    """A target's user prefix from its chat template; raises NoSynthesis where the template has none."""
    known = Template(tokenizer, template)
    before, found, after = known.render([{"role": "user", "content": SENTINEL}], None).partition(SENTINEL)
    if not found or not before:
        raise NoSynthesis("the chat template has no user prefix", "give prompts by a file or a data set")
    ends = [token for token in known.specials if after.lstrip().startswith(token)]
    ids = {tokenizer.convert_tokens_to_ids(token) for token in ends} | {tokenizer.eos_token_id} - {None}
    return Opening(encode(tokenizer, before)[0], sorted(ids), [] if ends else [after.strip() or "\n"])


def synthesise(
    server: Any,
    tokenizer: PreTrainedTokenizerBase,
    store_path: Path,
    *,
    count: int,
    model_key: str = "",
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_tokens: int = 256,
    seed: int = 0,
    concurrency: int = 32,
) -> pd.DataFrame:
    """`count` or more different prompts by the target, columns as `sources.read` has them (category "self").

    Request number i is drawn with seed `seed` + i. What `store_path` has is not asked for again, and no server is
    started when it is enough. Prompts that were cut off, doubled or nearly empty are left out and counted
    (`report`). Raises NoSynthesis, ServerLost, DiskFull.
    """
    store = Store(store_path, WRITTEN)
    body = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, **vars(opening(tokenizer))}
    keys = [files.digest([model_key, body, seed + i]) for i in range(TRIES * count)]
    asked = next((n for n in range(len(keys), 0, -1) if keys[n - 1] in store.rows), 0)
    frame = usable(keys[:asked], store)
    if len(frame) < count:
        store_path.parent.mkdir(parents=True, exist_ok=True)
        with opened(server) as running:
            while len(frame) < count:
                asked = min(len(keys), asked + wanted(count, frame, asked))
                jobs = [(key, seed + i) for i, key in enumerate(keys[:asked]) if key not in store.rows]
                if not jobs:
                    break
                everything(
                    jobs,
                    lambda client, job: ask(client, running, body, job, store),
                    running,
                    store,
                    concurrency=concurrency,
                    total=len(jobs),
                    name="prompts",
                )
                frame = usable(keys[:asked], store)
    if len(frame) < count:
        raise NoSynthesis(
            f"{len(frame)} usable prompts of {asked} that the target wrote, {count} wanted; left out: "
            f"{sources.report(frame).set_index('kind')['rows'].to_dict()}",
            "raise temperature or max_tokens, lower num_prompts, or give prompts by a file",
        )
    return frame


def wanted(count: int, frame: pd.DataFrame, asked: int) -> int:
    """How many more requests should bring what is missing, from how many were usable so far."""
    missing = count - len(frame)
    return int(missing * max(1.0, asked / max(1, len(frame))) * 1.1) + 8


def ask(client: httpx.Client, server: Any, body: dict[str, Any], job: tuple[str, int], store: Store) -> None:
    """One prompt, stored as it comes."""
    key, seed = job
    reply = post(client, f"{server.base_url}/completions", {"model": server.model, **body, "seed": seed})
    if "error" in reply:
        raise NoSynthesis(
            f"the server at {server.base_url} refuses: {reply['error']}", "look into the server's log"
        )
    try:
        choice = reply["choices"][0]
        row = {"key": key, "text": choice["text"], "finish_reason": choice["finish_reason"]}
    except (LookupError, TypeError) as error:
        raise bounds.no_answer(server.base_url, reply) from error
    if not is_sound(row, WRITTEN):
        raise bounds.no_answer(server.base_url, reply)
    store.add(row)


def usable(keys: list[str], store: Store) -> pd.DataFrame:
    """The prompts among what was written, in order of asking."""
    report = Report()
    rows: dict[str, dict[str, Any]] = {}
    for number, key in enumerate(keys):
        if key not in store.rows:
            continue
        answer = store.rows[key]
        text = answer["text"].strip()
        same = re.sub(r"\W+", " ", text.lower()).strip()
        if answer["finish_reason"] != "stop":
            report.add("cut off", f"request {number}: {text}")
        elif len(same) < FEWEST_CHARACTERS:
            report.add("nearly empty", f"request {number}: {text!r}")
        elif same in rows:
            report.add("doubled", f"request {number}: {text}")
        else:
            rows[same] = sources.row("self", files.digest(same), [{"role": "user", "content": text}])
    frame = pd.DataFrame(list(rows.values()), columns=sources.COLUMNS)
    frame.attrs["report"] = report.rows
    return frame
