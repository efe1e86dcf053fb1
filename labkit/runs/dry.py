"""What a run would do, stage by stage: plan, servers with their command lines, refusals. Nothing is started."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit import targets
from labkit.engine import launch, variants
from labkit.errors import LabError
from labkit.runs import inputs
from labkit.runs.execute import checked, find_notebook, finished, measured
from labkit.settings import NOTEBOOKS, Settings

ANY_PORT = "<a free port>"
LOOKUP = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")


@dataclass(frozen=True)
class Serving:
    """A server of a stage: started here as a variant with options, or attached to where `url` says."""

    variant: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    url: str = ""
    note: str = ""


def report(notebook: str, parameters: Mapping[str, Any]) -> tuple[str, bool]:
    """The text for one notebook or all, and whether nothing was refused.

    Raises BadParameter and UnknownNotebook as a real run does, before anything else.
    """
    if notebook == "all":
        chosen = checked(parameters)
    else:
        name = find_notebook(notebook)
        chosen = {name: NOTEBOOKS[name].of(parameters)}
    lines, well = [], True
    for each in chosen.values():
        told, refused = stage(each)
        lines += [*told, *(f"  REFUSED: {indented(error)}" for error in refused), ""]
        well = well and not refused
    lines.append("nothing was started" + ("" if well else "; what is refused above would stop the run"))
    return "\n".join(lines), well


def stage(chosen: Settings) -> tuple[list[str], list[LabError]]:
    """The lines for one stage, and what it refuses."""
    lines = [f"{chosen.notebook} -> {chosen.folder}"]
    if finished(chosen):
        return [*lines, f"  up to date, {measured(chosen)}: skipped; --force measures again"], []
    lines += [f"  {name} = {value!r}" for name, value in ({"scale": chosen.scale} | given(chosen)).items()]
    refused: list[LabError] = []
    if chosen.notebook.startswith("04"):
        told, refused = pipeline_stage(chosen)
        lines += told
    try:
        refuse(chosen)
    except LabError as error:
        refused.append(error)
    try:
        for server in servers(chosen):
            lines += [f"  {line}" for line in server_lines(chosen, server)]
    except LabError as error:  # what was refused above, mostly
        refused += [] if str(error) in map(str, refused) else [error]
    return lines, refused


def given(chosen: Settings) -> dict[str, Any]:
    """The parameters that differ from what the scale would give."""
    plain = type(chosen).of({"scale": chosen.scale})
    return {name: value for name, value in dataclasses.asdict(chosen).items() if value != getattr(plain, name)}


def servers(chosen: Settings) -> Iterator[Serving]:
    """The servers of a stage in their order."""
    yield from {"01": profiled, "02": benchmarked, "04": extracted, "05": evaluated}.get(
        chosen.notebook[:2], none
    )(chosen)


def none(chosen: Any) -> Iterator[Serving]:
    """Notebook 03 records through Transformers."""
    yield from ()


def profiled(chosen: Any) -> Iterator[Serving]:
    """Notebook 01: one server under the profiler, unless traces are brought."""
    if chosen.server or not chosen.trace_dir:
        options = {"trace_dir": chosen.folder / "traces", "tensor_parallel_size": chosen.tensor_parallel_size}
        options |= {"max_model_len": chosen.max_model_len}
        note = f"then the fixes ({chosen.fixes}) that mean something for the profile" if not chosen.server else ""
        yield Serving("tp2-profile", options, chosen.server, note)


def benchmarked(chosen: Any) -> Iterator[Serving]:
    """Notebook 02: plain, plain without asynchronous scheduling, n-gram."""
    served = served_as(chosen)
    yield Serving("baseline", served, chosen.server)
    if not chosen.server:
        yield Serving("baseline-sync", served)
    if chosen.variant_server or not chosen.server:
        yield Serving("ngram", served | {name: getattr(chosen, name) for name in LOOKUP}, chosen.variant_server)


def served_as(chosen: Any) -> dict[str, Any]:
    """The options of the servers that a benchmark starts."""
    from labkit.bench.measure import served_as

    return {name: value for name, value in served_as(chosen).items() if name != "log_dir"}


def extracted(chosen: Any) -> Iterator[Serving]:
    """Notebook 04: the server that answers, and the one that writes hidden states, where either is wanted."""
    from labkit import pipeline

    if chosen.answers == "target" or chosen.prompts == "self":
        yield Serving("baseline", pipeline.serving(chosen))
    if chosen.states_backend != "vllm":
        return
    with_layers = pipeline.extracting(geometry_of(chosen), chosen.folder / "hidden_states", chosen.aux_layers)
    yield Serving("extract", pipeline.serving(chosen) | with_layers)


def evaluated(chosen: Any) -> Iterator[Serving]:
    """Notebook 05: with the head, then plain; n-gram's rows are notebook 02's where they fit."""
    head = chosen.head or chosen.folder.parent / "04_eagle3_pipeline" / "head"
    served = served_as(chosen)
    served["max_num_seqs"] = max(served["max_num_seqs"], chosen.tokens_a_step)
    for k in chosen.ks if chosen.variant_server or not chosen.server else ():
        options = {"head": str(head), "num_speculative_tokens": k}
        yield Serving("eagle3", served | options, chosen.variant_server)
    yield Serving("baseline", served, chosen.server, "where 02's rows do not fit")
    if not chosen.server:
        yield Serving("ngram", served | variants.LOOKUP, "", "where 02's rows do not fit")


def server_lines(chosen: Settings, server: Serving) -> list[str]:
    """What is said of a server: its address, or its command line and environment."""
    note = f" ({server.note})" if server.note else ""
    if server.url:
        return [f"server {server.variant}: attached at {server.url}{note}"]
    options = variants.options_of(server.variant, dict(server.options))
    words = argv(chosen.target, server.variant, options)
    where = "" if here(chosen.target) else ", on a machine that has the target"
    extra = launch.environment(options) | variants.environment_of(server.variant, options)
    shown = (
        " ".join(f"{name}={shlex.quote(value)}" for name, value in extra.items()) if here(chosen.target) else ""
    )
    lines = [f"server {server.variant}{note}{where}:", f"  {shlex.join(words)}"]
    lines += [f"  environment: {shown}"] if shown else []
    return lines if here(chosen.target) else [*lines, *recipe(chosen.target)]


def recipe(target: str) -> list[str]:
    """What vLLM's own recipe for a target that is not here has besides, which the lab does not set by itself."""
    from labkit.planner import commands

    flags = commands.family_flags(target)
    told = [f"  vLLM's recipe for it adds: {shlex.join(variants.arguments(flags))}"] if flags else []
    if commands.brings_code(target):
        told.append(
            "  --trust-remote-code runs code that comes with the model: the lab never does unasked, so where the "
            "model needs it this server is to be started by hand"
        )
    return told


