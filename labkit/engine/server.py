"""A server as the notebooks use it: started for a variant and surely stopped, or attached to by its address."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from labkit import settings, targets
from labkit.engine import diagnosis, holders, launch, supervisor, urls, variants
from labkit.errors import LabError
from labkit.progress import Waiting

START_LIMIT_S = 900.0
BETWEEN = holders.Between()  # what the last server of this process has to have given back


class EngineFailed(LabError):
    """A server did not come up."""


class EngineDied(LabError):
    """A server that was up ended by itself."""


class PortInUse(LabError):
    """The port that was asked for is taken."""


class ServerUnreachable(LabError):
    """Nothing answers at the address that was given."""


class BadTensorParallel(LabError):
    """The model's heads cannot be dealt out to that many ranks."""


@dataclass
class Server:
    """An OpenAI-compatible server. `process` is None where the lab did not start it."""

    base_url: str
    model: str
    variant: str = "attached"
    options: dict[str, Any] = field(default_factory=dict)
    log_path: Path | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def root_url(self) -> str:
        """The address without /v1."""
        return urls.root_url(self.base_url)

    @property
    def metrics_url(self) -> str:
        """Where its Prometheus text is."""
        return f"{self.root_url}/metrics"

    def alive(self) -> bool:
        """Whether it runs (an attached one: whether it answers)."""
        if self.process is not None:
            return self.process.poll() is None
        return bool(models_at(self.base_url))

    def check(self) -> None:
        """Raise EngineDied, with the end of the log and the likely cause, when it no longer runs."""
        if self.alive():
            return
        if self.process is None or self.log_path is None:
            raise EngineDied(f"the server at {self.base_url} no longer answers", "start it again, then run again")
        reason, remedy = diagnosis.cause(self.log_path, self.process.returncode)
        raise EngineDied(
            f"the {self.variant} server ended by itself ({reason}); the end of {self.log_path}:\n"
            f"{diagnosis.tail(self.log_path)}",
            f"{remedy}. What was finished stays and is used on the next run",
        )

    def stop(self) -> None:
        """Stop it with every process it started; returns when they are gone."""
        if self.process is None or self.process.poll() is not None:
            return
        BETWEEN.leaving(supervisor.tree(self.process.pid))
        self.process.send_signal(signal.SIGTERM)  # the supervisor ends the whole process tree
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def entries_at(url: str) -> dict[str, dict[str, Any]]:
    """What a server lists, by the models' names, the first one first; empty where nothing that is one answers."""
    try:
        return {str(entry["id"]): dict(entry) for entry in urls.get(f"{url}/models").json()["data"]}
    except (httpx.HTTPError, ValueError, LookupError, TypeError, RecursionError):
        return {}


def entry_at(url: str, model: str = "") -> dict[str, Any]:
    """What a server lists of a model, or of its first one; empty where it has none, or does not answer."""
    entries = entries_at(url)
    return entries.get(model, {}) if model else next(iter(entries.values()), {})


def models_at(url: str) -> list[str]:
    """The model names that a server lists; empty where nothing answers."""
    return list(entries_at(url))


def attach(url: str, model: str | None = None) -> Server:
    """A server that is already there; `url` in any of the forms that people type.

    Raises ServerUnreachable when no OpenAI-compatible server answers, or when it does not have `model`.
    """
    base = urls.base_url(url)
    names = models_at(base)
    if not names:
        raise ServerUnreachable(
            f"no OpenAI-compatible server answers at {base}/models",
            "check that it is up and no longer loading (a large model takes minutes), that the address is right "
            "(http://host:port), and the key in LABKIT_API_KEY if it wants one",
        )
    if model and model not in names:
        raise ServerUnreachable(f"the server at {base} has no model {model!r}", f"it has {', '.join(names)}")
    return Server(base, model or names[0])


@contextlib.contextmanager
def serve(
    target: targets.Target | str | Path,
    variant: str = "baseline",
    *,
    log_dir: Path | str | None = None,
    start_limit_s: float = START_LIMIT_S,
    **overrides: Any,
) -> Iterator[Server]:
    """Serve a target with vLLM on loopback for as long as the block runs, whatever happens in it.

    `overrides` are options of the variant (labkit.engine.variants); a `head` may be a directory, a shipped name or
    a hub id, and where none is given it is the target's shipped one. The log: `log_dir`/server-<variant>.log.
    Raises EngineFailed (with the log's end and the likely cause), PortInUse, BadTensorParallel, UnknownVariant,
    GpuMemoryHeld (naming the processes on the GPU), draft.NoHead.
    """
    target = target if isinstance(target, targets.Target) else targets.resolve(target)
    options = variants.options_of(variant, overrides | head_of(target, variant, overrides))
    check_tensor_parallel(target, options["tensor_parallel_size"])
    server = launch_server(target, variant, options, Path(log_dir or settings.outputs() / "servers"))
    try:
        wait_ready(server, start_limit_s)
        yield server
    finally:
        server.stop()


