"""The n-gram simulation against vLLM itself: its proposer token for token, and the counters of a real server.

The server is that of another process, which is killed at last, as a notebook's kernel may be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from labkit import acceptance, bench, engine, ngram

SOAK = os.environ.get("LABKIT_SOAK") == "1"
LOOKUPS = [{"k": 4, "lookup_max": 3, "lookup_min": 1}]
if SOAK:  # three configurations over 40 prompts: about five minutes
    LOOKUPS = [
        {"k": 5, "lookup_max": 4, "lookup_min": 1},
        {"k": 5, "lookup_max": 4, "lookup_min": 4},
        {"k": 3, "lookup_max": 2, "lookup_min": 2},
    ]

OWNER = """
import json, sys, time
from pathlib import Path
from labkit import engine
options = {"log_dir": Path(sys.argv[1]), "max_model_len": 1024, **json.loads(sys.argv[2])}
with engine.serve("smollm2", "ngram", **options) as server:
    print("ready", server.process.pid, server.base_url, flush=True)
    time.sleep(3600)
"""


def test_equal_to_vllm_s_own_proposer() -> None:
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as theirs

    rng = np.random.default_rng(0)
    for _ in range(200):
        tokens = rng.integers(0, rng.integers(2, 6), rng.integers(1, 60)).astype(np.int32)
        k, longest = int(rng.integers(1, 7)), int(rng.integers(1, 6))
        shortest = int(rng.integers(1, longest + 1))
        recording = ngram.Recordings.of([(tokens, [])], longest)
        starts = recording.proposals(longest, shortest)
        for end in range(1, len(tokens) + 1):
            start = starts[end]
            ours = [] if start < 0 else tokens[start : start + min(k, end - start)].tolist()
            assert ours == theirs(tokens[:end], shortest, longest, 100_000, k).tolist()


@pytest.fixture(scope="module", params=LOOKUPS, ids=lambda lookup: "-".join(map(str, lookup.values())))
def lookup(request) -> dict[str, int]:
    return request.param


@pytest.fixture(scope="module")
def folder(lookup, log_dir) -> Path:
    return log_dir / "-".join(map(str, lookup.values()))


@pytest.fixture(scope="module")
def owner(lookup, folder) -> Iterator[subprocess.Popen]:
    """A process that serves as a notebook's kernel does."""
    names = {"k": "num_speculative_tokens", "lookup_max": "prompt_lookup_max", "lookup_min": "prompt_lookup_min"}
    options = {names[name]: value for name, value in lookup.items()}
    words = [sys.executable, "-c", OWNER, str(folder), json.dumps(options)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def served(owner) -> tuple[psutil.Process, engine.Server]:
    """Its server's supervisor, and the server attached to."""
    line = next(line for line in owner.stdout if "ready " in line)
    pid, url = line.rsplit("ready ", 1)[1].split()
    return psutil.Process(int(pid)), engine.attach(url)


@pytest.fixture(scope="module")
def measured(served, lookup):
    _, server = served
    before = acceptance.snapshot(server)
    rows = bench.run(server, bench.prompts(per_category=5 if SOAK else 1), max_tokens=48, repeats=1, warmup=0)
    return rows, acceptance.between(before, acceptance.snapshot(server)), lookup


def test_every_request_replays_as_the_engine_counted(measured) -> None:
    """Drafts and drafted tokens exactly; accepted ones but for those beyond the end of the output.

    The last step of a request may accept tokens that the budget cuts off: at each position at most one more.
    """
    rows, _, lookup = measured
    assert rows["error"].isna().all()
    for row in rows.to_dict("records"):
        replayed = ngram.simulate(row["prompt_token_ids"], row["output_token_ids"], **lookup)
        assert (replayed.drafts, replayed.drafted) == (row["drafts"], row["drafted"])
        assert replayed.steps >= row["chunks"] - 1  # a busy server sends two steps in one chunk
        beyond = np.subtract(row["accepted_at"], replayed.accepted_at)
        assert set(beyond) <= {0, 1}
        assert beyond.sum() == row["accepted"] - replayed.accepted


def test_requests_add_up_to_the_server_s_counters(measured) -> None:
    rows, whole, _ = measured
    pooled = acceptance.from_rows(rows)
    assert (pooled.drafts, pooled.drafted, pooled.accepted_at) == (whole.drafts, whole.drafted, whole.accepted_at)
    assert pooled.tokens == whole.tokens


def test_a_killed_owner_leaves_no_server(owner, served, folder) -> None:
    """kill -9 of the process that serves. Last here."""
    supervisor, _ = served
    everything = [supervisor, *supervisor.children(recursive=True)]
    assert len(everything) >= 4, "supervisor, API server, engine core and worker"
    owner.kill()
    owner.wait()
    _, left = psutil.wait_procs(everything, timeout=40)
    assert not left
    assert json.loads((folder / "server-ngram.launch.json").read_text())["owner"] == owner.pid
