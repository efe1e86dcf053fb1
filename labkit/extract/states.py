"""Ask the server for each conversation's hidden states, check each file, keep it as hs_<row>.safetensors."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from labkit import conversations, files, runs, targets
from labkit.errors import LabError
from labkit.extract.layers import layers_of

TIMEOUT_S = 1800.0
RECORD = "extraction.json"


class NoStates(LabError):
    """The server answered, but gave no hidden states."""


class BrokenStates(LabError):
    """A file of hidden states does not fit its conversation or holds no usable numbers."""


def states_path(out_dir: Path, row: int) -> Path:
    """The file of dataset row `row`."""
    return out_dir / f"hs_{row}.safetensors"


def bytes_needed(seq_lens: Sequence[int], num_states: int, hidden_size: int, item_bytes: int = 2) -> int:
    """Disk space in bytes: a state of `hidden_size` numbers for each of `num_states` layers, and the token id."""
    return int(np.sum(seq_lens)) * (num_states * hidden_size * item_bytes + 8)


def run(
    dataset_dir: Path,
    server: Any,
    out_dir: Path,
    *,
    target: targets.Target,
    layers: str | Sequence[int] = "",
    concurrency: int = 16,
) -> Path:
    """Write hidden states of every row of the data set; files that are there and valid are kept.

    A file holds `hidden_states` [T, len(layers) + 1, H] (the last is the last layer's output before the final
    norm) and `token_ids` [T]. `server` as `conversations.opened` takes it: a vLLM server of variant `extract`
    with the same layers. Raises ServerLost or EngineDied, BrokenStates, NoStates, DiskFull; finished files stay.
    """
    geometry = target.geometry
    record = {
        "dataset": os.path.relpath(dataset_dir, out_dir),
        "target": str(target.path),
        "revision": target.revision,
        "layers": [*layers_of(layers, geometry.num_hidden_layers), geometry.num_hidden_layers],
        "hidden_size": geometry.hidden_size,
    }
    dataset = conversations.load(dataset_dir)
    keep_or_clear(out_dir, record)
    missing = [i for i, ids in enumerate(dataset.input_ids) if not finished(out_dir, i, ids, record)]
    if missing:
        lens = dataset.seq_len.iloc[missing]
        files.require_space(out_dir, bytes_needed(lens, len(record["layers"]), record["hidden_size"]))
        with conversations.opened(server) as running:
            fetch(dataset, missing, running, out_dir, record, concurrency)
    return out_dir


def keep_or_clear(out_dir: Path, record: dict[str, Any]) -> None:
    """Drop files of another target or of other layers: they look the same and would train a useless head."""
    path = out_dir / RECORD
    if path.exists() and files.read_json(path) != record:
        shutil.rmtree(out_dir)
    files.write_json(path, record)


def finished(out_dir: Path, row: int, ids: Sequence[int], record: dict[str, Any]) -> bool:
    """Whether the row's file is whole and belongs to these tokens; reads only header and ids."""
    try:
        with safe_open(states_path(out_dir, row), framework="pt") as file:
            shape = file.get_slice("hidden_states").get_shape()
            return shape == expected_shape(ids, record) and file.get_tensor("token_ids").tolist() == list(ids)
    except (OSError, SafetensorError):
        return False


def expected_shape(ids: Sequence[int], record: dict[str, Any]) -> list[int]:
    """[T, layers, H]."""
    return [len(ids), len(record["layers"]), record["hidden_size"]]


def fetch(
    dataset: pd.DataFrame, rows: list[int], server: Any, out_dir: Path, record: dict[str, Any], concurrency: int
) -> None:
    """Ask for the given rows, several at a time."""
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="labkit-extract")
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
        try:
            work = [
                pool.submit(
                    fetch_one, client, server, [int(t) for t in dataset.input_ids[row]], row, out_dir, record
                )
                for row in rows
            ]
            for future in runs.progress(as_completed(work), "hidden states", total=len(work)):
                future.result()
        except (httpx.HTTPError, OSError, SafetensorError) as error:
            files.require_space(out_dir, 0)  # a server that cannot write says so only in its log
            done = sum(states_path(out_dir, row).exists() for row in rows)
            raise conversations.lost(server, error, done, len(rows), out_dir) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def fetch_one(
    client: httpx.Client, server: Any, ids: list[int], row: int, out_dir: Path, record: dict[str, Any]
) -> None:
    """One row: a completion of one token, the file that comes of it checked and moved to its name."""
    body = {"model": server.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0}
    response = client.post(f"{server.base_url}/completions", json=body)
    if 400 <= response.status_code < 500:
        raise NoStates(f"row {row} ({len(ids)} tokens) was refused: {response.text[:300]}", "raise max_model_len")
    response.raise_for_status()
    path = Path((response.json().get("kv_transfer_params") or {}).get("hidden_states_path") or "")
    if path == Path():
        raise NoStates(
            f"the server at {server.base_url} returns no hidden_states_path",
            "start it as variant `extract` (method extract_hidden_states and a hidden-states connector)",
        )
    with locked(path, server):
        check(load_file(path), ids, record, f"row {row}")
        path.replace(states_path(out_dir, row))
    Path(f"{path}.lock").unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path, server: Any) -> Iterator[None]:
    """Wait until the server has written the file; it holds a lock beside it until then."""
    lock = Path(f"{path}.lock")
    if not lock.exists():
        raise NoStates(
            f"the server wrote {path}, which is not on this machine's disk",
            "run the server on this machine, or share the folder that it writes to",
        )
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def check(tensors: dict[str, torch.Tensor], ids: Sequence[int], record: dict[str, Any], where: str) -> None:
    """Raise BrokenStates unless the states belong to these tokens, are finite, and no token's are all zero."""
    found = problems(tensors, ids, record)
    if found:
        raise BrokenStates(
            f"hidden states of {where}: " + "; ".join(f"{name}: {value}" for name, value in found.items()),
            "start the extract server without prefix caching and with the layers of this run; "
            "`labkit doctor --probe` goes through every seam",
        )


def problems(tensors: dict[str, torch.Tensor], ids: Sequence[int], record: dict[str, Any]) -> dict[str, str]:
    """What is wrong with one file: name of the check and the value seen."""
    states, tokens = tensors.get("hidden_states"), tensors.get("token_ids")
    if states is None or tokens is None:
        return {"tensors": f"found only {sorted(tensors)}"}
    if list(states.shape) != expected_shape(ids, record):
        return {"shape": f"{list(states.shape)} instead of {expected_shape(ids, record)}"}
    found = {}
    if tokens.tolist() != [int(token) for token in ids]:
        found["token_ids"] = "differ from the data set's"
    norms = states.float().norm(dim=-1)  # [T, layers]
    if not torch.isfinite(norms).all():
        found["finite"] = f"{int((~torch.isfinite(norms)).sum())} states hold NaN or infinity"
    if (norms == 0).any():
        found["non_zero"] = f"{int((norms == 0).sum())} states are all zero"
    return found
