"""Training from a file, by itself and by `accelerate launch` on two processes: the same training."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from train_data import LAYERS, changed, fit, make

from labkit import pipeline, settings, train
from labkit.train import checkpoint, job


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    found = make(tmp_path_factory.mktemp("made"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (found["target"].path / name).write_text("{}")
    return found


CHOSEN = {"precision": "fp32", "epochs": 2}


@pytest.fixture(scope="module")
def one(made, tmp_path_factory):
    """The training on one process."""
    folder = tmp_path_factory.mktemp("one")
    fit(made, folder, changed(**CHOSEN))
    return folder


def written(made, out, suffix="json", **more):
    places = {name: made[name] for name in ("dataset_dir", "hidden_dir")}
    made["vocab"].save(out / "vocab")
    chosen = changed(target=str(made["target"].path), run_id="r", **CHOSEN | more)
    path = out / f"training.{suffix}"
    return train.write_job(path, chosen, **places, vocab_dir=out / "vocab", out_dir=out, layers=LAYERS)


def launched(path, *flags):
    """accelerate's own launcher, on CPUs with gloo."""
    return ours("accelerate.commands.launch", "--cpu", *flags, "-m", "labkit.train", str(path))


def ours(*words):
    command = [sys.executable, "-m", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(settings.root())}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def assert_close(one, other):
    losses = [pd.read_parquet(folder / "metrics.parquet").loss for folder in (one, other)]
    assert np.allclose(*losses, rtol=1e-3)
    weights = [load_file(folder / "head" / "model.safetensors") for folder in (one, other)]
    assert set(weights[0]) == set(weights[1])
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor.float(), weights[1][name].float(), atol=5e-3, rtol=2e-2), name


def test_two_processes_train_as_one(made, one, tmp_path):
    """DDP over gloo; accelerate takes FSDP on GPUs only, so test_train_sharded.py does without its launcher."""
    flags = ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    process = launched(written(made, tmp_path), *flags)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said[-3000:]
    assert_close(one, tmp_path)


def test_sigterm_to_the_training_saves_and_its_status_says_run_again(made, one, tmp_path):
    path = written(made, tmp_path, "yaml", epochs=400)
    process = ours("labkit.train", str(path))
    deadline = time.time() + 200
    while not (tmp_path / "metrics.parquet").exists() and process.poll() is None and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said[-3000:]
    assert "SIGTERM" in said
    assert "run the same cell or command again" in said
    assert checkpoint.peek(tmp_path / "checkpoint.safetensors")["step"] > 0


def test_a_training_file_moves_with_its_folder(made, tmp_path):
    path = written(made, tmp_path / "here")
    assert "/" not in job.read_job(path)["vocab_dir"]
    path.parent.rename(tmp_path / "there")
    assert job.read_job(tmp_path / "there" / path.name)["out_dir"] == "."


WHOLE = '{"settings": {}, "dataset_dir": ".", "hidden_dir": 5, "vocab_dir": ".", "out_dir": "."}'


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[1", "no training file"),
        ("{}", "lacks settings, dataset_dir"),
        (WHOLE, "hidden_dir is '5'"),
        (WHOLE.replace("{}", '"x"').replace("5", '"."'), "settings is 'x'"),
    ],
)
def test_a_broken_training_file_is_refused(tmp_path, text, match):
    (tmp_path / "training.json").write_text(text)
    with pytest.raises(train.BadJob, match=match):
        job.run_job(tmp_path / "training.json", {})


@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize("fsdp", [True, False])
def test_accelerates_own_parser_takes_the_launch_command(processes, fsdp):
    from accelerate.commands.launch import launch_command_parser

    words = shlex.split(train.launch_command(Path("a b/training.json"), processes, fsdp=fsdp))
    assert words[:2] == ["accelerate", "launch"]
    parsed = launch_command_parser().parse_args(words[2:])
    assert parsed.training_script == "labkit.train"
    assert parsed.training_script_args == ["a b/training.json"]
    assert parsed.num_processes == processes
    assert parsed.use_fsdp == (fsdp and processes > 1)


def test_the_pipeline_writes_the_file_and_the_commands_for_other_machines(made, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    chosen = changed(target=str(made["target"].path), run_id="r", aux_layers="1,3,4", epochs=1)
    shutil.copytree(made["dataset_dir"], chosen.folder / "data")
    shutil.copytree(made["hidden_dir"], chosen.folder / "hidden_states")
    head = pipeline.head(chosen, made["target"], made["vocab"])
    assert job.run_job(chosen.folder / "training.json", {}) == head.resolve()  # nothing is left to do
    commands = pipeline.elsewhere(chosen, made["target"], made["vocab"], processes=2)
    assert commands["labkit"].endswith(f"-m labkit.train {chosen.folder / 'training.json'}")
    assert "--target-layer-ids 1 3 4" in commands["speculators"]
    assert (chosen.folder / "speculators" / "d2t-32.npy").exists()
