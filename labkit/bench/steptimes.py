"""How long a decode step takes that works on n tokens: the cost side of every prediction about speculation."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit import engine, files, targets
from labkit.bench.conditions import CONDITIONS, engine_version, identity
from labkit.bench.measure import measure_variant
from labkit.bench.run import run

COLUMNS = ["n", "step_ms", "low_ms", "high_ms", "samples"]
EDGE = 4  # tokens at both ends of a stream that are left out: others may still be prefilling, or done
TOKENS = {"smoke": 24, "demo": 48, "full": 96}
PROMPT = "Write the numbers from {n} on, in words, one after the other:"


def step_times(
    server: Any, ns: Iterable[int], *, tokens: int = 48, model: str | None = None, repeats: int = 2
) -> pd.DataFrame:
    """Median time of a step that works on n tokens: n step_ms low_ms high_ms (quartiles) samples.

    n greedy streams decode side by side, so that every step has n tokens; a step's time is the gap between a
    stream's tokens. A step that verifies n tokens of *one* request differs in attention, which reads one
    request's cache instead of n, and in a mixture of experts, where neighbouring tokens share experts (r(n) of
    notebook 03): read it as the cost of n tokens of independent requests. Works with any OpenAI-compatible
    server that streams token by token and has room for n requests; raises what `bench.run` raises.
    """
    rows = []
    for n in sorted(set(ns)):
        prompts = [PROMPT.format(n=i) for i in range(1, n + 1)]
        options = {"max_tokens": tokens, "repeats": repeats, "concurrency": n, "warmup": 1, "model": model}
        answers = run(server, prompts, variant=f"{n} tokens a step", extra_body={"ignore_eos": True}, **options)
        inner = [gaps[EDGE:-EDGE] for gaps in answers["gaps_ms"].dropna()]
        low, middle, high = np.quantile(np.concatenate(inner), [0.25, 0.5, 0.75])
        rows.append({"n": n, "step_ms": middle, "low_ms": low, "high_ms": high, "samples": sum(map(len, inner))})
    return pd.DataFrame(rows, columns=COLUMNS)


def measure_baseline(settings: Any, prompts: pd.DataFrame, longest: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The baseline's rows and its step times for n = 1 to `longest`; both from disk where they fit.

    One server serves both, the settings' own or attached one; it starts only where something has to be measured.
    """
    options = {"log_dir": settings.folder, "max_model_len": settings.max_model_len}
    options["max_num_seqs"] = max(64, settings.concurrency)
    target = (settings.server and settings.target) or targets.resolve(settings.target)
    with engine.on_demand(target, "baseline", url=settings.server, **options) as server:
        rows = measure_variant(settings, "baseline", prompts, server=server)
        times = kept(settings, server, longest)
    return rows, times


def kept(settings: Any, server: engine.OnDemand, longest: int) -> pd.DataFrame:
    """Step times from the stage's folder, else measured now."""
    conditions = {name: getattr(settings, name) for name in CONDITIONS if hasattr(settings, name)}
    where = [settings.server, identity(settings.server, settings.model) if settings.server else None]
    digest = files.digest([conditions, where, settings.scale, longest, engine_version()])
    path = Path(settings.folder) / "measured" / f"step-times-{digest}.parquet"
    if path.exists() and not os.environ.get("LABKIT_FORCE"):
        return files.read_parquet(path)
    times = step_times(
        server.get(), range(1, longest + 1), tokens=TOKENS[settings.scale], model=settings.model or None
    )
    files.write_parquet(path, times)
    return times
