"""The serving variants as data: each is a set of vLLM flags over the same base."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.errors import LabError

Options = dict[str, Any]
Flags = dict[str, Any]  # vLLM's option name without dashes: value; True is a bare flag, None leaves it out


class UnknownVariant(LabError):
    """A variant name, or one of its options, does not exist."""


def ngram(options: Options) -> Flags:
    """Prompt-lookup speculation; the CPU build has no GPU proposer, so this is vLLM's `ngram` everywhere."""
    return {
        "speculative-config": {
            "method": "ngram",
            "num_speculative_tokens": options["num_speculative_tokens"],
            "prompt_lookup_max": options["prompt_lookup_max"],
            "prompt_lookup_min": options["prompt_lookup_min"],
        }
    }


def eagle3(options: Options) -> Flags:
    """Speculation with a trained EAGLE-3 head in `head` (a speculators-format directory)."""
    return {
        "speculative-config": {
            "method": "eagle3",
            "model": str(options["head"]),
            "num_speculative_tokens": options["num_speculative_tokens"],
        }
    }


def extract(options: Options) -> Flags:
    """Hidden states of `layers` (ids of residuals entering a layer; the layer count is the last output).

    They are written to `storage`, through the lab's connector where the engine runs on the CPU. Prefix caching
    would leave out the states of cached tokens (vllm#44486), so it is off.
    """
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(options["layers"])}}
    transfer: dict[str, Any] = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(options["storage"])},
    }
    if options["on_cpu"]:
        transfer |= {
            "kv_connector": "CpuHiddenStatesConnector",
            "kv_connector_module_path": "labkit.connector",
        }
    return {
        "speculative-config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": layers,
        },
        "kv-transfer-config": transfer,
        "no-enable-prefix-caching": True,
    }


def profiler(trace_dir: Path | str) -> Flags:
    """vLLM's torch profiler, to be started by request; traces go to `trace_dir`, one file a rank."""
    config = {
        "profiler": "torch",
        "torch_profiler_dir": str(Path(trace_dir).resolve()),
        "torch_profiler_record_shapes": True,  # the bytes of a collective are in its input shapes
        "ignore_frontend": True,  # the API process's own trace holds no step, and its name the host's
        "torch_profiler_with_stack": False,  # stacks slow the step down and carry file paths
    }
    return {"profiler-config": config}


def fused_allreduce(options: Options) -> Flags:
    """AllReduce, residual add and RMSNorm in one kernel (FlashInfer's; Hopper and Blackwell, NVLink)."""
    return {"compilation-config": {"pass_config": {"fuse_allreduce_rms": True}}}


# name: (flags over the base, options with their defaults; ... marks one that has to be given)
VARIANTS: dict[str, tuple[Callable[[Options], Flags], Options]] = {
    "baseline": (lambda options: {}, {}),
    "ngram": (ngram, {"num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 1}),
    # BACKGROUND.md's own configuration: with only the maximum given, vLLM takes it as the minimum too.
    "ngram-seed": (ngram, {"num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 4}),
    "eagle3": (eagle3, {"head": ..., "num_speculative_tokens": 3}),
    "extract": (extract, {"layers": ..., "storage": ...}),
    "tp2-profile": (lambda options: {}, {"trace_dir": ..., "tensor_parallel_size": 2}),
    # Cheaper than speculation: other ways to share the model between ranks (labkit.fixes compares them).
    "single-rank": (lambda options: {}, {"tensor_parallel_size": 1}),
    "nccl-allreduce": (lambda options: {"disable-custom-all-reduce": True}, {"tensor_parallel_size": 2}),
    "fused-allreduce": (fused_allreduce, {"tensor_parallel_size": 2}),
    "expert-parallel": (lambda options: {"enable-expert-parallel": True}, {"tensor_parallel_size": 2}),
}
# What every variant takes besides its own options. `trace_dir`: run under the profiler, "" without; `flags`: more
# of vLLM's own options, by name without dashes, over everything else.
COMMON: Options = {
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "port": 0,
    "tensor_parallel_size": 1,
    "seed": 0,
    "trace_dir": "",
    "flags": {},
}


def options_of(variant: str, overrides: Options) -> Options:
    """All options of a variant with the overrides applied; raises UnknownVariant for a wrong name."""
    if variant not in VARIANTS:
        raise UnknownVariant(f"there is no variant {variant!r}", f"use one of {', '.join(VARIANTS)}")
    options = COMMON | VARIANTS[variant][1]
    unknown = [name for name in overrides if name not in options]
    if unknown:
        raise UnknownVariant(
            f"variant {variant!r} has no option {', '.join(unknown)}", f"its options: {', '.join(options)}"
        )
    options |= overrides
    missing = [name for name, value in options.items() if value is ...]
    if missing:
        raise UnknownVariant(f"variant {variant!r} needs {', '.join(missing)}", "pass it to engine.serve")
    return options


def flags_of(variant: str, options: Options, *, on_cpu: bool) -> Flags:
    """vLLM's flags for a variant: the base that all share, then its own."""
    base: Flags = {
        "max-model-len": options["max_model_len"],
        "max-num-seqs": options["max_num_seqs"],
        "tensor-parallel-size": options["tensor_parallel_size"],
        "seed": options["seed"],
        # Repeats of a prompt must cost what the first one costs, or TTFT and step times mean nothing.
        "no-enable-prefix-caching": True,
        "generation-config": "vllm",
        "enable-log-requests": None,
    }
    if on_cpu:
        base |= {"enforce-eager": True, "dtype": "bfloat16"}
    if options["trace_dir"]:
        base |= profiler(options["trace_dir"])
    return base | VARIANTS[variant][0](options | {"on_cpu": on_cpu}) | options["flags"]


def arguments(flags: Flags) -> list[str]:
    """The flags as command-line arguments; mappings become JSON."""
    words: list[str] = []
    for name, value in flags.items():
        if value is None:
            continue
        words.append(f"--{name}")
        if value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def storage_of(options: Options) -> list[Path]:
    """The folders that the variant's server writes to and that have to exist."""
    return [Path(options[name]) for name in ("storage", "trace_dir") if options.get(name)]
