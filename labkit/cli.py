"""The `labkit` command: a few lines each over the modules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from labkit import command, settings
from labkit.calling import copyable

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
Parameters = Annotated[
    list[str] | None,
    typer.Option("--parameter", "-p", help="name=value; for `all`, 02.name=value is for notebook 02 alone"),
]


TRAIN = "With --train"
PATHS = ("target", "prompts", "head", "start", "trace_dir")


def parse_parameters(pairs: list[str] | None) -> dict[str, str]:
    """name: value, from name=value; raises BadParameter for anything else."""
    given = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise settings.BadParameter(f"-p {pair!r} is no parameter", "write it as -p name=value")
        given[name.strip()] = whole_path(name, value)
    return given


def whole_path(name: str, value: str) -> str:
    """The value of a parameter that may be a path, made absolute where it is one from the folder we are in."""
    path = Path(value).expanduser()
    is_path = name.rpartition(".")[2] in PATHS and ("/" in value or "." in value) and path.exists()
    return str(path.absolute()) if is_path else value


@app.command()
def run(
    notebook: Annotated[str, typer.Argument(help="01 to 05, a notebook's name, or all")],
    parameter: Parameters = None,
    run_id: Annotated[str, typer.Option(help="folder under outputs/; <target>-<scale> where left out")] = "",
    scale: Annotated[str, typer.Option(help="smoke, demo or full")] = "",
    force: Annotated[bool, typer.Option(help="run stages again that are up to date")] = False,
    params: Annotated[
        str, typer.Option(help="a YAML file of parameters, or a folder with one a notebook (02.yaml)")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="say what each stage would do and start; nothing is started")
    ] = False,
    help_parameters: Annotated[bool, typer.Option(help="list the notebook's parameters and stop")] = False,
) -> None:
    """Run a notebook headless into outputs/<run id>/, or all five in order."""
    if help_parameters:
        typer.echo(describe_parameters(notebook))
        return
    given = parse_parameters(parameter)
    given |= {name: value for name, value in {"run_id": run_id, "scale": scale}.items() if value}
    if params:
        from labkit.runs import parameter_files

        given = parameter_files.merged(parameter_files.read(Path(params), notebook), given)
        given.setdefault("run_id", Path(params).name if Path(params).is_dir() else default_run_id(given))
    if dry_run:
        from labkit.runs import dry

        if notebook == "all":
            given.setdefault("run_id", default_run_id(given))
        text, well = dry.report(notebook, given)
        typer.echo(copyable(text))
        raise typer.Exit(0 if well else 1)
    execute(notebook, given, force=force)


def execute(notebook: str, given: dict[str, str], *, force: bool) -> None:
    """Run one notebook and say what it found, or all with their pages and the headline table."""
    from labkit import runs
    from labkit.runs import ending, headline

    if notebook != "all":
        typer.echo(f"\n{ending.ending(runs.execute(notebook, given, force=force))}")
        return
    given.setdefault("run_id", default_run_id(given))
    folder = runs.run_all(given, force=force)
    index = runs.render(folder)
    typer.echo(f"\n{headline.text_table(runs.headline_of(folder))}\n\n  {index}")


def default_run_id(given: Mapping[str, Any]) -> str:
    """The run folder of all notebooks where none is named: <target>-<scale>."""
    return f"{Path(str(given.get('target', 'smollm2'))).name}-{given.get('scale', 'demo')}"


def describe_parameters(notebook: str) -> str:
    """A notebook's parameters with type and default; 0 or "" means that the scale decides."""
    from labkit.runs import find_notebook

    names = list(settings.NOTEBOOKS) if notebook == "all" else [find_notebook(notebook)]
    lines = []
    for name in names:
        cls = settings.NOTEBOOKS[name]
        lines += [
            name,
            *(f"  {field.name}: {field.type} = {field.default!r}" for field in cls.parameters().values()),
        ]
    return "\n".join(lines)