def argv(target: str, variant: str, options: dict[str, Any]) -> list[str]:
    """The words that start the server: those of this machine, or a GPU machine's where the target is not here."""
    if here(target):
        folder = place(target)
        words = launch.command(folder, Path(target).name, variant, 0, options)
        words[words.index("--port") + 1] = ANY_PORT
        return words
    flags = {"model": target, "served-model-name": target, "host": "127.0.0.1", "port": ANY_PORT}
    flags |= variants.flags_of(variant, options, on_cpu=False)
    return ["python", "-m", launch.MODULE, *variants.arguments(flags)]


def here(target: str) -> bool:
    """Whether the target's files are on this machine, or the lab builds them."""
    return target in targets.NAMES or Path(target).expanduser().is_dir()


def place(target: str) -> Path:
    """Where a target of this machine lies; a shipped one that was never built is built by the run, not now."""
    if target in targets.NAMES:
        return targets.folder_of(target)
    return Path(target).expanduser().resolve()


def geometry_of(chosen: Any) -> targets.Geometry:
    """The target's geometry: its own, or that of `plan_for` where the target is not on this machine."""
    if here(chosen.target) and place(chosen.target).is_dir():
        return targets.geometry(place(chosen.target))
    return targets.geometry(chosen.target if here(chosen.target) else chosen.plan_for)


def pipeline_stage(chosen: Any) -> tuple[list[str], list[LabError]]:
    """Notebook 04: what is planned, what is there already, and what does not fit."""
    from labkit import pipeline
    from labkit.planner import DoesNotFit, story, writing
    from labkit.planner.head import head_of
    from labkit.planner.here import obstacles_here
    from labkit.planner.obstacles import size
    from labkit.planner.plan import disk_needed_gb, told_range, verdict

    plan = story.of_run(chosen)
    word, why = verdict(plan, chosen.rent_after_days)
    lines = [f"  plan for {plan.target.name} on {plan.machine.what}: {word}: {why}"]
    lines += [f"    {step}: {told_range(value)} hours" for step, value in plan.hours.items()]
    lines.append(f"    {plan.work.tokens:,} tokens, {size(plan.disk_gb)} of disk; {writing.FILE} has the rest")
    found = list(plan.obstacles) if not here(chosen.target) else []
    work, shape = pipeline.work_of(chosen), geometry_of(chosen)
    needed = disk_needed_gb(shape, head_of(shape, work.draft_vocab_size), work)
    lines.append(f"  this run: at most {work.tokens:,} tokens, {size(needed)} of disk")
    lines += [f"  stage {name}: {told}" for name, told in progress(chosen).items()]
    if here(chosen.target):
        found += obstacles_here(shape, work, chosen.folder)
    return lines, [DoesNotFit(o.what, "; or ".join(o.instead)) for o in found]


def progress(chosen: Any) -> dict[str, str]:
    """What of each stage is there: answers, hidden states, head."""
    total = chosen.num_prompts + chosen.held_out
    store = chosen.folder / "data" / "answers.jsonl"
    answers = sum(1 for line in store.open("rb") if line.strip()) if store.exists() else 0
    states = len(list((chosen.folder / "hidden_states").glob("hs_*.safetensors")))
    head = (chosen.folder / "head" / "config.json").exists()
    return {
        "answers": f"{answers:,} stored, {total:,} prompts",
        "states": f"{states:,} files of {total:,}, kept where they fit",
        "training": "a head is there, kept where data and settings are the same" if head else "to do",
    }


def refuse(chosen: Any) -> None:
    """Raise what a run would raise before its first server: a missing target or prompt file, impossible ranks."""
    if not here(chosen.target) and not getattr(chosen, "server", ""):
        raise targets.UnknownTarget(
            f"target {chosen.target!r} is not on this machine",
            "run this on the machine that has it (a hub id is fetched there), or give its directory",
        )
    ranks = getattr(chosen, "tensor_parallel_size", 1)
    if here(chosen.target) and place(chosen.target).is_dir() and ranks > 1:
        targets.geometry(place(chosen.target)).require_tensor_parallel(ranks)
    if chosen.notebook.startswith("04"):
        from labkit import pipeline

        pipeline.refuse_choices(chosen, geometry_of(chosen))
    inputs.refuse(chosen)


def indented(error: LabError) -> str:
    """An error's text, its second line indented further."""
    return str(error).replace("\n", "\n  ")
