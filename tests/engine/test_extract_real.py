"""Extraction on a real vLLM: the states are Transformers' own, and kill -9 of whoever extracts loses nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from functools import partial

import pandas as pd
import pytest
import torch

from labkit import conversations, engine, extract, files, pipeline
from labkit.settings import Eagle3Pipeline

LAYERS = (2, 15, 27)
KILLS = 20 if os.environ.get("LABKIT_SOAK") else 3
ROWS = 8 * (KILLS + 1)
LIMIT_S = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("extract")


@pytest.fixture(scope="module")
def prompts():
    return conversations.split(conversations.templated(), ROWS - 4, 4, seed=0)


@pytest.fixture(scope="module")
def answered(server, prompts, folder) -> pd.DataFrame:
    """Greedy answers by the session's plain server."""
    return conversations.collect(prompts, server, folder / "data", max_length=256, max_tokens=24)


@pytest.fixture(scope="module")
def extracting(target, answered, folder, log_dir):
    options = {"layers": [*LAYERS, 30], "storage": folder / "staging", "max_model_len": 512, "max_num_seqs": 8}
    with engine.serve(target, "extract", log_dir=log_dir, **options) as running:
        yield running


@pytest.fixture(scope="module")
def states(target, answered, extracting, folder):
    """Extracted by two shards into one folder, one after the other."""
    for shard in ("1/2", "2/2"):
        extract.run(folder / "data", extracting, folder / "states", target=target, layers=LAYERS, shard=shard)
    return folder / "states"


def test_the_states_give_the_next_token_and_are_those_of_the_layers_asked_for(states, answered):
    problems = extract.verify(states, layers=[*LAYERS, 30], compare=True)
    assert problems.empty, problems.to_dict("records")
    assert problems.attrs["compared"] == ""
    assert problems.attrs["agreement"] > 0.95
    print(f"\nagreement of {len(answered)} answers: {problems.attrs['agreement']:.4f}")


def test_transformers_gives_the_same_states_and_the_same_files(states, answered, target, folder):
    shape = {"target": target, "layers": LAYERS, "shard": "1/4", "backend": "transformers"}
    out = extract.run(folder / "data", None, folder / "by_transformers", **shape)
    rows = list(extract.rows_of_shard("1/4", len(answered)))
    assert sorted(out.glob("hs_*")) == sorted(extract.states_path(out, row) for row in rows)
    for row in rows:
        ours, theirs = extract.states_path(out, row), extract.states_path(states, row)
        assert header(ours) == header(theirs)  # names, types, shapes, places
        mine, vllms = (extract.load_states(path)["hidden_states"].float() for path in (ours, theirs))
        apart = (mine - vllms).norm(dim=-1) / vllms.norm(dim=-1)  # [T, layers]
        assert apart.median() < 0.02
        assert apart.max() < 0.2
    assert extract.verify(out, shard="1/4").empty


