"""Prompts and answers of notebook 04, and what of them repeats other prompts."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import pandas as pd

from labkit import bench, conversations, engine
from labkit.pipeline.servers import serve
from labkit.settings import Eagle3Pipeline
from labkit.targets import Target

PLENTY = 200_000  # rows of a data set are enough to choose from, unless more than half as many are wanted
SPARE_PROMPTS = 8  # of those that the target writes, for what turns out to repeat the benchmark's


def prompts(settings: Eagle3Pipeline, target: Target) -> pd.DataFrame:
    """Everything that can be trained on, without the benchmark's prompts and what nearly repeats them.

    With prompts="self" the target writes them (conversations.synthesise); a server starts if any is missing.
    """
    wanted = settings.num_prompts + settings.held_out
    if settings.prompts != "self":
        most = PLENTY if 2 * wanted <= PLENTY else 0
        known = conversations.prompts(settings.prompts, most, settings.seed)
    else:
        known = conversations.synthesise(
            partial(serve, settings, target, "baseline"),
            target.tokenizer(),
            settings.folder / "data" / "prompts.jsonl",
            count=wanted + SPARE_PROMPTS,
            model_key=target.revision,
            seed=settings.seed,
            concurrency=settings.concurrency,
        )
    return conversations.without_copies(known, bench.prompts("benchmark"))


def copies(chosen: pd.DataFrame) -> str:
    """In words, how many held-out prompts a training prompt nearly repeats: these are easier than new ones."""
    parts = {name: chosen[chosen.split == name] for name in ("train", "held_out")}
    found = conversations.near_copies(parts["train"], parts["held_out"], share=0.8)
    if found.empty:
        return "No training prompt nearly repeats a held-out one."
    return (
        f"{found.prompt_id.nunique()} of {len(parts['held_out'])} held-out prompts share at least 80% of their "
        f"five-word runs with a training prompt (the nearest: {found.text[0][:80]!r} and "
        f"{found.train_text[0][:80]!r}): what is measured on them flatters the head."
    )


def answers(
    settings: Eagle3Pipeline,
    target: Target,
    prompts: pd.DataFrame,
    server: engine.OnDemand | None = None,
    *,
    folder: Path | None = None,
    max_tokens: int = 0,
) -> pd.DataFrame:
    """The answers to `prompts` as a data set: the target's own (a server starts if any is missing) or theirs.

    `server`: one that runs or starts on demand and stays; without it one starts and ends here.
    """
    out_dir, max_length = folder or settings.folder / "data", settings.max_model_len - 1
    if settings.answers == "dataset":
        return conversations.render(
            prompts,
            target.tokenizer(),
            out_dir,
            max_length=max_length,
            train_reasoning=settings.train_reasoning,
        )
    own = partial(serve, settings, target, "baseline")
    return conversations.collect(
        prompts,
        (lambda: contextlib.nullcontext(server.get())) if server else own,
        out_dir,
        model_key=target.revision,
        max_length=max_length,
        max_tokens=max_tokens or settings.max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=settings.seed,
        concurrency=settings.concurrency,
        tokenizer=None if settings.train_reasoning else target.tokenizer(),
        train_reasoning=settings.train_reasoning,
    )
