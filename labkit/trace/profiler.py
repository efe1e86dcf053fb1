"""Traces of all ranks from a running vLLM: start its profiler, decode, stop, wait until the files are whole."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pandas as pd

from labkit.engine import bounds, urls
from labkit.progress import Waiting
from labkit.trace.errors import CaptureFailed
from labkit.trace.sources import FRONTEND, SUFFIXES
from labkit.trace.stream import Blocks

if TYPE_CHECKING:
    from labkit.engine import Server
    from labkit.settings import Profiling

PROMPT = "the time of a decode step goes to "  # repeated up to the length that is wanted
PLAIN_REQUESTS = 3  # the first of a server is often slow, and a median needs some
STOP_LIMIT_S = 900.0  # writing a trace takes about a third of a second a step and rank on two cores


def capture(
    server: Server,
    trace_dir: str | Path,
    *,
    decode_steps: int = 24,
    prompt_tokens: int = 32,
    ranks: int | None = None,
    plain_requests: int = 1,
    stop_limit_s: float = STOP_LIMIT_S,
) -> pd.DataFrame:
    """Profile one greedy streaming request of `decode_steps` decode steps; a row an output token.

    The server has to run with vLLM's torch profiler writing to `trace_dir` (variant "tp2-profile"; an attached
    one with --profiler-config). A warm-up and `plain_requests` requests of the same size run before the profiler
    starts. Returns when the files of all ranks (`ranks`, else the server's tensor-parallel size, else as many as
    come) are whole: profiled request token t_s gap_ms, the client's own view. Raises CaptureFailed.
    """
    folder = Path(trace_dir)
    expected = ranks or server.options.get("tensor_parallel_size", 0)
    before = {path: path.stat().st_mtime_ns for path in traces_in(folder)}
    plain = unprofiled(server, decode_steps, prompt_tokens, plain_requests)
    switch(server, "start_profile", 60)
    try:
        profiled = list(tokens(server, decode_steps, prompt_tokens))
    finally:
        waiting = Waiting("the engine writes its traces")
        switch(server, "stop_profile", stop_limit_s)
    wait_for_files(server, folder, before, expected, waiting, stop_limit_s)
    return pd.concat([plain, as_frame(profiled, True)], ignore_index=True)


def unprofiled(
    server: Server, decode_steps: int, prompt_tokens: int, requests: int = PLAIN_REQUESTS
) -> pd.DataFrame:
    """The client's view of a few requests one after the other, a warm-up before them left out."""
    list(tokens(server, 4, prompt_tokens))
    times = [list(tokens(server, decode_steps, prompt_tokens)) for _ in range(requests)]
    return pd.concat([as_frame(each, False, i) for i, each in enumerate(times)], ignore_index=True)


def as_frame(times: list[float], profiled: bool, request: int = 0) -> pd.DataFrame:
    """Arrival times of one request's tokens as a frame."""
    frame = pd.DataFrame({"profiled": profiled, "request": request, "token": range(len(times)), "t_s": times})
    frame["gap_ms"] = frame["t_s"].diff() * 1e3
    return frame


def obtain(settings: Profiling, folder: Path) -> tuple[Path, pd.DataFrame]:
    """The folder with the traces that notebook 01 analyses, and the client's view (empty for brought traces).

    `trace_dir` alone: traces that somebody brings. `server` and `trace_dir`: a running vLLM that profiles into
    that folder. Neither: the target is served under the profiler, and the traces go to `folder`/traces.
    Raises CaptureFailed, and what engine.serve and engine.attach raise.
    """
    from labkit import engine

    if settings.trace_dir and not settings.server:
        return Path(settings.trace_dir), as_frame([], False)
    if settings.server:
        if not settings.trace_dir:
            raise CaptureFailed(
                f"server={settings.server!r} without trace_dir: where its profiler writes is not known",
                "give the server's torch_profiler_dir, as seen from this machine, as trace_dir",
            )
        server = engine.attach(settings.server)
        ranks = settings.tensor_parallel_size
        return Path(settings.trace_dir), capture(server, settings.trace_dir, ranks=ranks, **sizes(settings))
    traces = folder / "traces"
    return traces, served(settings, "tp2-profile", settings.tensor_parallel_size, traces, folder)