def header(path) -> dict:
    """What a safetensors file says of itself."""
    with path.open("rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def test_smaller_forms_of_real_states(states, answered, target, folder):
    """Lossless saves over a tenth to the bit; FP8 halves, and its top tokens are the same ones."""
    sizes, same, count = dict.fromkeys(extract.FORMS, 0), 0, 0
    head = extract.final_head(target.path)
    for row in range(0, len(answered), 4):
        exact = extract.load_states(extract.states_path(states, row))
        for form in extract.FORMS:
            path = folder / "forms" / f"{form}.safetensors"
            extract.save_states(path, exact, form)
            sizes[form] += path.stat().st_size
            back = extract.load_states(path)["hidden_states"]
            if form != "fp8":
                assert torch.equal(back.view(torch.int16), exact["hidden_states"].view(torch.int16))
                continue
            error = (back.float() - exact["hidden_states"].float()).norm(dim=-1)
            assert (error / exact["hidden_states"].float().norm(dim=-1)).max() < 0.04
            hits = head.top1(back[:, -1]) == head.top1(exact["hidden_states"][:, -1])
            same, count = same + int(hits.sum()), count + len(hits)
    print(f"\nbytes {sizes}; FP8 keeps {same / count:.4f} of top-1 tokens")
    assert sizes["zstd"] < 0.9 * sizes["bf16"]
    assert sizes["fp8"] < 0.51 * sizes["bf16"]
    assert same > 0.9 * count


def test_the_pipelines_step_uses_what_is_there(states, folder, target, monkeypatch):
    """Notebook 04's path: the same folder, form and layers; no server is started for a finished set."""
    monkeypatch.setattr(Eagle3Pipeline, "folder", folder)
    (folder / "hidden_states").symlink_to(states)
    monkeypatch.setattr(engine, "serve", lambda *_, **__: pytest.fail("started a server"))
    assert pipeline.states(Eagle3Pipeline(), target) == folder / "hidden_states"


def extract_again(url, target, data, out) -> None:
    """What the killed process does."""
    extract.run(data, url, out, target=target, layers=LAYERS, concurrency=6)


def answer_again(url, prompts, out) -> None:
    """What the killed process does."""
    conversations.collect(prompts, url, out, max_length=256, max_tokens=16, concurrency=6)


def start(work) -> multiprocessing.Process:
    """The work in a process forked from one that has the imports behind it and nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["labkit.extract", "labkit.conversations"])
    process = context.Process(target=work, daemon=True)
    process.start()
    return process


def kill_at_random(work, done, kept, total) -> None:
    """Start the work and kill it, KILLS times, at random moments, `kept` after each; then let it end."""
    chance = random.Random(KILLS)
    moments, alive = sorted(chance.sample(range(1, total - 6), KILLS)), 0
    for moment in moments:
        process = start(work)
        limit = time.monotonic() + LIMIT_S
        while done() < moment and process.is_alive() and time.monotonic() < limit:
            time.sleep(0.002)
        time.sleep(chance.random() * 0.1)
        process.kill()
        process.join()
        alive += process.exitcode == -signal.SIGKILL
        kept()
    process = start(work)
    process.join(LIMIT_S)
    assert process.exitcode == 0
    print(f"\nkilled {alive} times, after {moments} of {total}")
    assert alive > KILLS / 2, "the work was over before it could be killed"


def test_kill_9_while_extracting(extracting, answered, target, folder):
    out, seen = folder / "killed", {}

    def kept() -> None:
        """Every file with a final name is whole, and is the one that it was after the last kill."""
        for path in out.glob("hs_*.safetensors"):
            row = int(path.stem.removeprefix("hs_"))
            assert extract.load_states(path)["token_ids"].tolist() == list(answered.input_ids[row])
            digest = (files.digest_file(path), path.stat().st_mtime_ns)
            assert seen.setdefault(row, digest) == digest

    work = partial(extract_again, extracting.base_url, target, folder / "data", out)
    kill_at_random(work, lambda: len(list(out.glob("hs_*.safetensors"))), kept, len(answered))
    assert seen, "no kill fell into the work"
    kept()
    assert sorted(seen) == list(range(len(answered)))
    assert extract.verify(out, compare=False).empty
    time.sleep(1)
    assert [path.name for path in (folder / "staging").glob("*labkit-*")] == []


def test_kill_9_while_answering(server, prompts, folder):
    out = folder / "killed-answers"
    store, before = out / "answers.jsonl", [b""]

    def kept() -> None:
        """What was written stays as it is, and more is only appended."""
        now = store.read_bytes() if store.exists() else b""
        assert now.startswith(before[0])
        before[0] = now

    def done() -> int:
        return store.read_bytes().count(b"\n") if store.exists() else 0

    kill_at_random(partial(answer_again, server.base_url, prompts, out), done, kept, len(prompts))
    kept()
    whole = []
    for line in before[0].splitlines():
        try:
            whole.append(json.loads(line)["key"])
        except (ValueError, KeyError):
            continue  # cut short by a kill
    assert len(whole) == len(set(whole)) == len(prompts)
    rows = conversations.load(out)
    assert rows.prompt_id.is_unique
    assert set(rows.prompt_id) <= set(prompts.prompt_id)
    assert len(rows) > 0.9 * len(prompts)  # an answer of one token is no training data
