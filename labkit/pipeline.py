"""What notebook 04 says of its own steps: the estimate before, the vocabulary, the costs and the answer after."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit import bench, conversations, engine, extract, files, train, vocab
from labkit.acceptance import Acceptance
from labkit.errors import LabError
from labkit.planner import calibration, here, trial
from labkit.planner.work import Work
from labkit.settings import Eagle3Pipeline
from labkit.targets import Geometry, Target
from labkit.vocab import VocabMap

PROMPT_TOKENS = 45  # of a templated prompt with its chat template, about
PLENTY = 200_000  # rows of a data set are enough to choose from, unless more than half as many are wanted
SPARE_PROMPTS = 8  # of those that the target writes, for what turns out to repeat the benchmark's


class UnusableStates(LabError):
    """Extracted states do not belong to their tokens, so a head trained on them would be useless."""


class ShardsMissing(LabError):
    """This worker's part of the states is done; training needs the others' parts, too."""


@dataclass(frozen=True)
class Estimate:
    """What a run will need at most: tokens of all conversations, tokens trained on, bytes of states."""

    tokens: int
    trained_tokens: int
    disk_bytes: int


def estimate(settings: Eagle3Pipeline, target: Target) -> Estimate:
    """The most that the settings can ask for: every answer as long as allowed.

    Raises BadLayers, BadVocabulary, UnknownForm, UnknownBackend or BadShard where the settings do not fit the
    target, DoesNotFit where disk or memory will not do, with what would: before anything is spent.
    """
    layers(settings, target)
    extract.check_choices(settings.hidden_states, settings.states_backend, settings.shard)
    vocab.refuse_impossible(np.ones(target.geometry.vocab_size), settings.draft_vocab_size, [])
    work, memory = work_of(settings), here.free_memory_gb()
    here.refuse(here.obstacles_here(target.geometry, work, settings.folder, free_memory=memory))
    disk = extract.bytes_needed([work.tokens], 4, target.geometry.hidden_size, form=settings.hidden_states)
    return Estimate(work.tokens, settings.num_prompts * work.length * settings.epochs, disk)


def work_of(settings: Eagle3Pipeline) -> Work:
    """The most that the settings can ask for, as the planner counts it."""
    return Work(
        conversations=settings.num_prompts + settings.held_out,
        prompt_tokens=PROMPT_TOKENS,
        answer_tokens=max(1, min(settings.max_tokens, settings.max_model_len - 1 - PROMPT_TOKENS)),
        epochs=settings.epochs,
        ttt_steps=settings.ttt_steps,
        draft_vocab_size=settings.draft_vocab_size,
        batch_tokens=settings.batch_tokens,
        streams=settings.concurrency,
        item_bytes=1 if settings.hidden_states == "fp8" else 2,
    )


def describe(expected: Estimate) -> str:
    """The estimate in words."""
    return (
        f"At most {expected.tokens:,} tokens to generate and extract, {expected.disk_bytes / 1e9:.2f} GB of "
        f"hidden states on disk, {expected.trained_tokens:,} tokens to train on over all epochs. Heads trained on "
        "a few hundred conversations reach acceptance lengths of about 1.5 to 1.8 on prompts of their own kind, "
        "published heads with a thousand times the data 2.3 to 3.3: expect the former here."
    )


def serve(settings: Eagle3Pipeline, target: Target, variant: str, **options: Any) -> Any:
    """A server of the pipeline's: its log lies in the stage's folder."""
    return engine.serve(
        target,
        variant,
        log_dir=settings.folder,
        **serving(settings),
        **options,
    )


def serving(settings: Eagle3Pipeline) -> dict[str, Any]:
    """What the settings say of every server that is started here."""
    return {
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.concurrency,
        "tensor_parallel_size": settings.tensor_parallel_size,
    }


def extracting(settings: Eagle3Pipeline, geometry: Geometry) -> dict[str, Any]:
    """What the server that writes hidden states has besides: the layers and a folder."""
    ids = extract.layers_of(settings.aux_layers, geometry.num_hidden_layers)
    return {"layers": [*ids, geometry.num_hidden_layers], "storage": settings.folder / "staging"}


@contextlib.contextmanager
def plain_server(settings: Eagle3Pipeline, target: Target) -> Iterator[engine.OnDemand]:
    """The server that answers, started when it is first asked for: calibration and answers share it."""
    with contextlib.ExitStack() as stack:
        yield engine.OnDemand(stack, partial(serve, settings, target, "baseline"))


def calibrate(
    settings: Eagle3Pipeline, target: Target, prompts: pd.DataFrame, server: engine.OnDemand
) -> pd.DataFrame:
    """Measure generation, prefill and training here on a few conversations, and forecast this run by it.

    A row a step (calibration.forecast). What was measured is kept in the stage's folder; with the same settings
    nothing is measured again and no server starts. Empty where the data set brings its answers: nothing is
    generated then.
    """
    if settings.answers == "dataset":
        return pd.DataFrame(columns=["step", "predicted_s_low", "predicted_s", "predicted_s_high"])
    few = prompts.head(min(settings.concurrency, settings.num_prompts))
    decides = ("max_tokens", "temperature", "concurrency", "draft_vocab_size", "ttt_steps", "batch_tokens")
    values = {name: getattr(settings, name) for name in (*decides, "max_model_len", "tensor_parallel_size")}
    found = calibration.kept(
        settings.folder / "calibration.json",
        files.digest([values, len(few), target.revision]),
        lambda: calibration.measure(
            lambda folder, limit: answers(settings, target, few, server, folder=folder, max_tokens=limit),
            server.get,
            partial(trial_training, settings, target),
            scratch=settings.folder / "calibration",
            max_tokens=settings.max_tokens,
            prompts=len(few),
        ),
    )
    return calibration.forecast(
        found,
        train=settings.num_prompts,
        held_out=settings.held_out,
        epochs=settings.epochs,
        max_length=settings.max_model_len - 1,
    )


def trial_training(settings: Eagle3Pipeline, target: Target, folder: Path) -> pd.DataFrame:
    """The metrics of a short training on states of random numbers, as the calibration wants them."""
    length = min(work_of(settings).length, 512)
    count = calibration.TRAINED_CONVERSATIONS
    data, hidden = trial.write(folder, target.geometry, conversations=count, length=length, seed=settings.seed)
    train.run(
        dataclasses.replace(settings, epochs=1),
        target=target,
        dataset_dir=data,
        hidden_dir=hidden,
        vocab=vocab.build(np.ones(target.geometry.vocab_size, dtype=np.int64), settings.draft_vocab_size),
        out_dir=folder,
        layers=layers(settings, target),
    )
    return files.read_parquet(folder / "metrics.parquet")


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


def states(settings: Eagle3Pipeline, target: Target) -> Path:
    """Hidden states of the data set (extract.run); a server starts if any file is missing."""
    ids, out = layers(settings, target), settings.folder / "hidden_states"
    options = serving(settings)
    extract.run(
        settings.folder / "data",
        extract_server(target, out, ids, log_dir=settings.folder, **options),
        out,
        target=target,
        layers=ids,
        concurrency=settings.concurrency,
        form=settings.hidden_states,
        shard=settings.shard,
        backend=settings.states_backend,
    )
    if settings.shard:
        await_other_shards(settings, out)
    return out


def await_other_shards(settings: Eagle3Pipeline, out: Path) -> None:
    """Check this worker's part and raise ShardsMissing unless every other part is there, too."""
    refuse(extract.verify(out, shard=settings.shard))
    rows = len(conversations.load(settings.folder / "data"))
    missing = sum(not extract.states_path(out, row).exists() for row in range(rows))
    if missing:
        raise ShardsMissing(
            f"shard {settings.shard} is done and checked; {missing} of {rows} rows are other workers'",
            "run the other shards with the same run_id on a shared disk, then this notebook with shard empty",
        )


