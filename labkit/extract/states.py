"""Hidden states of a data set's rows, from an engine's server or Transformers, each file checked as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file

from labkit import conversations, files, targets
from labkit.errors import LabError
from labkit.extract import flags, flow, forms, record, served
from labkit.extract.layers import BadLayers, layers_of
from labkit.progress import bar

BACKENDS = ("vllm", "transformers")


class UnknownBackend(LabError):
    """States were asked for from a backend that does not exist."""


class BrokenStates(LabError):
    """A file of hidden states does not fit its conversation or holds no usable numbers."""


@dataclass(frozen=True)
class Order:
    """The states that are wanted: of which tokens, with which layers, in which form, and where they go."""

    tokens: list[np.ndarray]  # of every row of the data set
    rows: list[int]  # those that are missing, of this worker's shard
    record: dict[str, Any]
    out_dir: Path
    form: str
    item_bytes: int
    shard: str = ""

    def needs(self) -> dict[int, int]:
        """Bytes that each row may take while it is under way: as the engine writes it, and as it is kept."""
        shape = (len(self.record["layers"]), self.record["hidden_size"], self.item_bytes)
        twice = self.form != "bf16"
        return {
            row: record.bytes_needed([len(self.tokens[row])], *shape)
            + twice * record.bytes_needed([len(self.tokens[row])], *shape, self.form)
            for row in self.rows
        }

    def total(self) -> int:
        """Bytes that the missing rows take in the end."""
        lengths = [len(self.tokens[row]) for row in self.rows]
        shape = (len(self.record["layers"]), self.record["hidden_size"], self.item_bytes)
        return record.bytes_needed(lengths, *shape, self.form)

    def keep(self, row: int, tensors: forms.Tensors) -> None:
        """Check one row's states and write its file; raises BrokenStates."""
        check(tensors, self.tokens[row], self.record, f"row {row}")
        forms.save_states(record.states_path(self.out_dir, row), tensors, self.form)

    def move(self, row: int, source: Path) -> None:
        """Check the file that the engine wrote and make it the row's; `source` is gone then."""
        tensors = load_file(source)
        if self.form != "bf16" or source.stat().st_dev != self.out_dir.stat().st_dev:
            self.keep(row, tensors)
            source.unlink()
            return
        check(tensors, self.tokens[row], self.record, f"row {row}")
        source.replace(record.states_path(self.out_dir, row))


def run(
    dataset_dir: Path,
    server: Any,
    out_dir: Path,
    *,
    target: targets.Target,
    layers: str | Sequence[int] = "",
    concurrency: int = 16,
    form: str = "bf16",
    shard: str = "",
    split: str = "",
    backend: str = "vllm",
    replace: bool = True,
) -> Path:
    """Write hidden states of the data set's rows; files that are there and valid are kept.

    A file holds `hidden_states` [T, len(layers) + 1, H] (the last is the last layer's output before the final
    norm) and `token_ids` [T], in the form asked for (`forms`). `server` as `conversations.opened` takes it: a vLLM
    server of variant `extract` with the same layers; backend "transformers" needs none. `shard` "2/4" does every
    fourth row from the second, into a folder of its own or one that the shards share; `split` only that split's
    rows (a training on the fly wants files of the held-out ones alone). At most `concurrency` rows
    are under way, fewer when the disk fills. States of another target or of other layers in `out_dir` are
    replaced, or refused with OtherStates where `replace` is off. Raises ServerLost or EngineDied, BrokenStates,
    NoStates, DiskFull (before the start when it cannot fit), ShardBusy, BadShard, BadLayers, UnknownForm; finished
    files stay.
    """
    check_choices(form, backend, shard)
    ids = layers_of(layers, target.geometry.num_hidden_layers)
    wanted = record.record_of(dataset_dir, out_dir, target, ids)
    dataset = conversations.load(dataset_dir)
    record.keep_or_clear(out_dir, wanted, replace)
    with record.alone(out_dir, shard):
        mine = record.rows_of(dataset, shard, split)
        order = order_of(dataset, mine, wanted, out_dir, form, shard, target)
        if order.rows:
            files.require_space(out_dir, order.total())
            fetch(order, server, target, concurrency, backend)
    return out_dir


def check_choices(form: str, backend: str, shard: str) -> None:
    """Refuse before anything is spent: raises UnknownForm, UnknownBackend, BadShard."""
    forms.check_form(form)
    record.rows_of_shard(shard, 0)
    if backend not in BACKENDS:
        raise UnknownBackend(f"backend={backend!r} is none", f"use one of {', '.join(BACKENDS)}")


