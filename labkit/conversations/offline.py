"""The target's own answers without a server: vLLM in this process, several such processes side by side.

On a GPU a small target is held up by the engine's Python, not by the card: six processes on one H200 answer
several times as fast as one. What they write is the same store that `answers.generate` reads, so notebook 04 with
the same prompts and sampling finds everything answered.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from labkit import files
from labkit.conversations import sources, synthesis
from labkit.conversations.answers import Dialogue, Sampling, dialogues
from labkit.conversations.forms import Messages
from labkit.conversations.store import Store
from labkit.targets import Target

PROMPT_TOKENS = 160  # longest prompt that the target writes
Job = tuple[str, list[int], dict[str, Any]]  # name, prompt ids, sampling


class Engine:
    """vLLM in this process, fed with requests as others end."""

    def __init__(self, target: Target, *, max_model_len: int, streams: int, cache_gb: float, seed: int) -> None:
        """Start it; about a minute. `cache_gb` is its KV cache on a GPU.

        Said, not measured: with several that start at once each would take the others' memory for its own.
        """
        import torch
        from vllm import LLM

        own = {"kv_cache_memory_bytes": int(cache_gb * 2**30), "gpu_memory_utilization": 0.05}
        self.llm = LLM(
            model=str(target.path),
            dtype="bfloat16",
            max_model_len=max_model_len,
            max_num_seqs=streams,
            seed=seed,
            disable_log_stats=True,
            **(own if torch.cuda.is_available() else {}),
        ).llm_engine
        self.streams = streams

    def run(self, jobs: Iterator[Job], done: Callable[[str, list[int], str], Job | None], until: float) -> None:
        """Work off the jobs until a moment (time.monotonic); `done` gets name, ids and finish reason of each.

        It may give a job that follows at once: the next turn. What is unfinished at the moment is given up.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        running: set[str] = set()

        def add(job: Job) -> None:
            name, ids, options = job
            # Text is made later, many at a time: token by token it would hold up the engine, which shares a core.
            params = SamplingParams(**options, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
            self.llm.add_request(name, {"prompt_token_ids": ids}, params)
            running.add(name)

        for job in itertools.islice(jobs, self.streams):
            add(job)
        while running and time.monotonic() < until:
            for output in self.llm.step():
                if output.finished:
                    running.discard(output.request_id)
                    answer = output.outputs[0]
                    following = done(output.request_id, list(answer.token_ids), str(answer.finish_reason))
                    for job in [following] if following else itertools.islice(jobs, 1):
                        add(job)
        if running:
            self.llm.abort_request(list(running))


def prompts(engine: Engine, target: Target, count: int, *, seed: int, until: float) -> pd.DataFrame:
    """Up to `count` prompts that the target writes itself, as `synthesis.synthesise` has them."""
    tokenizer = target.tokenizer()
    opening = synthesis.opening(tokenizer)
    options = {"max_tokens": PROMPT_TOKENS, "temperature": 1.0, "stop_token_ids": opening.stop_token_ids}
    options |= {"stop": opening.stop} if opening.stop else {}
    ids: list[list[int]] = []

    def done(_name: str, tokens: list[int], reason: str) -> None:
        if reason == "stop":
            ids.append([token for token in tokens if token not in opening.stop_token_ids])

    engine.run(iter([(f"own-{seed}-{i}", opening.prompt, options) for i in range(count)]), done, until)
    texts = [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
    kept = dict.fromkeys(text for text in texts if len(text) >= synthesis.FEWEST_CHARACTERS)
    rows = [sources.row("self", files.digest(text), [{"role": "user", "content": text}]) for text in kept]
    return pd.DataFrame(rows, columns=sources.COLUMNS)


def answer(
    engine: Engine, target: Target, chosen: pd.DataFrame, store: Store, sampling: Sampling, until: float
) -> int:
    """Answer `chosen` turn by turn into the store until all are done or a moment has come; tokens written."""
    tokenizer = target.tokenizer()
    known = {dialogue.prompt_id: dialogue for dialogue in dialogues(chosen, target.revision, sampling)}
    options = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p}
    asked: dict[str, tuple[str, list[int]]] = {}
    written = 0

    def job(dialogue: Dialogue) -> Job | None:
        _, following = dialogue.walk(store)
        if following is None:
            return None
        key, history = following
        ids = rendered(tokenizer, history, dialogue.tools)
        if len(ids) + sampling.max_tokens >= engine.llm.model_config.max_model_len:
            return None
        asked[dialogue.prompt_id] = (key, ids)
        return dialogue.prompt_id, ids, options

    def done(name: str, tokens: list[int], reason: str) -> Job | None:
        nonlocal written
        key, ids = asked.pop(name)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        row = {"prompt_token_ids": ids, "token_ids": tokens, "finish_reason": reason, "text": text}
        store.add({"key": key, **row, "model": target.name})
        written += len(tokens)
        return job(known[name])

    engine.run((found for dialogue in known.values() if (found := job(dialogue))), done, until)
    return written


def rendered(tokenizer: Any, history: Messages, tools: list[dict[str, Any]]) -> list[int]:
    """The ids that a server would give the target for these messages."""
    found = tokenizer.apply_chat_template(
        history, tools=tools or None, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    return list(found)


def finished(chosen: pd.DataFrame, store: Store, target: Target, sampling: Sampling) -> pd.DataFrame:
    """Those of `chosen` that the store has whole."""
    whole = [dialogue.walk(store)[1] is None for dialogue in dialogues(chosen, target.revision, sampling)]
    return chosen[whole].reset_index(drop=True)


def write_prompts(path: Path, chosen: pd.DataFrame) -> None:
    """The prompts as `sources.read` reads them back, with the same ids."""
    lines = [
        json.dumps({"messages": list(row.messages), "category": row.category}, ensure_ascii=False)
        for row in chosen.itertuples()
    ]
    with files.atomic(path) as scratch:
        scratch.write_text("\n".join(lines) + "\n", encoding="utf-8")