def head_of(target: targets.Target, variant: str, overrides: dict[str, Any]) -> dict[str, str]:
    """{"head": its directory} for a variant that drafts with one; raises draft.NoHead."""
    if not any("head" in each.options for each in variants.lineage(variant)):
        return {}
    from labkit import draft  # torch, which the other variants need not wait for

    return {"head": str(draft.locate(str(overrides.get("head") or ""), target=target.name))}


class OnDemand:
    """A server that starts when somebody first asks for it: nobody waits for one that reused results need not."""

    def __init__(
        self, stack: contextlib.ExitStack, start: Callable[[], contextlib.AbstractContextManager[Server]]
    ):
        """Keep how to start it and whose end ends it."""
        self._stack, self._start = stack, start
        self._server: Server | None = None

    def get(self) -> Server:
        """The running server, started now if it is not yet."""
        if self._server is None:
            self._server = self._stack.enter_context(self._start())
        return self._server


@contextlib.contextmanager
def on_demand(
    target: targets.Target | str | Path, variant: str = "baseline", *, url: str = "", **options: Any
) -> Iterator[OnDemand]:
    """Like `serve`, but the server starts at the first `.get()`; with `url` that server is attached to instead."""
    start = (lambda: contextlib.nullcontext(attach(url))) if url else (lambda: serve(target, variant, **options))
    with contextlib.ExitStack() as stack:
        yield OnDemand(stack, start)


def check_tensor_parallel(target: targets.Target, size: int) -> None:
    """Raise BadTensorParallel, naming the sizes that would do, unless the heads divide by `size`."""
    possible = target.geometry.tensor_parallel_sizes(max(64, size))
    if size not in possible:
        raise BadTensorParallel(
            f"tensor_parallel_size={size} does not fit {target.name}: "
            f"{target.geometry.num_attention_heads} attention and {target.geometry.num_key_value_heads} KV heads",
            f"use one of {', '.join(map(str, possible))}"
            + (", or the padded target smollm2-tp2" if target.name == "smollm2" else ""),
        )


def launch_server(target: targets.Target, variant: str, options: dict[str, Any], log_dir: Path) -> Server:
    """Start the process, once the last one's GPU memory is back; the server is not ready yet.

    Raises EngineFailed, PortInUse, GpuMemoryHeld.
    """
    if not (launch.on_cpu() or launch.installed("vllm")):
        raise EngineFailed("no vLLM is installed in this environment", "run `make setup`, then `labkit doctor`")
    BETWEEN.settle()
    if options["port"] and launch.port_taken(options["port"]):
        raise PortInUse(
            f"port {options['port']} is in use on this machine", "leave `port` at 0 or name another one"
        )
    port = options["port"] or launch.free_port()
    for folder in (log_dir, *variants.storage_of(options)):
        folder.mkdir(parents=True, exist_ok=True)
    words = launch.command(target.path, target.name, variant, port, options)
    log_path = log_dir / f"server-{variant}.log"
    extra = launch.environment(options) | variants.environment_of(variant, options)
    process = started(words, extra, log_path)
    return Server(f"http://127.0.0.1:{port}/v1", target.name, variant, options, log_path, process)


def started(words: list[str], extra: dict[str, str], log_path: Path) -> subprocess.Popen[bytes]:
    """The started process; an interrupt while it starts, when nobody holds it yet, leaves none behind."""
    before = set(psutil.Process().children())
    try:
        return launch.start(words, extra, log_path)
    except BaseException:
        for child in set(psutil.Process().children()) - before:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
        raise


def wait_ready(server: Server, limit_s: float) -> None:
    """Wait for /health with a progress line; raises EngineFailed when the server ends or time runs out."""
    waiting = Waiting(f"starting the {server.variant} server")
    while True:
        if server.process is not None and server.process.poll() is not None:
            waiting.done("failed")
            raise failure(server, f"ended while starting, after {waiting.seconds:.0f} s")
        if waiting.seconds > limit_s:
            waiting.done("too slow")
            raise failure(server, f"was not ready after {limit_s:.0f} s")
        if answers(server.root_url):
            waiting.done("ready")
            return
        waiting.tick()
        time.sleep(0.5)


def answers(root_url: str) -> bool:
    """Whether /health answers 200."""
    try:
        asked = httpx.get(f"{root_url}/health", timeout=5, trust_env=False, verify=urls.trusted(False))
        return asked.status_code == 200
    except httpx.HTTPError:
        return False


def failure(server: Server, what: str) -> EngineFailed:
    """The error for a server that did not come up, from its log."""
    log = server.log_path
    assert log is not None
    reason, remedy = diagnosis.cause(log, server.process.returncode if server.process else None)
    error = diagnosis.last_error(log)
    return EngineFailed(
        f"the {server.variant} server {what}. Likely cause: {reason}."
        + (f" It said: {error}" if error else "")
        + f"\nThe end of {log}:\n{diagnosis.tail(log)}",
        remedy,
    )
