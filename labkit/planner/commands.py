"""The exact commands of a planned training: the lab's own, and what it runs, for doing it by hand or elsewhere."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from labkit import files, settings
from labkit.engine import variants
from labkit.extract import default_layers
from labkit.planner.plan import Plan
from labkit.planner.work import Work

PORT = 8000
OWN_CODE = {"trust-remote-code": True}  # lets code run that comes with a model: in lines for people to run alone
# Flags of engines that a family of targets wants besides; from vLLM's own recipes.
FAMILIES = {"kimi": OWN_CODE | {"reasoning-parser": "kimi_k2", "tool-call-parser": "kimi_k2"}}
HUB = {"kimi-k2.5": "moonshotai/Kimi-K2.5"}


@dataclass(frozen=True)
class Command:
    """A command line and what it is for."""

    what: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        """The line as a shell takes it."""
        return shlex.join(self.words)


def commands(plan: Plan, *, run_id: str = "", free_gb: float = 0, rent_after_days: float = 2) -> list[Command]:
    """The lab's commands in order, then those that it runs itself.

    Servers are vLLM's on the planned machine's GPUs; trainers the lab's under accelerate, and speculators'.
    """
    run_id = run_id or case_of(plan) or f"{plan.target.name}-{plan.machine.name}"
    folder = f"outputs/{run_id}/04_eagle3_pipeline"
    return [
        Command("the versions and the machine", ("labkit", "doctor")),
        Command("this plan again", planned(plan, free_gb, rent_after_days)),
        Command("every stage, engine command and refusal, nothing started", (*lab(plan, run_id), "--dry-run")),
        Command("all of it; the same command goes on after an interruption", lab(plan, run_id)),
        Command("answers: the server", serve(plan, "baseline")),
        Command("hidden states: the server", serve(plan, "extract", **places(plan, folder))),
        Command("training on all GPUs", launch(plan, f"{folder}/training.json")),
        Command("the same training with speculators, from the same files", speculators(plan, folder)),
        Command(
            "the head served",
            serve(
                plan, "eagle3", port=PORT + 1, head=f"{folder}/head", num_speculative_tokens=plan.work.ttt_steps
            ),
        ),
        Command("does it pay: both servers measured", evaluation(run_id)),
    ]


def planned(plan: Plan, free_gb: float, rent_after_days: float) -> tuple[str, ...]:
    """`labkit plan --train` with this plan's amounts."""
    work = plan.work
    words = ["labkit", "plan", "--train", "--target", plan.target.name, "--hardware", plan.machine.name]
    words += ["--conversations", str(work.conversations), "--prompt-tokens", str(work.prompt_tokens)]
    words += ["--answer-tokens", str(work.answer_tokens), "--epochs", str(work.epochs)]
    words += ["--draft-vocab-size", str(work.draft_vocab_size), "--ttt-steps", str(work.ttt_steps)]
    words += ["--fp8"] if work.item_bytes == 1 else []
    words += ["--on-the-fly"] if not work.stored else []
    words += ["--disk-gb", f"{free_gb:g}"] if free_gb else []
    return (*words, "--rent-after-days", f"{rent_after_days:g}")


def lab(plan: Plan, run_id: str) -> tuple[str, ...]:
    """`labkit run 04` with this plan's amounts: a known case's parameter files, and what differs from them."""
    case, known = case_of(plan), shipped(plan)
    words = ["labkit", "run", "04", "--run-id", run_id, *(["--params", f"data/params/{case}"] if case else [])]
    given = {name: value for name, value in amounts(plan).items() if known.get(name) != value}
    return (*words, *(word for name, value in given.items() for word in ("-p", f"{name}={value}")))


def shipped(plan: Plan) -> dict[str, Any]:
    """Notebook 04's parameters in the known case's files; empty where none are shipped."""
    case = case_of(plan)
    path = settings.root() / "data" / "params" / case / "04_eagle3_pipeline.yaml"
    return yaml.safe_load(path.read_text()) if case else {}


