"""The head and its checkpoint in shards over two processes (FSDP2, gloo): the same step as whole."""

import os
import subprocess
import sys
from pathlib import Path

from labkit import settings

HERE = Path(__file__).parent


def test_a_sharded_head_trains_saves_and_loads_as_a_whole_one(tmp_path):
    paths = os.pathsep.join([str(settings.root()), str(HERE)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-W", "ignore", str(HERE / "sharded.py"), str(tmp_path)]
    both = [subprocess.Popen([*command, rank], env=environment, **pipes) for rank in ("0", "1")]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(said)[-4000:]
    assert "losses" in said[0]