@app.command()
def render(
    run: Annotated[str, typer.Argument(help="a run id, a run folder anywhere, or a zip of one")],
    out: Annotated[
        str, typer.Option(help="folder for the pages; the run folder, or RUN-pages beside RUN.zip, if empty")
    ] = "",
) -> None:
    """Write self-contained HTML pages and index.html for a run."""
    from labkit import runs
    from labkit.runs import archive, headline

    index = runs.render(run, Path(out) if out else None)
    with archive.opened(run) as folder:
        typer.echo(f"{headline.text_table(runs.headline_of(folder))}\n\n  {index}")


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="RUN_A", help="a run id, a run folder, or a zip of one")],
    second: Annotated[str, typer.Argument(metavar="RUN_B", help="what it is compared with")],
    out: Annotated[str, typer.Option(help="the page; outputs/diff-RUN_A-RUN_B.html if empty")] = "",
) -> None:
    """Compare two runs: settings, versions, hardware, headline figures and result files, as text and as a page."""
    from labkit.runs import diff as comparing

    found = comparing.diff(first, second)
    typer.echo(f"{comparing.text(found)}\n\n  {comparing.page(found, Path(out) if out else None)}")


@app.command()
def doctor(
    probe: Annotated[bool, typer.Option("--probe", help="go through every seam: minutes")] = False,
    target: Annotated[str, typer.Option(help="the target to probe")] = "smollm2",
    layers: Annotated[str, typer.Option(help='layer ids to probe, as "2,15,27"; the default where left out')] = "",
    head: Annotated[str, typer.Option(help="serve this head directory instead of one trained by the probe")] = "",
) -> None:
    """Say whether the installed versions and this machine fit; exit code 1 with the remedy where they do not."""
    from labkit import doctor

    text, well = doctor.report(doctor.examine())
    typer.echo(copyable(text))
    if probe or layers or head:
        for outcome in doctor.probe(target, layers=layers, head=head):
            typer.echo(str(outcome))
        typer.echo("every seam holds")
    if not well:
        raise typer.Exit(1)


@app.command()
def extract(
    dataset: Annotated[Path, typer.Argument(help="the folder with dataset.parquet")],
    out: Annotated[Path, typer.Argument(help="the folder for the states; shards may share it")],
    target: Annotated[str, typer.Option(help="a target's name, a model directory, or a hub id")] = "smollm2",
    server: Annotated[str, typer.Option(help="address of a running extract server; else one is started")] = "",
    layers: Annotated[str, typer.Option(help='layer ids, as "2,15,27"; the default where left out')] = "",
    shard: Annotated[str, typer.Option(help='"2/4" for the second of four workers')] = "",
    form: Annotated[str, typer.Option(help="bf16, zstd (lossless) or fp8")] = "bf16",
    backend: Annotated[str, typer.Option(help="vllm, or transformers for what vLLM cannot serve")] = "vllm",
    concurrency: Annotated[int, typer.Option(help="rows under way")] = 16,
    option: Annotated[list[str] | None, typer.Option("--option", "-o", help="name=value of the server")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="replace states of another target or other layers")
    ] = False,
) -> None:
    """Write the target's hidden states of a data set, or one worker's shard of them, and check them."""
    from labkit import extract as states
    from labkit import pipeline, targets
    from labkit.engine.service import experiment

    options = {"log_dir": out.with_name(f"{out.name}-logs-{shard.replace('/', '-of-')}")} if shard else {}
    options |= experiment.options(parse_parameters(option))
    model = targets.resolve(target)
    source = server or pipeline.extract_server(model, out, layers, **options)
    work = {"layers": layers, "shard": shard, "form": form, "backend": backend, "concurrency": concurrency}
    states.run(dataset, source, out, target=model, replace=force, **work)
    problems = states.verify(out, dataset_dir=dataset, shard=shard)
    typer.echo(f"{len(problems)} problems; the next token agrees in {problems.attrs['agreement']:.1%}")
    if len(problems):
        typer.echo(problems.to_string(index=False))
        raise typer.Exit(1)
    if shard:
        typer.echo(states.shard_done(dataset, out, shard) or f"{out} has every shard")


