"""No disk, no memory, a clock that is set, another lab in the same folder: said, and nothing lost."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest

from labkit import bench, files, settings
from labkit.bench.journal import Journal
from labkit.conversations.store import Store
from labkit.engine import supervisor
from labkit.engine.service import steps
from labkit.errors import LabError
from labkit.extract import forms
from labkit.progress import Waiting
from labkit.runs import Stage, stage
from labkit.runs.execute import alone
from tests.faults import phases
from tests.unit import kineto
from tests.unit.sse_server import ROLE, Reply, delta, serving, usage

ANSWER = [ROLE, delta(content="a"), 0.002, delta(content="b"), delta("stop"), usage(3)]
OPTIONS = {"max_tokens": 4, "repeats": 1, "warmup": 0, "model": "toy"}
ROW = {"key": "k", "prompt_token_ids": [1], "token_ids": [2], "text": "t" * 3000, "finish_reason": "stop"}


@pytest.fixture(params=["disk", "limit"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder with room for little: a tmpfs of its own where we may mount one, and a limit on a file's size."""
    if request.param == "limit":
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (64 << 10, before[1])
        )  # Python ignores SIGXFSZ: an error follows
        yield tmp_path
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return
    folder = tmp_path / "small"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs; the limit on a file's size is tried")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def frame(_number: int) -> pd.DataFrame:
    """Numbers that do not pack."""
    return pd.DataFrame({"x": np.random.default_rng(0).standard_normal(60_000)})


def figure() -> Any:
    """A picture of noise, which is large."""
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(figsize=(9, 9))
    axes.imshow(np.random.default_rng(0).random((900, 900)))
    plt.close(drawn)
    return drawn


def row(number: int) -> dict[str, Any]:
    """A row of the benchmark as far as the journal looks at it."""
    return {"concurrency": 1, "repeat": number, "prompt_id": "p" * 3000}


def many(add: Callable[[int], object]) -> None:
    """Rows one after the other until there is no room."""
    for number in range(400):
        add(number)


def states() -> dict[str, Any]:
    """Half a megabyte of hidden states."""
    import torch

    return {"hidden_states": torch.randn(64, 4, 1024).bfloat16(), "token_ids": torch.arange(64)}


def draw(path: Path) -> None:
    """A figure of a stage."""
    with files.atomic(path) as temporary:
        figure().savefig(temporary, format="png")


WRITES: dict[str, Callable[[Path], object]] = {
    "json": lambda path: files.write_json(path, list(range(100_000))),
    "parquet": lambda path: files.write_parquet(path, frame(0)),
    "states": lambda path: forms.save_states(path, states()),
    "states packed": lambda path: forms.save_states(path, states(), "zstd"),
    "figure": draw,
    "journal": lambda path: many(lambda n: Journal(path).append(row(n))),
    "answers": lambda path: many(lambda n: Store(path).add(ROW | {"key": str(n)})),
}


@pytest.mark.parametrize("kind", WRITES)
def test_a_full_disk_is_named_and_the_earlier_file_stays(full: Path, kind: str) -> None:
    path = full / "x"
    earlier = full / "earlier.json"
    files.write_json(earlier, {"a": 1})
    with pytest.raises(files.DiskFull, match=r"no room to write .*x") as failed:
        WRITES[kind](path)
    assert "free some space" in failed.value.remedy
    assert files.read_json(earlier) == {"a": 1}
    if kind == "journal":
        assert [row["repeat"] for row in Journal(path).rows()] == list(range(len(Journal(path).rows())))
    elif kind == "answers":
        assert list(Store(path).rows) == [str(n) for n in range(len(Store(path).rows))]
    else:
        assert not path.exists()
    assert {found.name for found in full.iterdir()} <= {"x", "earlier.json"}


