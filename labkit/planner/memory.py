"""Does it fit: the target on the GPUs that serve it, the head and its optimiser on one that trains."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.costmodel import kv_bytes_per_token, weights
from labkit.planner.head import Head, inner_width
from labkit.planner.machines import Machine
from labkit.planner.work import Work
from labkit.targets import Geometry

USABLE = 0.92  # of a GPU's memory, as vLLM's own gpu_memory_utilization is
ENGINE_GB = 4.0  # of a rank beside weights and cache: activations, CUDA graphs, buffers; assumed
TRAINED_BYTES = 16  # a weight that is trained: fp32, its gradient, AdamW's two moments
FROZEN_BYTES = 4  # a weight that is not
CHECKPOINT_BYTES = 12  # a trained weight in a checkpoint: fp32 and two moments


@dataclass(frozen=True)
class Serving:
    """How a machine serves the target: ranks of one server, servers side by side, requests that fit at a time."""

    tensor_parallel_size: int
    replicas: int
    streams: int
    gb_per_gpu: float


def target_gb(geometry: Geometry, ranks: int) -> float:
    """GB of a target's weights on one of `ranks` GPUs, all routed experts and the embedding included."""
    table = weights(geometry, ranks).set_index("part")["gb_per_rank"]
    if geometry.is_moe:
        table["routed experts"] *= geometry.n_routed_experts / geometry.num_experts_per_tok
    own = 0 if geometry.tie_word_embeddings else 2 * geometry.vocab_size * geometry.hidden_size / ranks / 1e9
    return float(table.sum()) + own


def serving(geometry: Geometry, machine: Machine, work: Work, gpus: int = 0) -> Serving | None:
    """How `gpus` of the machine (all by default) serve the target; None where no possible ranks can hold it.

    The fewest ranks whose servers hold all streams in their cache, else the ranks that hold most of them.
    """
    gpus = gpus or machine.gpus
    found = []
    for ranks in geometry.tensor_parallel_sizes(gpus):
        one_gb = work.length * kv_bytes_per_token(geometry, ranks) / 1e9
        needed = target_gb(geometry, ranks) + ENGINE_GB
        room = machine.memory_gb * USABLE - needed
        if gpus % ranks == 0 and room >= one_gb:
            found.append(Serving(ranks, gpus // ranks, min(work.streams, int(room / one_gb)), needed))
    enough = [s for s in found if s.streams == work.streams]
    return enough[0] if enough else max(found, key=lambda s: s.streams * s.replicas, default=None)


def training_gb(geometry: Geometry, head: Head, work: Work) -> dict[str, float]:
    """GB on a GPU that trains the head (each has all of it, DDP), by what takes it.

    The activations are an estimate: what a bf16 layer of that width keeps for its backward pass, each TTT step
    anew; logits: one fp32 copy a TTT step, the target's, and the gradient of one.
    """
    batch, size = work.batch_tokens, head.lm_head // geometry.hidden_size
    layer = 20 * geometry.hidden_size + 3 * inner_width(geometry)
    return {
        "trained weights and AdamW": head.trainable * TRAINED_BYTES / 1e9,
        "frozen weights": (2 * head.lm_head + head.embedding) * FROZEN_BYTES / 1e9,
        "logits": batch * size * 4 * (work.ttt_steps + 2) / 1e9,
        "activations": batch * work.ttt_steps * layer * 2 / 1e9,
    }


def checkpoint_gb(head: Head) -> float:
    """GB of one checkpoint; the exported head beside it is a sixth of that."""
    return head.trainable * CHECKPOINT_BYTES / 1e9
