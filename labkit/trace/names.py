"""What an event's name says: which collective it is, or which kind of work.

The families and their spellings: NCCL (also its legacy and symmetric kernels), vLLM/SGLang/AITER custom
AllReduce, FlashInfer and TensorRT-LLM fused kernels, torch symmetric memory, MSCCL++, RCCL, gloo, vLLM's
shared-memory collectives on the CPU. An NCCL name is that of a representative: nothing but the collective
may be read from it, not the protocol.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

UNKNOWN = "unknown collective"
PARAM_COMMS = "record_param_comms"  # the host's note of a collective, with its name and sizes as arguments

# What a rank's time is spent on, in the order in which plots stack it.
GEMM, ATTENTION, MOE, NORM = "GEMM", "attention", "MoE", "norm and elementwise"
SAMPLING, COPY, OVERHEAD, OTHER = "sampling", "memory copy", "framework overhead", "unclassified"
TRANSFER, WAIT, UNSPLIT = "AllReduce transfer", "AllReduce wait", "AllReduce, wait not told apart"
OTHER_COMM, IDLE = "other communication", "idle"
ALLREDUCE = (TRANSFER, WAIT, UNSPLIT)
# In the order of claims to an instant in which several run: communication under compute is hidden, over a memory
# copy or the framework's bookkeeping it is exposed.
CATEGORIES = (GEMM, ATTENTION, MOE, NORM, SAMPLING, OTHER, *ALLREDUCE, OTHER_COMM, OVERHEAD, COPY, IDLE)


@dataclass(frozen=True)
class Collective:
    """A collective by name. `layer` orders the layers that record one call: the lowest is nearest the wire."""

    kind: str
    layer: int = 0
    fused: bool = False  # the kernel does more than communicate (norm, MoE finalisation)


SPELLINGS = (  # normalised (lower case, no separators) part of a name: kind; the first that fits
    ("reducescatter", "ReduceScatter"),
    ("allreduce", "AllReduce"),
    ("allgather", "AllGather"),
    ("alltoall", "AllToAll"),
    ("broadcast", "Broadcast"),
    ("sendrecv", "SendRecv"),
    ("barrier", "Barrier"),
    ("send", "SendRecv"),
    ("recv", "SendRecv"),
    ("gather", "Gather"),
    ("scatter", "Scatter"),
    ("reduce", "Reduce"),
)
NCCL = re.compile(r"(?:nccl\w*Kernel|rcclGenericKernel)_?(\w*)")
# Kernels with a name of their own, as patterns over the whole name.
DEVICE: tuple[tuple[re.Pattern[str], str, bool], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), kind, fused)
    for pattern, kind, fused in (
        (r"cross_device_reduce", "AllReduce", False),
        (r"pcie_ipc::\w*(push|ipc)", "AllReduce", False),
        (r"deep_ep::.*(dispatch|combine)|moe_?all_?to_?all|moe_?a2a", "AllToAll", False),
        (r"all_?reduce_?fusion|all_?reduce_?(rms_?)?norm|one_?shot_all_?reduce_norm", "AllReduce", True),
        (r"all_?reduce", "AllReduce", False),
        (r"all_?gather", "AllGather", False),
        (r"reduce_?scatter", "ReduceScatter", False),
        (r"all_?to_?all", "AllToAll", False),
    )
)
HOST = (  # (prefix of the operator's name, layer); the operator's own name follows
    (re.compile(r"^(?:\w+::)+shm_(\w+)"), 0),
    (re.compile(r"^(?:gloo|nccl|ccl|xccl|mpi|ucc):(\w+)"), 1),
    (re.compile(r"^c10d::_?(\w+)"), 3),
    (
        re.compile(
            r"^(?:_c10d_functional|vllm|sglang|sgl_kernel)::\w*?((?:outplace_|inplace_)?(?:all_|reduce_sc)\w+)"
        ),
        4,
    ),
)
NOT_COMMUNICATION = re.compile(r"lamport_initialize")


def spelled(text: str) -> str | None:
    """The collective that a piece of a name spells, in whatever style."""
    plain = re.sub(r"[\W_]", "", text.lower()).replace("alltoallv", "alltoall")
    return next((kind for part, kind in SPELLINGS if part in plain), None)


@lru_cache(maxsize=1 << 16)
def collective(name: str) -> Collective | None:
    """The collective that an event of this name is, or None; RCCL's generic kernels are UNKNOWN."""
    if NOT_COMMUNICATION.search(name):
        return None
    for pattern, layer in HOST:
        if match := pattern.match(name):
            kind = spelled(match[1])
            return Collective(kind, layer) if kind else None
    if match := NCCL.search(name):
        return Collective(spelled(match[1]) or UNKNOWN)
    for pattern, kind, fused in DEVICE:
        if pattern.search(name):
            return Collective(kind, fused=fused)
    return None


