"""Training on two GPUs by the commands that the lab writes out: DDP and FSDP are one GPU's training.

For a machine with two GPUs (`pytest tests/gpu`); not part of `make test`, whose machine has none.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from train_data import LAYERS, changed, make

from labkit import settings, train
from labkit.train import checkpoint, job

CHOSEN = {"precision": "fp32", "epochs": 8}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    assert torch.cuda.device_count() >= 2, "these tests want two GPUs"
    found = make(tmp_path_factory.mktemp("made"), conversations=40)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (found["target"].path / name).write_text("{}")
    return found


def written(made, out, **more):
    """The training as a file in `out`."""
    places = {name: made[name] for name in ("dataset_dir", "hidden_dir")}
    made["vocab"].save(out / "vocab")
    chosen = changed(target=str(made["target"].path), run_id="r", **CHOSEN | more)
    return train.write_job(
        out / "training.json", chosen, **places, vocab_dir=out / "vocab", out_dir=out, layers=LAYERS
    )


def started(path, processes, **form):
    """The command that the lab writes out, with this Python's accelerate."""
    words = shlex.split(job.launch_command(path, processes, **form))
    command = [sys.executable, "-m", "accelerate.commands.launch", *words[2:]]
    paths = os.pathsep.join([str(settings.root()), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "4"}
    if processes == 1:
        environment |= {"CUDA_VISIBLE_DEVICES": "0"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def trained(path, processes, **form):
    process = started(path, processes, **form)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said[-4000:]
    return path.parent


@pytest.fixture(scope="module")
def one(made, tmp_path_factory):
    return trained(written(made, tmp_path_factory.mktemp("one")), 1)


def assert_close(one, other):
    losses = [pd.read_parquet(folder / "metrics.parquet").loss for folder in (one, other)]
    assert np.allclose(*losses, rtol=5e-3), losses
    weights = [load_file(folder / "head" / "model.safetensors") for folder in (one, other)]
    assert set(weights[0]) == set(weights[1])
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor.float(), weights[1][name].float(), atol=1e-2, rtol=5e-2), name
    told = [pd.read_json(folder / "head" / "training.json", typ="series") for folder in (one, other)]
    assert [row["device"] for row in told] == ["cuda", "cuda"]
    assert told[1]["processes"] == 2


@pytest.mark.parametrize("fsdp", [False, True])
def test_two_gpus_train_as_one(made, one, tmp_path, fsdp):
    assert_close(one, trained(written(made, tmp_path), 2, fsdp=fsdp))


@pytest.mark.parametrize("fsdp", [False, True])
def test_killed_and_run_again_it_goes_on(made, one, tmp_path, fsdp):
    path = written(made, tmp_path)
    process = started(path, 2, fsdp=fsdp)
    deadline = time.time() + 200
    while not (tmp_path / "checkpoint.safetensors").exists() and process.poll() is None and time.time() < deadline:
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()[0][-4000:]
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert checkpoint.peek(tmp_path / "checkpoint.safetensors")["step"] > 0
    assert_close(one, trained(path, 2, fsdp=fsdp))