def extract_server(target: Target, out: Path, ids: str | Sequence[int], **options: Any) -> Any:
    """A call that starts a server for the states of these layers, its staging folder beside `out`."""
    extract.refuse_flags(target, options)
    count = target.geometry.num_hidden_layers
    given = {"layers": [*extract.layers_of(ids, count), count], "storage": out.with_name("staging")}
    return partial(engine.serve, target, "extract", **{"log_dir": out.parent} | given | options)


def layers(settings: Eagle3Pipeline, target: Target) -> tuple[int, ...]:
    """The layers that the head reads."""
    return extract.layers_of(settings.aux_layers, target.geometry.num_hidden_layers)


def head(
    settings: Eagle3Pipeline,
    target: Target,
    mapping: VocabMap,
    watch: train.Watcher | None = None,
    stop: train.Flag | None = None,
) -> Path:
    """The trained head's directory (train.run), the vocabulary saved beside it.

    training.json beside the data says the same to `accelerate launch -m labkit.train`, for more devices than one.
    """
    folder, ids = settings.folder, layers(settings, target)
    places = {"dataset_dir": folder / "data", "hidden_dir": folder / "hidden_states", "out_dir": folder}
    mapping.save(folder / "vocab")
    train.write_job(folder / "training.json", settings, vocab_dir=folder / "vocab", layers=ids, **places)
    return train.run(settings, target=target, vocab=mapping, layers=ids, watch=watch, stop=stop, **places)


