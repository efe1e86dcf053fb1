"""One smoke run of the five notebooks for all tests here, with a real engine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

# What nobody may find in a run; planted in the environment of every run here.
SECRETS = {"HF_TOKEN": "hf_" + "PlantedByTheTests" * 2, "OPENAI_API_KEY": "sk-planted-by-the-tests-0123456789"}
LABKIT = [sys.executable, "-m", "labkit.cli"]


class Lab:
    """labkit runs in an outputs folder of their own, and what is left of them."""

    def __init__(self, folder: Path) -> None:
        self.outputs = folder
        self.environment = os.environ | SECRETS | {"LABKIT_OUTPUTS": str(folder)}

    def start(self, *words: str) -> subprocess.Popen:
        log = (self.outputs / "labkit.log").open("ab")
        return subprocess.Popen([*LABKIT, *words], env=self.environment, stdout=log, stderr=subprocess.STDOUT)

    def run(self, *words: str) -> str:
        """Run to the end; what it printed. Fails the test where labkit fails."""
        done = subprocess.run([*LABKIT, *words], env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    def kill_when(self, ready: Callable[[], bool], victim: str, *words: str) -> None:
        """Start labkit, kill -9 `victim` ("labkit", "kernel" or "server") once `ready`, and see nothing left."""
        process = self.start(*words)
        deadline = time.monotonic() + 600  # beside other programs an engine's start takes minutes
        while not ready():
            assert process.poll() is None, (self.outputs / "labkit.log").read_text()[-4000:]
            assert time.monotonic() < deadline, "never came so far"
            time.sleep(0.05)
        family = psutil.Process(process.pid).children(recursive=True)
        self.pick(process.pid, family, victim).send_signal(signal.SIGKILL)
        code = process.wait(timeout=180)
        assert code != 0
        _, left = psutil.wait_procs(family, timeout=60)
        assert not left, [" ".join(p.cmdline())[:100] for p in left]

    @staticmethod
    def pick(labkit: int, family: list[psutil.Process], victim: str) -> psutil.Process:
        if victim == "labkit":
            return psutil.Process(labkit)
        word = {"kernel": "ipykernel_launcher", "server": "openai.api_server"}[victim]
        return next(process for process in family if word in " ".join(process.cmdline()))


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Lab:
    return Lab(tmp_path_factory.mktemp("outputs"))
