"""From a training run to data/targets/mini-kimi: the wrapper's checkpoint, the tokenizer, some held-out text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd

from labkit import files
from labkit.errors import LabError
from labkit.pretrain import corpus, loop
from labkit.targets import mini_kimi

LIMIT = 20_000_000  # bytes of the folder
HELD_OUT_BYTES = 200_000
HELD_OUT = "held-out.jsonl"


class TooLarge(LabError):
    """The exported target is larger than the repository has room for."""


def run(run_dir: Path, folder: Path) -> Path:
    """Write the target in `folder` from a run (loop.run and the command `train`); replaces what is there.

    Raises TooLarge, EvaluationLeak, or BrokenFile where the run is not whole.
    """
    frame = files.read_parquet(run_dir / corpus.FILE)
    kept = held_out_sample(frame)
    corpus.check_excluded(kept.text)
    with files.atomic(folder) as scratch:
        scratch.mkdir()
        mini_kimi.wrap(run_dir / "model" / "model.safetensors", scratch)
        for file in (run_dir / "tokenizer").iterdir():
            shutil.copyfile(file, scratch / file.name)
        shutil.copyfile(run_dir / loop.LOG, scratch / loop.LOG)
        lines = [json.dumps({"category": c, "text": t}) for c, t in zip(kept.category, kept.text, strict=True)]
        (scratch / HELD_OUT).write_text("\n".join(lines) + "\n")
        size = sum(file.stat().st_size for file in scratch.iterdir())
        if size > LIMIT:
            raise TooLarge(f"{folder} would hold {size / 1e6:.1f} MB", f"keep it below {LIMIT / 1e6:.0f} MB")
    return folder


def held_out_sample(frame: pd.DataFrame) -> pd.DataFrame:
    """Held-out documents in a fixed random order, as many as HELD_OUT_BYTES hold, an equal share a category."""
    held = frame[frame.split == "held-out"].sample(frac=1.0, random_state=0)
    share = HELD_OUT_BYTES / max(1, held.category.nunique())
    sizes = held.text.str.encode("utf-8").str.len()
    return held[sizes.groupby(held.category).cumsum() <= share].sort_values("category", kind="stable")
