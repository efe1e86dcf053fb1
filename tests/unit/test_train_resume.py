"""A training that is killed, stopped or interrupted at any moment ends as an undisturbed one, to the bit."""

import _thread
import functools
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time

import pandas as pd
import pytest
import torch
from train_data import SETTINGS, assert_same, changed, fit

from labkit import files, train
from labkit.train import checkpoint, loop
from labkit.train.stopping import Stopping

KILLS = 20 if os.environ.get("LABKIT_SOAK") else 3
NAME = "checkpoint.safetensors"
pytestmark = pytest.mark.usefixtures("one_thread")  # the children have one, too


@pytest.fixture(scope="module")
def children():
    """Processes forked from a clean one that has everything imported: they start in a moment."""
    context = multiprocessing.get_context("forkserver")
    wanted = ["labkit.train", "accelerate", "speculators.models.eagle3", "speculators.utils.loading", "train_data"]
    context.set_forkserver_preload([*wanted, "torch.distributed.checkpoint.state_dict"])
    return context


def child(made, out, pause, every):
    """A training in a process of its own, slow enough to be hit."""
    torch.set_num_threads(1)
    loop.CHECKPOINT_EVERY_S, loop.SHOW_EVERY_S = every, 0.0
    fit(made, out, watch=lambda _frame: time.sleep(pause))


def started(children, made, out, pause=0.05, every=0.0):
    process = children.Process(target=child, args=(made, out, pause, every))
    process.start()
    return process


def wait_for_step(path, step, process):
    deadline = time.time() + 120
    while (checkpoint.peek(path) or {}).get("step", 0) < step and process.is_alive() and time.time() < deadline:
        time.sleep(0.01)


def test_killed_at_random_moments_it_ends_as_if_nothing_had_been(made, whole, tmp_path, children):
    """SIGKILL again and again, some moments after it went on; checkpoints now rare, now at each step."""
    rng = random.Random(files.digest(str(tmp_path)))
    out, killed = tmp_path / "out", 0
    while killed < KILLS:
        process = started(children, made, out, every=rng.choice([0.0, 0.2]))
        wait_for_step(out / NAME, rng.randrange(1, 14), process)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
        if (out / "head").exists():  # it was done before: the rest of the kills are for another one
            assert_same(whole, out)
            shutil.rmtree(out)
    fit(made, out)
    assert_same(whole, out)
    assert not list(out.glob(f".*{NAME}*"))
    assert not list(out.glob("*checkpoint*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_stops_and_says_how_to_go_on(made, whole, tmp_path, monkeypatch, number):
    monkeypatch.setattr(loop, "SHOW_EVERY_S", 0.0)
    handler = signal.getsignal(number)
    seen = []

    def send(_frame):
        seen.append(1)
        if len(seen) == 4:
            os.kill(os.getpid(), number)

    with pytest.raises(train.Stopped, match=rf"after step 4 of 15 \({number.name}\)") as caught:
        fit(made, tmp_path, watch=send)
    assert "run the same" in caught.value.remedy
    assert signal.getsignal(number) is handler
    assert checkpoint.peek(tmp_path / NAME)["step"] == 4
    assert len(pd.read_parquet(tmp_path / "metrics.parquet")) == 4
    fit(made, tmp_path)
    assert_same(whole, tmp_path)


def test_a_second_signal_acts_as_before():
    with Stopping() as stopping:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert stopping.wanted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("how", ["flag", "returns", "raises", "interrupt"])
def test_a_button_or_a_watcher_stops_it_between_two_steps(made, whole, tmp_path, monkeypatch, how):
    monkeypatch.setattr(loop, "SHOW_EVERY_S", 0.0)
    flag, seen = threading.Event(), []

    def watch(frame):
        seen.append(len(frame))
        if len(seen) < 3:
            return None
        if how == "flag":
            flag.set()
        if how == "raises":
            raise ZeroDivisionError("the plot failed")
        if how == "interrupt":
            _thread.interrupt_main()
        return how == "returns"

    with pytest.raises(ZeroDivisionError if how == "raises" else train.Stopped):
        fit(made, tmp_path, watch=watch, stop=flag)
    assert seen == [1, 2, 3]
    assert checkpoint.peek(tmp_path / NAME)["step"] == 3
    fit(made, tmp_path)
    assert_same(whole, tmp_path)


def stopped_after(made, out, step, monkeypatch, chosen=SETTINGS, every=0.0):
    monkeypatch.setattr(loop, "SHOW_EVERY_S", 0.0)
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY_S", every)
    with pytest.raises(train.Stopped):
        fit(made, out, chosen, watch=lambda frame: len(frame) == step)


@pytest.mark.parametrize("after", [1, 5, 14])
def test_stopped_within_at_the_end_of_and_before_an_epoch(made, whole, tmp_path, monkeypatch, after):
    stopped_after(made, tmp_path, after, monkeypatch)
    fit(made, tmp_path)
    assert_same(whole, tmp_path)


def test_a_checkpoint_that_was_cut_short_falls_back_on_the_one_before(made, whole, tmp_path, monkeypatch):
    stopped_after(made, tmp_path, 6, monkeypatch)
    path = tmp_path / NAME
    assert checkpoint.peek(checkpoint.before(path))["step"] == 5
    path.write_bytes(path.read_bytes()[:1000])
    resumed = []
    real = loop.Loop.step
    monkeypatch.setattr(loop.Loop, "step", lambda *a, **k: (resumed.append(1), real(*a, **k))[1])
    fit(made, tmp_path)
    assert len(resumed) == 10  # of 15
    assert_same(whole, tmp_path)


def test_the_checkpoint_before_stays_until_the_new_one_is_whole(made, tmp_path, monkeypatch):
    """A write that dies in the middle leaves the last one readable and nothing beside it that counts."""
    stopped_after(made, tmp_path, 3, monkeypatch)
    path = tmp_path / NAME

    def dying(_tensors, temporary, **_):
        temporary.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", dying)
    with pytest.raises(files.DiskFull):
        fit(made, tmp_path)
    assert checkpoint.peek(path)["step"] == 3


def test_a_checkpoint_of_other_settings_is_not_used_but_other_parts_are_no_other_settings(
    made, whole, tmp_path, monkeypatch
):
    stopped_after(made, tmp_path, 2, monkeypatch, changed(seed=6))
    fit(made, tmp_path)
    assert_same(whole, tmp_path)
    again = tmp_path / "again"
    stopped_after(made, again, 2, monkeypatch)
    steps = []
    real = loop.Loop.step
    monkeypatch.setattr(loop.Loop, "step", lambda *a, **k: (steps.append(1), real(*a, **k))[1])
    fit(made, again, changed(accumulate=2))
    assert len(steps) == 13


def test_metrics_can_be_read_while_training_and_have_each_step_once(made, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "SHOW_EVERY_S", 0.0)
    lengths = []
    watch = functools.partial(lambda seen, frame: seen.append((len(frame), len(read(tmp_path)))), lengths)
    fit(made, tmp_path, watch=watch)
    assert lengths == [(number, number) for number in range(1, 16)]
    assert read(tmp_path).step.tolist() == list(range(15))


def read(folder):
    return pd.read_parquet(folder / "metrics.parquet")
