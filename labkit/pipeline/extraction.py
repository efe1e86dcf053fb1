"""Hidden states of notebook 04: written, checked, and waited for where several workers write them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from labkit import extract
from labkit.errors import LabError
from labkit.pipeline.servers import extract_server, layers, serving
from labkit.settings import Eagle3Pipeline
from labkit.targets import Target


class UnusableStates(LabError):
    """Extracted states do not belong to their tokens, so a head trained on them would be useless."""


def states(settings: Eagle3Pipeline, target: Target) -> Path:
    """Hidden states of the data set (extract.run); a server starts if any file is missing.

    Where the training computes its states itself, files of the held-out conversations alone, to measure on.
    """
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
        split=split_on_disk(settings),
        backend=settings.states_backend,
    )
    if settings.shard:
        await_other_shards(settings, out)
    return out


def split_on_disk(settings: Eagle3Pipeline) -> str:
    """The split whose states are stored; empty for all."""
    return "held_out" if settings.states_from == "on-the-fly" else ""


def checked(settings: Eagle3Pipeline, target: Target, out: Path) -> pd.DataFrame:
    """extract.verify over the run's states; raises UnusableStates with the first problem where there is one."""
    asked = [*layers(settings, target), target.geometry.num_hidden_layers]
    problems = extract.verify(out, layers=asked, split=split_on_disk(settings))
    refuse(problems)
    return problems


def await_other_shards(settings: Eagle3Pipeline, out: Path) -> None:
    """Check this worker's part and raise extract.ShardDone unless every other part is there, too."""
    split = split_on_disk(settings)
    refuse(extract.verify(out, shard=settings.shard, split=split))
    if done := extract.shard_done(settings.folder / "data", out, settings.shard, split):
        raise done


def refuse(problems: pd.DataFrame) -> None:
    """Raise UnusableStates with the first of extract.verify's problems."""
    if len(problems):
        first = problems.iloc[0]
        raise UnusableStates(
            f"{len(problems)} problems with the hidden states; row {first['row']}: {first['check']} is "
            f"{first['value']} (limit {first['limit']})",
            str(first["remedy"]),
        )
