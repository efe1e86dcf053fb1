"""The servers that notebook 04 starts: one that answers, one that writes hidden states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from labkit import engine, extract
from labkit.settings import Eagle3Pipeline
from labkit.targets import Geometry, Target


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


@contextlib.contextmanager
def plain_server(settings: Eagle3Pipeline, target: Target) -> Iterator[engine.OnDemand]:
    """The server that answers, started when it is first asked for: calibration and answers share it."""
    with contextlib.ExitStack() as stack:
        yield engine.OnDemand(stack, partial(serve, settings, target, "baseline"))


def layers(settings: Eagle3Pipeline, target: Target) -> tuple[int, ...]:
    """The layers that the head reads."""
    return extract.layers_of(settings.aux_layers, target.geometry.num_hidden_layers)


def extract_server(target: Target, out: Path, ids: str | Sequence[int], **options: Any) -> Any:
    """A call that starts a server for the states of these layers, its staging folder beside `out`."""
    extract.refuse_flags(target, options)
    given = {"log_dir": out.parent} | extracting(target.geometry, out, ids) | options
    return partial(engine.serve, target, "extract", **given)


def extracting(geometry: Geometry, out: Path, ids: str | Sequence[int]) -> dict[str, Any]:
    """What the server that writes hidden states has besides: the layers and a folder."""
    count = geometry.num_hidden_layers
    return {"layers": [*extract.layers_of(ids, count), count], "storage": out.with_name("staging")}