def sizes(settings: Profiling) -> dict[str, int]:
    """What the settings say of the requests that `capture` sends."""
    requests = {"decode_steps": settings.decode_steps, "prompt_tokens": settings.prompt_tokens}
    return requests | {"plain_requests": PLAIN_REQUESTS}


def served(settings: Profiling, variant: str, ranks: int, traces: Path, log_dir: Path) -> pd.DataFrame:
    """Serve the target as a variant under the profiler and `capture` its traces, in place of those in `traces`."""
    from labkit import engine

    for old in traces.glob("*.json*"):
        old.unlink()
    options = {"trace_dir": traces, "tensor_parallel_size": ranks, "max_model_len": settings.max_model_len}
    with engine.serve(settings.target, variant, log_dir=log_dir, **options) as server:
        return capture(server, traces, **sizes(settings))


def switch(server: Server, what: str, limit_s: float) -> None:
    """POST /start_profile or /stop_profile; raises CaptureFailed with what to do when it does not work."""
    url = f"{server.root_url}/{what}"
    try:
        with httpx.Client(**urls.options(url), timeout=limit_s, event_hooks=bounds.HOOKS) as client:
            reply = client.post(url)
    except httpx.HTTPError as error:
        server.check()
        raise CaptureFailed(
            f"{url} did not answer ({error!r})", "see the server's log; profile fewer steps"
        ) from error
    if reply.status_code in (404, 405):
        raise CaptureFailed(
            f"the server at {server.root_url} has no profiler ({url}: {reply.status_code})",
            'start vLLM with --profiler-config \'{"profiler": "torch", "torch_profiler_dir": "/a/folder"}\'',
        )
    if reply.status_code != 200:
        raise CaptureFailed(f"{url} answered {reply.status_code}: {reply.text[:200]}", "see the server's log")


def tokens(server: Server, decode_steps: int, prompt_tokens: int) -> Iterator[float]:
    """Stream one greedy completion; yields the time (s, from the sending) of each output token's chunk.

    The first token comes from the prefill, so `decode_steps` + 1 tokens are asked for.
    """
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": " ".join([PROMPT] * (1 + prompt_tokens // len(PROMPT.split())))[: 5 * prompt_tokens].rstrip(),
        "max_tokens": decode_steps + 1,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    sent = time.perf_counter()
    try:
        with (
            httpx.Client(**urls.options(server.base_url), timeout=600, event_hooks=bounds.HOOKS) as client,
            client.stream("POST", f"{server.base_url}/completions", json=body) as reply,
        ):
            if reply.status_code != 200:
                text = reply.read().decode(errors="replace")[:300]
                raise CaptureFailed(f"the server refused the request ({reply.status_code}): {text}", "see its log")
            for line in reply.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                    yield time.perf_counter() - sent
    except (ValueError, AttributeError) as error:
        raise bounds.no_answer(server.base_url, line) from error
    except httpx.HTTPError as error:
        server.check()
        raise CaptureFailed(f"the stream broke off ({error!r})", "see the server's log, then run again") from error


def traces_in(folder: Path) -> list[Path]:
    """The workers' trace files in a folder."""
    found = [path for path in folder.glob("*.json*") if path.name.endswith(SUFFIXES)]
    return sorted(path for path in found if not FRONTEND.search(path.name))


def wait_for_files(
    server: Server, folder: Path, before: dict[Path, int], expected: int, waiting: Waiting, limit_s: float
) -> None:
    """Wait until every rank has written a new file and all are whole; raises CaptureFailed if they do not come."""
    sizes: dict[Path, int] = {}
    while True:
        new = [path for path in traces_in(folder) if before.get(path) != path.stat().st_mtime_ns]
        settled = {path: path.stat().st_size for path in new}
        if new and len(new) >= expected and settled == sizes and all(whole(path) for path in new):
            waiting.done(f"{len(new)} files")
            return
        sizes = settled
        if waiting.seconds > limit_s or not server.alive():
            waiting.done("failed")
            server.check()
            raise CaptureFailed(
                f"{len(new)} of {expected or 'some'} trace files came to {folder} within {limit_s:.0f} s",
                "the engine writes to its own torch_profiler_dir: name that folder, on this machine, as trace_dir",
            )
        waiting.tick()
        time.sleep(0.3)


def whole(path: Path) -> bool:
    """Whether a trace file is complete."""
    blocks, last = Blocks(path), b""
    for block in blocks:
        last = (last + block)[-64:]
    return not blocks.fault and last.rstrip().endswith(b"}")
