"""`python -m labkit.conversations`: many prompts, answered in this process, gathered for a run of notebook 04."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from labkit import command, files, targets
from labkit.command import STARTED, report
from labkit.conversations import offline, sources, wide
from labkit.conversations.answers import Sampling
from labkit.conversations.dataset import collect, load
from labkit.conversations.store import Store
from labkit.errors import LabError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
SHORTEST, LONGEST = 300, 1800  # characters of a text that prompts are about
PROMPTS, ANSWERS = "prompts.jsonl", "answers.jsonl"


class NoTexts(LabError):
    """Prompts about texts are asked for, and no texts are given."""


class NoAnswers(LabError):
    """A folder is none that `answer` wrote, or no conversation of it was answered to its end."""


@app.command()
def prompts(
    out: Annotated[Path, typer.Argument(help="a .jsonl file")],
    count: Annotated[int, typer.Option("--wide", help="prompts of the grammar of many kinds")] = 40_000,
    templated: Annotated[bool, typer.Option(help="the templated ones, too")] = True,
    about: Annotated[int, typer.Option(help="prompts about texts, which are answers in DATA")] = 0,
    data: Annotated[Path | None, typer.Option(help="an earlier data set (its folder), for --about")] = None,
    target: Annotated[str, typer.Option(help="whose tokenizer wrote DATA")] = "smollm2",
    seed: int = 0,
) -> None:
    """Write the lab's own prompts."""
    parts = [wide.prompts(count, seed), *([sources.templated()] if templated else [])]
    parts += [wide.about(answered(data, target), about, seed)] if about else []
    frame = pd.concat(parts, ignore_index=True)
    offline.write_prompts(out, frame)
    report(f"{len(frame)} prompts in {out}: {frame.category.value_counts().to_dict()}")


def answered(data: Path | None, target: str) -> list[str]:
    """An earlier data set's answers that are long enough to say something about, and no longer than a page."""
    if data is None:
        raise NoTexts("--about asks for texts", "give --data, the folder of a data set whose answers they are")
    rows, tokenizer = load(data), targets.resolve(target).tokenizer()
    answers = [row.input_ids[row.prompt_tokens :] for row in rows.itertuples() if row.split == "train"]
    found = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return [text for text in found if SHORTEST <= len(text) <= LONGEST]


@app.command()
def answer(
    prompts: Annotated[Path, typer.Option(help="the prompts, as notebook 04 takes them")],
    out: Annotated[Path, typer.Option(help="folder for this part's prompts and answers; what is there is kept")],
    target: Annotated[str, typer.Option(help="a name, a local model directory, or a hub id")] = "smollm2",
    shard: Annotated[str, typer.Option(help="this process's part, as 1/6")] = "1/1",
    own: Annotated[int, typer.Option(help="prompts that the target writes itself, in this part")] = 0,
    seconds: Annotated[float, typer.Option(help="time for all of it, the engine's start included")] = 600.0,
    max_tokens: int = 512,
    max_model_len: int = 2048,
    temperature: float = 0.0,
    streams: Annotated[int, typer.Option(help="answers written at a time")] = 256,
    cache_gb: Annotated[float, typer.Option(help="KV cache of this process on a GPU, GiB")] = 8.0,
    seed: int = 0,
) -> None:
    """Answer a part of the prompts."""
    part, parts = map(int, shard.split("/"))
    until = STARTED + seconds
    served, sampling = targets.resolve(target), Sampling(max_tokens, temperature, 1.0, seed)
    chosen = sources.read(prompts).iloc[part - 1 :: parts]
    out.mkdir(parents=True, exist_ok=True)
    engine = offline.Engine(
        served, max_model_len=max_model_len, streams=streams, cache_gb=cache_gb, seed=seed + part
    )
    report(f"engine ready, {until - time.monotonic():.0f} s left")
    if own:
        written = offline.prompts(engine, served, own, seed=seed + part, until=until)
        report(f"{len(written)} prompts of the target's own")
        chosen = pd.concat([chosen, written], ignore_index=True)
    chosen = chosen.sample(frac=1.0, random_state=seed + part).reset_index(drop=True)
    offline.write_prompts(out / PROMPTS, chosen)
    store, started = Store(out / ANSWERS), time.monotonic()
    tokens = offline.answer(engine, served, chosen, store, sampling, until)
    report(f"{tokens:,} tokens, {tokens / (time.monotonic() - started):,.0f} tok/s")


@app.command()
def gather(
    parts: Annotated[list[Path], typer.Argument(help="the folders of `answer`'s parts")],
    run: Annotated[Path, typer.Option(help="the run's folder of notebook 04")],
    target: str = "smollm2",
    max_tokens: int = 512,
    temperature: float = 0.0,
    seed: int = 0,
) -> None:
    """Put the answers where notebook 04 looks for them, and beside them the prompts that have all of theirs."""
    sampling = Sampling(max_tokens, temperature, 1.0, seed)
    frame = finished(parts, target, sampling).drop_duplicates("prompt_id")
    with files.atomic(run / "data" / ANSWERS) as scratch, scratch.open("wb") as whole:
        for part in parts:
            whole.write((part / ANSWERS).read_bytes() + b"\n")
    offline.write_prompts(run / PROMPTS, frame)
    report(f"{len(frame)} prompts answered whole; notebook 04: prompts={run / PROMPTS}")


def finished(parts: list[Path], target: str, sampling: Sampling) -> pd.DataFrame:
    """The prompts of `answer`'s folders that have all their answers; raises NoAnswers where there are none."""
    for part in parts:
        missing = [name for name in (PROMPTS, ANSWERS) if not (part / name).is_file()]
        if missing:
            raise NoAnswers(
                f"{part} has no {' and no '.join(missing)}",
                "give the folders that `python -m labkit.conversations answer --out` wrote; leave out, or run "
                "again, a part that was stopped before its first answer",
            )
    served = targets.resolve(target)
    stores = [(sources.read(part / PROMPTS), Store(part / ANSWERS)) for part in parts]
    whole = [offline.finished(chosen, store, served, sampling) for chosen, store in stores]
    found = pd.concat(whole, ignore_index=True)
    if found.empty:
        raise NoAnswers(
            f"of {sum(len(chosen) for chosen, _ in stores)} prompts none is answered to its end by {target} at "
            f"{sampling.options}; {sum(len(store.rows) for _, store in stores)} answers are stored",
            "give --target, --max-tokens, --temperature and --seed as `answer` had them; or run it for longer",
        )
    return found


@app.command()
def dataset(
    part: Annotated[Path, typer.Argument(help="a folder of `answer`; dataset.parquet is written beside")],
    target: str = "smollm2",
    max_tokens: int = 512,
    max_model_len: int = 2048,
    temperature: float = 0.0,
    seed: int = 0,
) -> None:
    """A data set of one part's whole answers, all of it held out: something to measure heads on."""
    chosen = finished([part], target, Sampling(max_tokens, temperature, 1.0, seed))
    rows = collect(
        chosen.assign(split="held_out"),
        None,
        part,
        max_length=max_model_len - 1,
        model_key=targets.resolve(target).revision,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
    )
    report(f"{len(rows)} conversations, {int(rows.answer_tokens.sum()):,} answer tokens")


if __name__ == "__main__":
    command.run(app)
