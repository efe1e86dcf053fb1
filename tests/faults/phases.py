"""The lab's long steps against the stand-in server, as a process of their own or in the tests.

`python -m tests.faults.phases NAME FOLDER` runs one until it ends or is killed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from safetensors.numpy import save_file

from labkit import bench, conversations, engine, extract, files, targets
from labkit.engine import launch

STANDIN = Path(__file__).with_name("standin.py")
LAYERS, WIDTH = 6, 16
COUNT = 24  # requests of each step
PROMPTS = [f"Say {number}" for number in range(COUNT // 2)]


def environment() -> dict[str, str]:
    """For processes of the tests' own: this checkout, one thread each."""
    return os.environ | {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def stand_in() -> None:
    """Make `engine.serve` start the stand-in."""
    launch.command = lambda model, name, variant, port, options: [sys.executable, str(STANDIN), str(port)]


def target(folder: Path) -> targets.Target:
    """A model directory as far as serving and extraction look at it."""
    path = folder / "model"
    if not path.exists():
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "vocab_size": 64,
            "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1, "dtype": "float32",
            "intermediate_size": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        }  # fmt: skip
        files.write_json(path / "config.json", config)
        save_file({"model.norm.weight": np.ones(WIDTH, np.float32)}, path / "model.safetensors")
    return targets.Target("tiny", path, "made for a test")


@contextmanager
def serving(folder: Path, **fault: Any) -> Iterator[engine.Server]:
    """The stand-in as `engine.serve` starts and ends it; `fault` as its docstring says."""
    storage = folder / "storage"
    told = {"storage": str(storage), "places": 4, "width": WIDTH, "asked": str(folder / "asked"), **fault}
    options = {"layers": [1, 2, 3, LAYERS], "storage": storage, "environment": {"FAULT": json.dumps(told)}}
    with engine.serve(target(folder), "extract", log_dir=folder / "logs", start_limit_s=60, **options) as server:
        yield server


def benchmark(server: Any, folder: Path) -> int:
    """Two repeats of each prompt; returns the number of rows."""
    options = {"max_tokens": 8, "repeats": 2, "warmup": 0, "journal": folder / "rows.jsonl"}
    table = bench.run(server, PROMPTS, **options)
    assert table["error"].isna().all()
    return len(table)


def regeneration(server: Any, folder: Path) -> int:
    """The server answers every prompt; returns the number of rows."""
    rows = [{"prompt_id": f"p{i}", "category": "c", "topic": f"t{i}", "tools": ""} for i in range(COUNT)]
    frame = pd.DataFrame(rows).assign(split="train")
    frame["messages"] = [[{"role": "user", "content": row["prompt_id"]}] for row in rows]
    found = conversations.collect(frame, server, folder / "data", max_length=64, max_tokens=8, concurrency=2)
    return len(found)


def extraction(server: Any, folder: Path) -> int:
    """Hidden states of every row; returns the number of sound files."""
    data, out = folder / "dataset", folder / "hidden_states"
    ids = [[1 + i, 2, 3, 4 + i % 5] for i in range(COUNT)]
    if not data.exists():
        frame = pd.DataFrame({"input_ids": ids, "seq_len": 4, "prompt_tokens": 1})
        files.write_parquet(data / "dataset.parquet", frame.assign(split="train"))
    extract.run(data, server, out, target=target(folder), layers="1,2,3", concurrency=2)
    return sum(
        extract.load_states(extract.states_path(out, row))["token_ids"].tolist() == ids[row]
        for row in range(COUNT)
    )


PHASES: dict[str, Callable[[Any, Path], int]] = {
    "benchmark": benchmark,
    "regeneration": regeneration,
    "extraction": extraction,
}


def finished(name: str, folder: Path) -> int:
    """How much of a step is on disk."""
    if name == "extraction":
        return len(list((folder / "hidden_states").glob("hs_*.safetensors")))
    path = folder / ("rows.jsonl" if name == "benchmark" else "data/answers.jsonl")
    return sum(bool(line.strip()) for line in path.read_bytes().split(b"\n")) if path.exists() else 0


def asked(folder: Path) -> int:
    """How many requests the servers of this folder got."""
    path = folder / "asked"
    return len(path.read_text().splitlines()) if path.exists() else 0


if __name__ == "__main__":
    stand_in()
    with serving(Path(sys.argv[2])) as running:
        PHASES[sys.argv[1]](running, Path(sys.argv[2]))