def amounts(plan: Plan) -> dict[str, Any]:
    """Notebook 04's parameters that say what the plan says."""
    work, served = plan.work, plan.served
    given: dict[str, Any] = {"target": model_of(plan), "scale": "full", "num_prompts": work.conversations}
    given |= {"max_tokens": work.answer_tokens, "max_model_len": context(work), "epochs": work.epochs}
    given |= {"draft_vocab_size": work.draft_vocab_size, "ttt_steps": work.ttt_steps}
    given |= {"batch_tokens": work.batch_tokens, "concurrency": served.streams if served else work.streams}
    given |= {"tensor_parallel_size": served.tensor_parallel_size if served else 1}
    given |= {"hidden_states": "fp8"} if work.item_bytes == 1 else {}
    given |= {} if work.stored else {"states_from": "on-the-fly"}
    given |= {"plan_for": plan.target.name, "plan_hardware": plan.machine.name}
    given |= {"plan_conversations": work.conversations, "plan_tokens": work.length}
    return given | ({"plan_disk_gb": plan.free_gb} if plan.free_gb is not None else {})


def case_of(plan: Plan) -> str:
    """The name of the parameter files for this target on this machine; "" where none are shipped."""
    for path in sorted((settings.root() / "data" / "scenarios").glob("*.json")):
        told = files.read_json(path)
        known = (settings.root() / "data" / "params" / path.stem).is_dir()
        if known and (told["target"], told["hardware"]) == (plan.target.name, plan.machine.name):
            return path.stem
    return ""


def model_of(plan: Plan) -> str:
    """What an engine is told to load: the hub id of a shipped geometry where that is known, else its name."""
    return HUB.get(plan.target.name, plan.target.name)


def context(work: Work) -> int:
    """The context of the servers: a conversation and a margin, in whole thousands of 1,024."""
    return -(-(work.length + 256) // 1024) * 1024


def serve(plan: Plan, variant: str, **options: Any) -> tuple[str, ...]:
    """`vllm serve` of a variant on the planned machine's GPUs: the lab's own flags and the family's."""
    work, served = plan.work, plan.served
    own = {"max_model_len": context(work), "max_num_seqs": served.streams if served else work.streams}
    own |= {"tensor_parallel_size": served.tensor_parallel_size if served else plan.machine.gpus}
    chosen = variants.options_of(variant, own | {"flags": family_flags(plan.target.name)} | options)
    flags = {"host": "127.0.0.1", "port": chosen["port"] or PORT, "served-model-name": plan.target.name}
    flags |= variants.flags_of(variant, chosen, on_cpu=False)
    if served and served.replicas > 1:
        flags["data-parallel-size"] = served.replicas
    return ("vllm", "serve", model_of(plan), *variants.arguments(flags))


def family_flags(target: str) -> dict[str, Any]:
    """What the family of a target (its name, directory or hub id) wants besides."""
    name = Path(target).name.lower()
    return next((dict(flags) for family, flags in FAMILIES.items() if name.startswith(family)), {})


def brings_code(target: str) -> bool:
    """Whether the target's tokenizer or model is code of its own, which engines run only when told to."""
    return OWN_CODE.items() <= family_flags(target).items()


def places(plan: Plan, folder: str) -> dict[str, Any]:
    """Layers and folder of the extraction."""
    count = plan.target.num_hidden_layers
    return {"layers": [*default_layers(count), count], "storage": f"{folder}/staging"}


def launch(plan: Plan, job: str) -> tuple[str, ...]:
    """accelerate's launcher over the lab's trainer; notebook 04 writes the job file."""
    gpus = plan.machine.gpus
    words = ["accelerate", "launch", "--num_processes", str(gpus), "--num_machines", "1"]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no", *(["--multi_gpu"] if gpus > 1 else [])]
    return (*words, "-m", "labkit.train", job)


def speculators(plan: Plan, folder: str) -> tuple[str, ...]:
    """speculators' own trainer (0.9) on the lab's files, by the settings that the lab's training has."""
    from labkit.train import peer

    place, size = Path(folder), min(plan.work.draft_vocab_size, plan.target.vocab_size)
    layers = default_layers(plan.target.num_hidden_layers)
    chosen = settings.Eagle3Pipeline.of(shipped(plan) | amounts(plan))
    flags = peer.options(chosen, model_of(plan), place / "speculators", place / "hidden_states", size, layers)
    flags |= OWN_CODE if brings_code(plan.target.name) else {}
    return tuple(peer.words(flags, plan.machine.gpus))


def evaluation(run_id: str) -> tuple[str, ...]:
    """Notebook 05 against the plain server and the one with the head."""
    servers = {"server": f"http://127.0.0.1:{PORT}", "variant_server": f"http://127.0.0.1:{PORT + 1}"}
    words = [word for name, value in servers.items() for word in ("-p", f"{name}={value}")]
    return (
        "labkit",
        "run",
        "05",
        "--run-id",
        run_id,
        *words,
        "-p",
        f"head={Path('outputs') / run_id}/04_eagle3_pipeline/head",
    )
