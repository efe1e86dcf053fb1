"""The serving variants as data: each is a set of vLLM flags over the same base."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import LabError

if TYPE_CHECKING:
    import pandas as pd

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


def ngram_gpu(options: Options) -> Flags:
    """The same lookup in vLLM's GPU proposer, which keeps asynchronous scheduling (GPUs only)."""
    return {"speculative-config": {"method": "ngram_gpu"}}


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


def nothing(options: Options) -> Flags:
    """No flags of its own."""
    return {}


@dataclass(frozen=True)
class Variant:
    """A way to serve a model, as data: what it changes over its parent, which is the base where none is named.

    `options` are what a caller may set, with defaults (... has to be given); `flags` turns them into vLLM's
    options; `environment` goes to the server's process.
    """

    what: str
    flags: Callable[[Options], Flags] = nothing
    options: Mapping[str, Any] = field(default_factory=dict)
    parent: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


TWO_RANKS = {"tensor_parallel_size": 2}
LOOKUP = {"num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
VARIANTS: dict[str, Variant] = {
    "baseline": Variant("the model as it is"),
    # vLLM turns asynchronous scheduling off for the n-gram proposer on the CPU: the baseline under the same rule.
    "baseline-sync": Variant("asynchronous scheduling off", lambda options: {"no-async-scheduling": True}),
    "ngram": Variant("speculation by prompt lookup", ngram, LOOKUP),
    # BACKGROUND.md's own configuration: with only the maximum given, vLLM takes it as the minimum too.
    "ngram-seed": Variant("prompt lookup of 4-grams only", options={"prompt_lookup_min": 4}, parent="ngram"),
    "ngram-gpu": Variant("prompt lookup on the GPU, asynchronous scheduling kept", ngram_gpu, parent="ngram"),
    "eagle3": Variant("speculation by a trained head", eagle3, {"head": ..., "num_speculative_tokens": 3}),
    "extract": Variant("hidden states to disk", extract, {"layers": ..., "storage": ...}),
    "tp2-profile": Variant("two ranks under the profiler", options={"trace_dir": ..., **TWO_RANKS}),
    # Cheaper than speculation: other ways to share the model between ranks (labkit.fixes compares them).
    "single-rank": Variant("the whole model on one rank: no AllReduce", options={"tensor_parallel_size": 1}),
    "nccl-allreduce": Variant(
        "NCCL's AllReduce instead of vLLM's own", lambda options: {"disable-custom-all-reduce": True}, TWO_RANKS
    ),
    "fused-allreduce": Variant(
        "AllReduce, residual and norm in one kernel (FlashInfer)", fused_allreduce, TWO_RANKS
    ),
    "expert-parallel": Variant(
        "whole experts dealt out to ranks, not slices",
        lambda options: {"enable-expert-parallel": True},
        TWO_RANKS,
    ),
}
# What every variant takes besides its own options. `trace_dir`: run under the profiler, "" without; `flags`: more
# of vLLM's own options, by name without dashes, over everything else; `environment`: more of its variables.
COMMON: Options = {
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "port": 0,
    "tensor_parallel_size": 1,
    "seed": 0,
    "trace_dir": "",
    "flags": {},
    "environment": {},
}


def lineage(variant: str) -> list[Variant]:
    """A variant and what it inherits from, the oldest first; raises UnknownVariant."""
    if variant not in VARIANTS:
        raise UnknownVariant(f"there is no variant {variant!r}", f"use one of {', '.join(VARIANTS)}")
    found = VARIANTS[variant]
    return [*(lineage(found.parent) if found.parent else []), found]


def options_of(variant: str, overrides: Options) -> Options:
    """All options of a variant with the overrides applied; raises UnknownVariant for a wrong name."""
    options = dict(COMMON)
    for each in lineage(variant):
        options |= each.options
    unknown = [name for name in overrides if name not in options]
    if unknown:
        raise UnknownVariant(
            f"variant {variant!r} has no option {', '.join(unknown)}", f"its options: {', '.join(options)}"
        )
    options |= overrides
    if "host" in options["flags"]:
        raise UnknownVariant(
            f"flags name the host {options['flags']['host']!r}",
            "the lab's servers listen on this machine alone: reach it through a tunnel, or start vLLM yourself "
            "and give its address by `server`",
        )
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
    base = joined(base, own_flags(variant, options, on_cpu=on_cpu))
    return base | options["flags"]


def own_flags(variant: str, options: Options, *, on_cpu: bool) -> Flags:
    """What a variant and its parents set beyond the base, the parents first."""
    own: Flags = {}
    for each in lineage(variant):
        own = joined(own, each.flags(options | {"on_cpu": on_cpu}))
    return own


def joined(before: Flags, after: Flags) -> Flags:
    """Both sets of flags; where both have a flag, the later value counts, merged with the earlier if it can be."""
    return before | {
        name: before[name] | value if merges(before.get(name), value) else value for name, value in after.items()
    }


def merges(before: Any, after: Any) -> bool:
    """Whether a child's value adds to its parent's: both are objects of settings."""
    return isinstance(before, dict) and isinstance(after, dict)


def environment_of(variant: str, options: Options) -> dict[str, str]:
    """Environment variables that the variant and its options ask for."""
    found: dict[str, str] = {}
    for each in lineage(variant):
        found |= each.environment
    return found | {name: str(value) for name, value in options["environment"].items()}


def diff(variant: str, against: str = "baseline", *, on_cpu: bool = False, **overrides: Any) -> pd.DataFrame:
    """What serving a variant changes, before anything runs: a row a flag or variable that differs.

    Columns setting before after; "" where a side does not have it. `overrides` are options of the variant; those
    that the other one has as well apply to it too. Raises UnknownVariant.
    """
    import pandas as pd

    sides = []
    for name in (against, variant):
        known = set(COMMON).union(*(each.options for each in lineage(name)))
        options = options_of(name, {o: v for o, v in overrides.items() if o in known or name == variant})
        words = {f"--{flag}": shown(value) for flag, value in flags_of(name, options, on_cpu=on_cpu).items()}
        sides.append(words | environment_of(name, options))
    before, after = ({name: text for name, text in side.items() if text} for side in sides)
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    rows = [{"setting": name, "before": before.get(name, ""), "after": after.get(name, "")} for name in changed]
    return pd.DataFrame(rows, columns=["setting", "before", "after"])


def changes(variant: str, attached: str = "", **overrides: Any) -> str:
    """`diff` to the baseline in Markdown, nothing cut off: as options to copy, a line for each.

    `attached` is the address of somebody's own server, if it is one: how that was started the lab does not know,
    so it says how it should have been. Raises UnknownVariant.
    """
    lines = []
    for name, value in diff(variant, **overrides)[["setting", "after"]].itertuples(index=False):
        between = " " if name.startswith("--") else "="  # else a variable of the environment
        given = name if value == "on" else f"{name}{between}{shlex.quote(value)}"
        lines.append(given if value else f"without {name}")
    told = (
        "The lab does not see how `variant_server` was started. Over the baseline's command it needs:"
        if attached
        else f"What `{variant}` changes in the baseline's command:"
    )
    return "\n".join([told, "", "```", *(lines or ["nothing"]), "```"])


def shown(value: Any) -> str:
    """A flag's value as the command line has it; a bare flag says so."""
    if value is None:
        return ""
    return "on" if value is True else json.dumps(value) if isinstance(value, dict) else str(value)


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