def test_a_benchmark_on_a_full_disk_goes_on_once_there_is_room(full: Path) -> None:
    """Its journal has the rows that fitted; they are not measured again."""
    journal = full / "rows.jsonl"
    prompts = [
        {"id": f"{n}", "category": "c" * 9000, "messages": [{"role": "user", "content": "x"}]} for n in range(40)
    ]
    with serving(lambda *_: Reply(ANSWER)) as server:
        with pytest.raises(files.DiskFull, match=r"rows\.jsonl"):
            bench.run(server.url, prompts, journal=journal, **OPTIONS)
        kept, sent = len(Journal(journal).rows()), len(server.requests)
        assert 0 < kept < 40
        roomy = full.parent / "rows.jsonl"
        with raised_limit():
            roomy.write_bytes(journal.read_bytes())
            table = bench.run(server.url, prompts, journal=roomy, **OPTIONS)
    assert table["error"].isna().all()
    assert len(server.requests) - sent == 40 - kept


@contextlib.contextmanager
def raised_limit() -> Iterator[None]:
    """Without the limit on a file's size for a while."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("number", files.FULL)
def test_every_number_of_a_full_disk_is_one(tmp_path: Path, number: int) -> None:
    for error in (OSError(number, os.strerror(number)), RuntimeError(f"I/O error: xyz (os error {number})")):
        with pytest.raises(files.DiskFull), files.atomic(tmp_path / "x"):
            raise error
    assert not files.no_room(RuntimeError("(os error 281)"))
    assert not files.no_room(OSError(errno.EACCES, "no"))


LITTLE = """
import resource, sys
from pathlib import Path
from labkit import conversations, trace
from labkit.errors import LabError
import labkit.trace.model, pyarrow.parquet
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20),) * 2)
try:
    {work}
except LabError as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
"""


@pytest.mark.parametrize("kind", ["trace", "prompts"])
def test_too_little_memory_is_an_error_that_says_so(tmp_path: Path, kind: str) -> None:
    """A process that may take 24 MB more, and a file that needs several times that."""
    path = tmp_path / ("rank0.json" if kind == "trace" else "prompts.json")
    if kind == "trace":
        events = [kineto.event("cpu_op", f"op_{i}" * 6, 10.0 * i, 5.0, text=f"{i}" * 30) for i in range(120_000)]
        path.write_text(json.dumps({"traceEvents": events}))
        work = f"trace.load({str(path)!r})"
    else:
        path.write_text(json.dumps([{"prompt": f"{i} " * 40} for i in range(100_000)]))
        work = f"conversations.read({str(path)!r})"
    code = LITTLE.format(work=work)
    environment = phases.environment()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1, done.stderr[-600:]
    assert path.name in done.stderr
    assert "what to do" in done.stderr
    assert "Traceback" not in done.stderr


# Clocks

JUMPS = (3600.0, -3600.0, 10 * 365 * 86400.0, -1.7e9)


@pytest.mark.parametrize("jump", JUMPS)
def test_durations_are_those_of_a_clock_that_nobody_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """The wall clock is set in the middle of a stage, of a wait and of a benchmark."""
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    chosen = settings.NOTEBOOKS["02_ngram_baseline"].of({"run_id": "r"})
    made, waiting, real = Stage(chosen), Waiting("x"), time.time
    with serving(lambda *_: Reply(ANSWER)) as server:
        monkeypatch.setattr(time, "time", lambda: real() + jump)
        assert 0 <= made.lap("one") < 100
        assert 0 <= waiting.seconds < 100
        row = bench.run(server.url, ["hi"], **OPTIONS).iloc[0]
    assert 0 < row["ttft_ms"] < row["e2e_ms"] < 60_000
    told = files.read_json(made.finish({}))
    assert 0 <= told["seconds"] < 100
    assert (
        abs(datetime.fromisoformat(told["started"]).timestamp() - real()) < 600
    )  # when it began, not when it ended
    waiting.done("x")


@pytest.mark.parametrize("jump", JUMPS)
def test_a_set_clock_ends_no_server(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """The kernel's boot time, from which psutil counts a process's creation, moves with the clock."""
    me = os.getpid()
    since, created = supervisor.started(me), psutil.Process(me).create_time()
    real = psutil._psplatform.boot_time
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: real() + jump)
    assert abs(psutil.Process(me).create_time() - created - jump) < 1  # what a comparison of times would see
    assert supervisor.alive(me, since)
    assert not steps.older(me, steps.uptime() - 1e6)
    assert steps.older(1, steps.uptime())


def test_a_later_process_of_the_same_id_is_another(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    since = supervisor.started(child.pid)
    assert supervisor.alive(child.pid, since)
    boot, tick = since.split("/")
    assert int(tick) == supervisor.ticks(child.pid)
    assert not supervisor.alive(child.pid, f"{boot}/{int(tick) + 1}")
    assert not supervisor.alive(child.pid, f"{boot[::-1]}/{tick}")  # another boot
    child.kill()
    deadline = time.monotonic() + 20
    while supervisor.alive(child.pid, since):  # a zombie does not live
        assert time.monotonic() < deadline
    child.wait()
    assert not supervisor.alive(child.pid, since)
    with pytest.raises(psutil.NoSuchProcess):
        supervisor.started(child.pid)


# Two labs

HOLDING = """
import sys, time
from pathlib import Path
from labkit import settings
from labkit.runs import Stage
stage = Stage(settings.NOTEBOOKS["02_ngram_baseline"].of({"run_id": "r"}))
print("held", flush=True)
time.sleep(60)
"""


def test_two_labs_in_one_folder_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's kernel holds its stage: another kernel, or a headless run, is told; once it ends they may."""
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    monkeypatch.delenv("LABKIT_HEADLESS", raising=False)
    chosen = settings.NOTEBOOKS["02_ngram_baseline"].of({"run_id": "r"})
    other = subprocess.Popen([sys.executable, "-c", HOLDING], stdout=subprocess.PIPE, env=phases.environment())
    assert other.stdout is not None
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(stage.StageBusy, match="is writing to") as busy:
        Stage(chosen)
    assert "run_id" in busy.value.remedy
    with pytest.raises(stage.StageBusy), alone(chosen.folder):
        pytest.fail("two at once")
    other.send_signal(signal.SIGKILL)
    other.wait()
    made = Stage(chosen)
    assert Stage(chosen).folder == made.folder  # the first cell again, in the same kernel
    made.finish({})
    with alone(chosen.folder):
        pass
    monkeypatch.setenv("LABKIT_HEADLESS", "1")
    with alone(chosen.folder):
        Stage(chosen)  # the kernel of a headless run, whose lab holds the folder
    assert chosen.folder not in stage.HELD