def order_of(
    dataset: pd.DataFrame,
    mine: Sequence[int],
    wanted: dict[str, Any],
    out_dir: Path,
    form: str,
    shard: str,
    target: targets.Target,
) -> Order:
    """What is still missing of a worker's rows."""
    tokens = [np.array(ids, dtype=np.int64) for ids in dataset.input_ids]
    missing = [row for row in mine if not record.finished(out_dir, row, tokens[row], wanted, form)]
    item_bytes = 4 if target.geometry.dtype == "float32" else 2
    return Order(tokens, missing, wanted, out_dir, form, item_bytes, shard)


def fetch(order: Order, server: Any, target: targets.Target, concurrency: int, backend: str) -> None:
    """Get the missing rows from the backend."""
    if backend == "transformers":
        from labkit.extract import reference

        done = reference.extract(order, target)
        show(done, order)
        return
    with conversations.opened(server) as running:
        refuse_other_layers(running, order.record["layers"])
        flags.refuse_flags(target, getattr(running, "options", None) or {})
        source = served.Source(running, order, concurrency)
        room = flow.Room([order.out_dir, *source.staging()], order.needs())
        with source:
            show(flow.side_by_side(order.rows, source.fetch, concurrency, room), order)


def show(done: Any, order: Order) -> None:
    """Go through the rows as they get done, with a bar of rows and the tokens a second."""
    tokens = 0
    with bar("hidden states", len(order.rows), unit="row") as line:
        for row in done:
            tokens += len(order.tokens[row])
            line.update()
            line.set_postfix_str(f"{tokens / max(line.format_dict['elapsed'], 1e-3):,.0f} tok/s", refresh=False)


def refuse_other_layers(server: Any, layers: Sequence[int]) -> None:
    """Raise BadLayers where the lab started this server with other layers: as many would look the same."""
    options = getattr(server, "options", None) or {}
    served_layers = options.get("layers", layers)
    if list(served_layers) != list(layers):
        raise BadLayers(
            f"the server gives layers {list(served_layers)}, the extraction wants {list(layers)}",
            "start the extract server with the layers of this run",
        )


def check(tensors: forms.Tensors, ids: Sequence[int], wanted: dict[str, Any], where: str) -> None:
    """Raise BrokenStates unless the states belong to these tokens, are finite, and no token's are all zero."""
    found = problems(tensors, ids, wanted)
    if found:
        raise BrokenStates(
            f"hidden states of {where}: " + "; ".join(f"{name}: {value}" for name, value in found.items()),
            remedy_of(found),
        )


REMEDY = {
    "length": "prefix caching leaves out the states of cached tokens (vllm#44486): start the extract server with "
    "--no-enable-prefix-caching",
    "layers": "the server captures other layers than this run asks for: start it with the layers of this run, "
    "the layer count as the last",
    "hidden_size": "the server has another target: start it with this run's",
    "token_ids": "the states are of other tokens: give the server token ids, not text, and each data set a folder",
    "finite": "the engine overflowed or read unwritten memory (vllm#46301): bfloat16 instead of float16, another "
    "attention backend, or leave the row out",
    "non_zero": "the engine gave unwritten memory (vllm#46301, #51328): another attention backend or vLLM version",
    "dtype": "the rows come from engines with different --dtype: delete them and extract with one",
    "tensors": "the file is no file of states: delete it and run again",
}


def remedy_of(found: dict[str, str]) -> str:
    """What to do about the first of the problems."""
    return REMEDY[next(iter(found))] + "; `labkit doctor --probe` goes through every seam"


def problems(tensors: forms.Tensors, ids: Sequence[int], wanted: dict[str, Any]) -> dict[str, str]:
    """What is wrong with one file: name of the check and the value seen."""
    states, tokens = tensors.get(forms.STATES), tensors.get(forms.TOKENS)
    if states is None or tokens is None or states.dim() != 3:
        return {"tensors": f"found only {sorted(tensors)}"}
    sizes = zip(("length", "layers", "hidden_size"), states.shape, record.expected_shape(ids, wanted), strict=True)
    found = {name: f"{seen} instead of {right}" for name, seen, right in sizes if seen != right}
    if tokens.tolist() != [int(token) for token in ids]:
        found["token_ids"] = "differ from the data set's"
    norms = torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32)  # [T, layers]
    if not torch.isfinite(norms).all():
        found["finite"] = f"{int((~torch.isfinite(norms)).sum())} states hold NaN or infinity"
    if (norms == 0).any():
        found["non_zero"] = f"{int((norms == 0).sum())} states are all zero"
    return found