def elsewhere(settings: Eagle3Pipeline, target: Target, mapping: VocabMap, processes: int = 1) -> dict[str, str]:
    """The commands that train the same head on a machine with GPUs: the lab's loop and speculators' trainer."""
    folder = settings.folder
    places = {"dataset_dir": folder / "data", "hidden_dir": folder / "hidden_states", "out_dir": folder}
    ids = layers(settings, target)
    return {
        "labkit": train.launch_command(folder / "training.json", processes),
        "speculators": train.speculators_command(
            settings, target=target, vocab=mapping, layers=ids, processes=processes, **places
        ),
    }


def refuse(problems: pd.DataFrame) -> None:
    """Raise UnusableStates with the first of extract.verify's problems."""
    if len(problems):
        first = problems.iloc[0]
        raise UnusableStates(
            f"{len(problems)} problems with the hidden states; row {first['row']}: {first['check']} is "
            f"{first['value']} (limit {first['limit']})",
            str(first["remedy"]),
        )


def counts(dataset: pd.DataFrame, target: Target, split: str) -> np.ndarray:
    """Answer tokens of one split by id: int64 [target vocabulary]."""
    return conversations.token_counts(dataset, target.geometry.vocab_size, split)


def vocabulary(settings: Eagle3Pipeline, dataset: pd.DataFrame, target: Target) -> VocabMap:
    """The draft vocabulary of the training answers; special tokens of the target are always in it."""
    required = target.tokenizer().all_special_ids
    return vocab.build(counts(dataset, target, "train"), settings.draft_vocab_size, required)


def coverage(dataset: pd.DataFrame, target: Target, chosen_size: int) -> pd.DataFrame:
    """Share of answer tokens that a draft vocabulary of each size holds: draft_vocab_size split coverage."""
    full = target.geometry.vocab_size
    sizes = sorted({size for size in (1024, 2048, 4096, 8192, 16384, 32768, chosen_size, full) if size <= full})
    by_split = {split: counts(dataset, target, split) for split in ("train", "held_out")}
    maps = {size: vocab.build(by_split["train"], size) for size in sizes}
    rows = [
        {"draft_vocab_size": size, "split": split, "coverage": maps[size].coverage(tokens)}
        for size in sizes
        for split, tokens in by_split.items()
    ]
    return pd.DataFrame(rows)


def costs(
    dataset: pd.DataFrame, metrics: pd.DataFrame, laps: dict[str, float], forecast: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Seconds, tokens and tokens a second of each step in this run; a step that was taken up has few seconds.

    With `forecast` (calibrate's) what was predicted stands beside it: predicted_s with _low and _high.
    """
    tokens = {
        "answers": int(dataset.answer_tokens.sum()),
        "states": int(dataset.seq_len.sum()),
        "training": int(metrics.tokens.sum()),
    }
    rows = [{"step": name, "seconds": seconds, "tokens": tokens.get(name, 0)} for name, seconds in laps.items()]
    table = pd.DataFrame(rows)
    table = table.assign(tokens_per_s=table.tokens / table.seconds)
    if forecast is None:
        return table
    return table.merge(forecast[["step", "predicted_s_low", "predicted_s", "predicted_s_high"]], "left", "step")


def headline(
    dataset: pd.DataFrame, simulated: Acceptance, metrics: pd.DataFrame, mapping: VocabMap
) -> dict[str, Any]:
    """The scalars of run.json."""
    return {
        "acceptance_length_simulated": simulated.mean_length,
        "samples": int((dataset.split == "train").sum()),
        "answer_tokens": int(dataset.answer_tokens.sum()),
        "draft_vocab_size": mapping.draft_vocab_size,
        "final_loss": float(metrics.loss.tail(20).mean()),
        "training_seconds": float(metrics.seconds.max()),
    }


def conclusion(dataset: pd.DataFrame, simulated: Acceptance, metrics: pd.DataFrame, k: int) -> str:
    """The answer in words, with its limits."""
    best = metrics.acceptance_length.max()
    trained = int(metrics.tokens.sum())
    answer = "Yes" if simulated.mean_length >= 1.3 else "Not yet"
    return (
        f"{answer}: after {trained:,} tokens of training in {metrics.seconds.max():.0f} s its drafts are worth "
        f"**{simulated.mean_length:.2f}** tokens a step at k={k} on held-out prompts of the training kind (best "
        f"epoch {best:.2f}). That is simulated; the engine's own figure, and whether it pays, is the question of "
        f"notebook 05.\n\nLimits: {int((dataset.split == 'train').sum())} conversations of a few forms, "
        "greedy answers, one layer. More data helps before anything else does: where the held-out length falls "
        "while the loss still does, the head has begun to learn its data by heart."
    )