@app.command()
def swap(
    service: Annotated[str, typer.Argument(help="the systemd service, NAME or NAME.service")],
    command: Annotated[
        list[str] | None, typer.Argument(help="after --: what to run; {url} is the address")
    ] = None,
    variant: Annotated[str, typer.Option(help="ngram, eagle3, baseline, ...")] = "ngram",
    option: Annotated[list[str] | None, typer.Option("--option", "-o", help="name=value of the variant")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="carry it out; without, it is only shown")] = False,
    status: Annotated[bool, typer.Option("--status", help="say how far the last swap is")] = False,
    restore: Annotated[bool, typer.Option("--restore", help="put the service back now")] = False,
    user: Annotated[bool, typer.Option("--user", help="a service of the user's own systemd")] = False,
    systemctl: Annotated[str, typer.Option(help="how to call it, as 'sudo -n systemctl'")] = "systemctl",
    unit_dir: Annotated[
        str, typer.Option(help="folder for the variant's unit; /run/systemd/system if empty")
    ] = "",
    url: Annotated[str, typer.Option(help="the service's address, where its unit does not say it")] = "",
    load_minutes: Annotated[float, typer.Option(help="how long a load may take")] = 100,
) -> None:
    """Run a command against a variant of a systemd service, which comes back afterwards whatever happens."""
    from labkit import engine
    from labkit.engine.service import experiment

    if restore or status:
        found = engine.restore(service, typer.echo) if restore else engine.status(service)
        typer.echo("\n".join(f"{name:10} {value}" for name, value in found.items()))
        return
    places = {"systemctl": systemctl, "user": user, "unit_dir": unit_dir, "url": url}
    options = experiment.options(parse_parameters(option))
    plan = engine.plan(service, variant, load_limit_s=load_minutes * 60, **places, **options)
    typer.echo(str(plan))
    if not apply:
        typer.echo("\nnothing was changed; --apply carries it out")
        return
    with engine.swap(plan, apply=True) as server:
        if not command:
            typer.echo(f"{plan.unit} serves at {server.root_url}; Ctrl-C puts {plan.service} back")
        code = experiment.run(command, server.root_url) if command else experiment.until_interrupted(plan)
    typer.echo(f"{plan.service} is back and answers at {plan.url}")
    raise typer.Exit(code)


@app.command()
def convert_head(
    head: Annotated[str, typer.Argument(help="a head directory, in speculators' or the llama form")],
    out: Annotated[str, typer.Argument(help="the directory to write")],
    form: Annotated[str, typer.Option(help="speculators (vLLM) or llama (vLLM and SGLang)")] = "llama",
) -> None:
    """Write an EAGLE-3 head in its other form; the tensors stay bit for bit the same."""
    from labkit import draft

    typer.echo(f"{draft.convert(Path(head), Path(out), form)} is a head in {form} form")


@app.command()
def average_heads(
    first: Annotated[str, typer.Argument(help="the head of an earlier stage")],
    second: Annotated[str, typer.Argument(help="the one that was trained on from it")],
    out: Annotated[str, typer.Argument(help="the directory to write")],
    share: Annotated[float, typer.Option(help="of the second: 0 to 1")] = 0.5,
    data: Annotated[
        list[Path] | None, typer.Option(help="data sets (folders) whose answers the draft vocabulary counts")
    ] = None,
    target: Annotated[str, typer.Option(help="whose heads they are")] = "smollm2",
) -> None:
    """Write a head between two stages of one training; without --data the second's vocabulary is kept."""
    from labkit import draft, pipeline, targets

    served = targets.resolve(target)
    mapping = pipeline.vocabulary_of(draft.read(Path(second)), data or [], served)
    typer.echo(draft.average(Path(first), Path(second), Path(out), target=served, vocab=mapping, share=share))


