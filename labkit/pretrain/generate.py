"""Conversations with SmolLM2 through vLLM in this process, for as many seconds as there are."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from labkit import files
from labkit.pretrain import prompts

# No top_p and no seed a request: either costs the sampler far more than the model itself at 512 streams.
ANSWER = {"temperature": 0.7, "max_tokens": 320}
PROMPT = {"temperature": 1.0, "max_tokens": 72}
CHUNK_S = 40.0  # a chunk's last answers run alone: long chunks keep that share small
OWN_SHARE = 0.08  # of the time goes into prompts that SmolLM2 makes up
SYSTEM = "You are a curious person who asks a helpful assistant one short question."
SHORT = {
    "role": "system",
    "content": "You are a helpful assistant. You answer in a few short and simple sentences.",
}
TALE = {"role": "system", "content": "You tell short and simple stories that a small child understands."}
# How SmolLM2 is told to answer; the corpus keeps the user's words and the answer alone. Its own manner rambles,
# which a model of this size cannot follow; the templated prompts keep it, for the sake of longer texts.
MANNER = {"tale": [TALE], "plain": [SHORT], "own": [SHORT]}


def run(
    model: Path, out_dir: Path, *, seconds: float, streams: int, seed: int, report: Callable[[str], None]
) -> None:
    """Write out_dir/generated-SEED-NN.parquet: kind, prompt, answer, finished, tokens; a file a chunk.

    Stops about `seconds` after its call, the engine's start included; chunks that were written stay whatever
    happens. `streams` answers are written at a time. Another seed adds to what is there.
    """
    until = time.monotonic() + seconds
    engine = Engine(model, streams, seed)
    report(f"engine ready, {until - time.monotonic():.0f} s left")
    own = engine.make_prompts(until - (1 - OWN_SHARE) * (until - time.monotonic()))
    report(f"{len(own)} prompts of SmolLM2's own")
    wanted, size = prompts.stream(own or prompts.templated(), seed), 2 * streams
    for number in itertools.count():
        started = time.monotonic()
        chunk = engine.answer(list(itertools.islice(wanted, size)))
        files.write_parquet(out_dir / f"generated-{seed}-{number:02d}.parquet", chunk)
        took, left = time.monotonic() - started, until - time.monotonic()
        report(f"chunk {number}: {len(chunk)} answers, {chunk.tokens.sum() / took:.0f} tok/s, {left:.0f} s left")
        size = int(len(chunk) / took * min(CHUNK_S, left - 1))
        if size < streams / 2:
            return


class Engine:
    """vLLM in this process, with SmolLM2's chat form."""

    def __init__(self, model: Path, streams: int, seed: int) -> None:
        """Start it; about a minute on a GPU."""
        from transformers import AutoTokenizer
        from vllm import LLM

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.llm = LLM(model=str(model), dtype="bfloat16", max_model_len=1024, max_num_seqs=streams, seed=seed)
        self.streams = streams

    def generate(self, texts: Sequence[str], options: dict[str, Any]) -> list[tuple[str, bool, int]]:
        """(text, whether it ended by itself, tokens) of each text, which holds its special tokens."""
        from vllm import SamplingParams

        ids = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        inputs = [{"prompt_token_ids": row} for row in ids]
        # Text is made at the end, many at a time: token by token it would hold up the engine, which shares a core.
        params = SamplingParams(**options, detokenize=False)
        done = [output.outputs[0] for output in self.llm.generate(inputs, params, use_tqdm=False)]
        made = self.tokenizer.batch_decode([output.token_ids for output in done], skip_special_tokens=True)
        return [
            (text.strip(), output.finish_reason == "stop", len(output.token_ids))
            for text, output in zip(made, done, strict=True)
        ]

    def make_prompts(self, until: float) -> list[str]:
        """Different user messages that SmolLM2 makes up after the template's prefix, until a moment."""
        opening = self.tokenizer.apply_chat_template(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "\0"}], tokenize=False
        ).split("\0")[0]
        found: dict[str, None] = {}
        while not found or time.monotonic() < until:
            made = self.generate([opening] * self.streams * 2, PROMPT)
            found |= dict.fromkeys(text for text, ended, _ in made if ended and prompts.usable(text))
            if not found:
                break
        return list(found)

    def answer(self, asked: Sequence[tuple[str, str]]) -> pd.DataFrame:
        """The answers to (kind, prompt), a row each."""
        texts = [
            self.tokenizer.apply_chat_template(
                [*MANNER.get(kind, ()), {"role": "user", "content": prompt}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for kind, prompt in asked
        ]
        rows = [
            (*asked_for, *answered)
            for asked_for, answered in zip(asked, self.generate(texts, ANSWER), strict=True)
        ]
        return pd.DataFrame(rows, columns=["kind", "prompt", "answer", "finished", "tokens"])