def from_argument(text: str) -> str | None:
    """The collective of an event's "Collective name" argument ("allreduce", "_allgather_base", ...)."""
    return spelled(text) if text and text not in ("wait", "init") else None


# Work by name, the first pattern that fits. Host operators come with a namespace, kernels mostly without.
VIEWS = (
    r"view|as_strided|slice|reshape|_?unsafe_view|empty\w*|new_empty\w*|select|expand\w*|transpose|permute|t|"
    r"unsqueeze|squeeze|split\w*|chunk|narrow|detach|alias|resolve_\w+|lift_fresh|flatten|unflatten|movedim|item|"
    r"_local_scalar_dense|result_type|resize_|set_|unbind|is_\w+|numpy_T|view_as|size|stride"
)
WORK: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), category)
    for pattern, category in (
        (rf"^aten::({VIEWS})$", OVERHEAD),
        (r"^(TorchDynamo|Pregraph|AOTDispatcher|Torch-Compiled|## Call|Inductor|CompiledFunction)", OVERHEAD),
        (r"^aten::(copy_|_to_copy|to|contiguous|clone|cat|stack|pin_memory)$|^(Memcpy|Memset|hip\w*Mem)", COPY),
        (r"(?i)direct_copy_kernel|CatArrayBatchedCopy|memcpy|memset", COPY),
        (r"(?i)^triton_(poi|red|per)_|^cpp_fused", NORM),
        (r"(?i)(rms|layer|group)_?norm", NORM),
        (r"(?i)moe|expert|topk_?(gating|softmax|sigmoid)|grouped_topk|router|deep_ep", MOE),
        (
            r"(?i)attention|attn|flash_|flash::|fmha|mla_|::mla|paged|BatchDecode|BatchPrefill|_and_cache|kv_?cache|"
            r"reduce_segments|mqa_logits|merge_(attn_)?states|slot_mapping|scheduler_metadata|page_table|_fwd_kernel",
            ATTENTION,
        ),
        (
            r"(?i)sampl|argmax|top_?[kp]\b|topk|topp|multinomial|gumbel|log_?softmax|cunn_SoftMax|_sort|Sort|penalt|"
            r"bincount|logits|rejection|exponential",
            SAMPLING,
        ),
        (
            r"(?i)gemm|gemv|matmul|cutlass|cublas|nvjet|xmma|wmma|Cijk_|splitK|machete|marlin|onednn_mm|mkldnn|"
            r"_scaled_mm|packed_linear|int4pack_mm|dot_kernel|wvSplit|triton_tem|^aten::(mm|bmm|addmm|linear|baddbmm|einsum|_addmm_activation)$",
            GEMM,
        ),
        (
            r"(?i)norm|elementwise|vectorized|silu|gelu|act_and_mul|rotary|rope|reduce_kernel|quant|embedding|index|"
            r"gather|scatter|scan|cumsum|fill|softmax|lamport_initialize|FunctorOp|distribution|^_\w+_kernel$|^aten::",
            NORM,
        ),
    )
)
# An operator inside one of these is part of it, whatever it does.
STRONG = frozenset((ATTENTION, MOE, SAMPLING))


@lru_cache(maxsize=1 << 16)
def work(name: str) -> str:
    """The category of a kernel or operator; what wraps a collective, which is counted apart, is overhead."""
    if name == PARAM_COMMS or collective(name):
        return OVERHEAD
    return next((category for pattern, category in WORK if pattern.search(name)), OTHER)
