"""No room on the disk or in memory: said, and nothing lost."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from labkit import bench, files
from labkit.bench.journal import Journal
from labkit.conversations.store import Store
from labkit.extract import forms
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