@app.command()
def plan(
    target: Annotated[
        str, typer.Option(help="a geometry of data/models, a config.json or its folder")
    ] = "kimi-k2.5",
    hardware: Annotated[str, typer.Option(help="a name in data/hardware.json")] = "rtx-pro-6000-pcie-x8",
    engine: Annotated[str, typer.Option(help='as "vllm 0.16"; the installed vLLM where left out')] = "",
    streams: Annotated[int, typer.Option(help="requests side by side")] = 1,
    context: Annotated[int, typer.Option(help="tokens of context in the cache")] = 2048,
    tensor_parallel_size: Annotated[int, typer.Option(help="ranks; 0: all GPUs")] = 0,
    out: Annotated[str, typer.Option(help="a folder for next-steps.md, or with --train next-steps-eagle.md")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of text")] = False,
    train: Annotated[bool, typer.Option("--train", help="plan a training instead: see below")] = False,
    conversations: Annotated[int, typer.Option(rich_help_panel=TRAIN, help="how many")] = 100_000,
    tokens: Annotated[int, typer.Option(rich_help_panel=TRAIN, help="instead: tokens in all")] = 0,
    prompt_tokens: Annotated[int, typer.Option(rich_help_panel=TRAIN, help="of a conversation")] = 200,
    answer_tokens: Annotated[int, typer.Option(rich_help_panel=TRAIN, help="of a conversation")] = 1848,
    epochs: Annotated[int, typer.Option(rich_help_panel=TRAIN, help="passes over the data")] = 1,
    ttt_steps: Annotated[int, typer.Option(rich_help_panel=TRAIN, help="drafted in a row in training")] = 3,
    draft_vocab_size: Annotated[int, typer.Option(rich_help_panel=TRAIN, help="the head's vocabulary")] = 32_000,
    batch_tokens: Annotated[int, typer.Option(rich_help_panel=TRAIN, help="of a step, on each GPU")] = 8192,
    fp8: Annotated[bool, typer.Option("--fp8", rich_help_panel=TRAIN, help="states in FP8")] = False,
    on_the_fly: Annotated[
        bool, typer.Option("--on-the-fly", rich_help_panel=TRAIN, help="states not stored")
    ] = False,
    disk_gb: Annotated[float, typer.Option(rich_help_panel=TRAIN, help="disk that is free; 0: not known")] = 0,
    rent_after_days: Annotated[float, typer.Option(rich_help_panel=TRAIN, help="longer here: rent")] = 2,
) -> None:
    """Predict what speculation brings before anyone trains, or with --train what training a head takes.

    With --train the exit code is 1 where disk or memory will not do.
    """
    import json

    if train:
        from labkit import planner

        work = planner.Work(
            conversations=planner.conversations_for(tokens, prompt_tokens + answer_tokens)
            if tokens
            else conversations,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            epochs=epochs,
            ttt_steps=ttt_steps,
            draft_vocab_size=draft_vocab_size,
            batch_tokens=batch_tokens,
            item_bytes=1 if fp8 else 2,
            stored=not on_the_fly,
        )
        plan_training(target, hardware, work, disk_gb, rent_after_days, out, as_json)
        return
    from labkit import options, outlook

    name, _, version = engine.partition(" ")
    served = options.Engine(name, version) if engine else None
    sizes = {"streams": streams, "context_tokens": context, "tensor_parallel_size": tensor_parallel_size}
    found = outlook.outlook(target, hardware, engine=served, **sizes)
    typer.echo(
        json.dumps(outlook.as_json(found), indent=2, default=str) if as_json else copyable(outlook.text(found))
    )
    if out:
        title = f"{found.model.geometry.name} on {found.model.hardware.name}"
        typer.echo(options.write_next_steps(out, found.ranked, title=title, verdict=found.sentence))


def plan_training(
    target: str, hardware: str, work: Any, disk_gb: float, rent_after_days: float, out: str, as_json: bool
) -> None:
    """Print, and write where asked, the plan of a training; exit code 1 where it does not fit."""
    import json

    from labkit.planner import BadPlan, writing
    from labkit.planner import plan as planned

    for name, value in {"--disk-gb": disk_gb, "--rent-after-days": rent_after_days}.items():
        if not 0 <= value < math.inf:
            raise BadPlan(f"{name} {value:g} is no amount", f"give {name} as 0 or more")
    found = planned(target, hardware, work, free_gb=disk_gb or None)
    if as_json:
        typer.echo(json.dumps(writing.as_json(found, rent_after_days), indent=2))
    else:
        typer.echo(copyable(writing.text(found, rent_after_days)))
    if out:
        typer.echo(writing.write(Path(out), found, rent_after_days=rent_after_days))
    if found.obstacles:
        raise typer.Exit(1)


def main() -> None:
    """Entry point."""
    command.run(app)


if __name__ == "__main__":
    main()