def test_two_labs_that_answer_into_one_store_lose_no_line(tmp_path: Path) -> None:
    """Long rows from several processes at once: each is read whole."""
    code = "import sys; from pathlib import Path; from labkit.conversations.store import Store\n" + (
        "store = Store(Path(sys.argv[1]))\n"
        "for n in range(30): store.add({'key': f'{sys.argv[2]}-{n}', 'error': sys.argv[2] * 40_000})"
    )
    path = tmp_path / "answers.jsonl"
    words = [[sys.executable, "-c", code, str(path), name] for name in "abc"]
    labs = [subprocess.Popen(each, env=phases.environment()) for each in words]
    assert [lab.wait() for lab in labs] == [0, 0, 0]
    rows = Store(path).rows
    assert sorted(rows) == sorted(f"{name}-{n}" for name in "abc" for n in range(30))
    assert all(row["error"] == key[0] * 40_000 for key, row in rows.items())


def test_a_stage_of_its_own_in_each_of_two_labs(tmp_path: Path) -> None:
    """Extractions of one shard: the second lab is refused, not mixed in."""
    from labkit.extract import record

    out = tmp_path / "hidden_states"
    out.mkdir()
    code = (
        "import sys, time; from pathlib import Path; from labkit.extract import record\n"
        "with record.alone(Path(sys.argv[1]), ''): print(1, flush=True); time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(out)],
        stdout=subprocess.PIPE,
        env=phases.environment(),
    )
    assert other.stdout is not None
    assert other.stdout.readline()
    with pytest.raises(LabError, match="another process extracts"), record.alone(out, ""):
        pytest.fail("two at once")
    other.kill()
    other.wait()
    with record.alone(out, ""):
        pass
