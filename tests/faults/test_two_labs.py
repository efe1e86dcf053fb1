"""Another lab in the same folder: said, and nothing lost or mixed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from labkit import settings
from labkit.conversations.store import Store
from labkit.errors import LabError
from labkit.runs import Stage, stage
from labkit.runs.execute import alone
from tests.faults import phases

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
