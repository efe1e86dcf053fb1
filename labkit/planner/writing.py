"""A plan as tables, as text for a terminal, and as next-steps-eagle.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from labkit import files
from labkit.extract import default_layers
from labkit.planner import memory
from labkit.planner.commands import brings_code, commands
from labkit.planner.head import inner_width, state_bytes
from labkit.planner.machines import rentable
from labkit.planner.obstacles import size
from labkit.planner.plan import Plan, elsewhere, significant, told_range, verdict

FILE = "next-steps-eagle.md"
LINE = 118


def hours_table(plan: Plan) -> pd.DataFrame:
    """A row a step and one for all: step, tokens, hours with _low and _high; empty where it cannot be done."""
    work = plan.work
    tokens = {"generation": work.conversations * work.answer_tokens, "extraction": work.tokens}
    rows = [
        {"step": step, "tokens": tokens.get(step, work.trained_tokens)} | columns("hours", value)
        for step, value in plan.hours.items()
    ]
    if plan.total:
        rows.append({"step": "all", "tokens": 0} | columns("hours", plan.total))
    return pd.DataFrame(rows, columns=["step", "tokens", "hours_low", "hours", "hours_high"])


def columns(name: str, value: Any) -> dict[str, float]:
    """A range as three columns."""
    return {f"{name}_low": value.low, name: value.mid, f"{name}_high": value.high}


def head_rows(plan: Plan) -> list[tuple[str, str]]:
    """The draft configuration in words."""
    g, head = plan.target, plan.head
    layers = default_layers(g.num_hidden_layers)
    dim = g.v_head_dim if g.is_mla else g.head_dim
    return [
        ("architecture", "EAGLE-3, one Llama decoder layer over [embedding, fused state], full attention"),
        (
            "hidden size, heads, feed-forward",
            f"{g.hidden_size:,}, {g.num_attention_heads} x {dim}, {inner_width(g):,}",
        ),
        ("reads layers (vLLM's ids)", f"{', '.join(map(str, layers))}; learns from {g.num_hidden_layers}"),
        ("draft vocabulary", f"{head.lm_head // g.hidden_size:,} of {g.vocab_size:,}"),
        (
            "weights",
            f"{told_weights(head.served)}: {told_weights(head.trainable)} trained, lm_head and embedding frozen",
        ),
        ("context", f"{g.max_position_embeddings:,} positions, RoPE as the target has it"),
        ("flags", "norm_before_residual, norm_before_fc, fc_norm false; norm_output true: all written out"),
    ]


def told_weights(count: int) -> str:
    """A number of weights as one says it."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def data_rows(plan: Plan) -> list[tuple[str, str]]:
    """Data, disk and memory in words."""
    work, each = plan.work, state_bytes(plan.target, plan.work.item_bytes)
    kind = "bf16" if work.item_bytes == 2 else "FP8"
    states = f"{each:,} bytes a token ({kind}, 4 layers x {plan.target.hidden_size:,})"
    rows = [
        ("conversations", f"{work.conversations:,} of {work.prompt_tokens:,} + {work.answer_tokens:,} tokens"),
        ("tokens", f"{work.tokens:,}, {work.trained_tokens:,} trained on over {work.epochs} epochs"),
        ("hidden states", states if work.stored else "made on the fly, none stored"),
        ("disk", size(plan.disk_gb) + (f" of {size(plan.free_gb)} free" if plan.free_gb is not None else "")),
    ]
    if plan.served:
        s = plan.served
        told = f"{s.gb_per_gpu:.0f} GB on each GPU at tensor parallelism {s.tensor_parallel_size}"
        rows.append(("serving", f"{told}, {s.replicas} server(s), {s.streams} requests at a time in the cache"))
    parts = ", ".join(f"{name} {gb:.1f}" for name, gb in plan.training_gb.items())
    rows.append(("training", f"{sum(plan.training_gb.values()):.0f} GB on each GPU ({parts})"))
    rows.append(("checkpoint", f"{memory.checkpoint_gb(plan.head):.1f} GB"))
    return rows


def expectation(plan: Plan) -> str:
    """What acceptance to expect of so much data, from published heads."""
    count = plan.work.conversations
    if count < 20_000:
        return (
            "With some thousands of conversations published runs came to acceptance lengths of 1.45 to 1.49 (8B "
            "targets, 5,000 conversations): a proof that the pipeline works, not a head to serve."
        )
    if count < 300_000:
        return (
            "Published heads with 300,000 to 600,000 conversations reach 2.3 to 2.9 on chat and 3.0 to 3.3 on "
            "mathematics and code (k = 3); with 5,000 it was 1.45. Expect something between."
        )
    return "Heads with that much data reach 2.3 to 2.9 on chat and 3.0 to 3.3 on mathematics and code (k = 3)."


def elsewhere_table(plan: Plan) -> pd.DataFrame:
    """This machine and those that one rents, a row each: what, hours with an interval, GPU-hours, note."""
    frame = elsewhere(plan.target, plan.work, [plan.machine.name, *others(plan)])
    rows = []
    for row in frame.to_dict("records"):
        told = pd.notna(row.get("hours"))
        servers = f"{row['replicas']:.0f} x TP{row['tensor_parallel_size']:.0f}" if told else ""
        line = {"machine": row["what"], "servers": servers}
        for step in ("generation", "extraction", "training"):
            value = row.get(f"{step}_h")
            line[step] = significant(value) if value is not None and pd.notna(value) else "-"
        line["hours"] = (
            f"{significant(row['hours'])} [{significant(row['hours_low'])}, {significant(row['hours_high'])}]"
            if told
            else "-"
        )
        line["GPU-hours"] = significant(row["gpu_hours"]) if told else "-"
        rows.append(line | {"note": row["obstacle"]})
    return pd.DataFrame(rows)


def others(plan: Plan) -> list[str]:
    """The machines that one rents, but for the plan's own."""
    return [name for name in rentable() if name != plan.machine.name]


def text(plan: Plan, rent_after_days: float) -> str:
    """The plan as `labkit plan --train` prints it."""
    word, why = verdict(plan, rent_after_days)
    lines = [f"An EAGLE-3 head for {plan.target.name} on {plan.machine.what}", ""]
    lines += [f"  {name:34}{value}" for name, value in [*head_rows(plan), *data_rows(plan)]]
    lines += ["", "Hours by step"]
    lines += [f"  {line}" for line in told_hours(plan)] or ["  none: it does not fit"]
    lines += ["", "Here and elsewhere (hours; in brackets the interval)"]
    lines += [f"  {line}" for line in elsewhere_table(plan).to_string(index=False).splitlines()]
    lines += ["", expectation(plan), ""]
    for obstacle in plan.obstacles:
        lines += [f"DOES NOT FIT: {obstacle.what}", *(f"  instead: {way}" for way in obstacle.instead)]
    return "\n".join([*lines, f"{word}: {why}."])


def as_json(plan: Plan, rent_after_days: float) -> dict[str, Any]:
    """The plan as plain data."""
    word, why = verdict(plan, rent_after_days)
    frame = elsewhere(plan.target, plan.work, [plan.machine.name, *others(plan)])
    return {
        "target": plan.target.name,
        "hardware": plan.machine.name,
        "verdict": word,
        "sentence": why,
        "head": dict(head_rows(plan)),
        "data": dict(data_rows(plan)),
        "disk_gb": plan.disk_gb,
        "hours": {step: list(value) for step, value in plan.hours.items()},
        "total_hours": list(plan.total) if plan.total else None,
        "obstacles": [{"what": o.what, "instead": list(o.instead)} for o in plan.obstacles],
        "elsewhere": frame.astype(object).where(frame.notna(), None).to_dict("records"),
        "commands": [{"what": c.what, "words": list(c.words)} for c in commands(plan)],
    }


def told_hours(plan: Plan) -> list[str]:
    """The hours of each step and of all, a line each."""
    lines = [f"{step:34}{told_range(value)}" for step, value in plan.hours.items()]
    return [*lines, f"{'all':34}{told_range(plan.total)}"] if plan.total else []


def markdown(plan: Plan, *, rent_after_days: float, run_id: str = "") -> str:
    """The plan as next-steps-eagle.md."""
    word, why = verdict(plan, rent_after_days)
    lines = [f"# Next steps: an EAGLE-3 head for {plan.target.name} on {plan.machine.what}", ""]
    lines += [f"**{word}**: {why}. All of this is predicted; nothing was started.", ""]
    lines += obstacle_lines(plan)
    lines += ["## The head", "", *table(head_rows(plan)), "", "## Data, disk and memory", ""]
    lines += [*table(data_rows(plan)), "", expectation(plan), "", "## Hours", ""]
    lines += [*frame_lines(elsewhere_table(plan)), "", *hour_notes(plan), ""]
    lines += ["## When to rent", "", rent_text(plan, rent_after_days), ""]
    lines += ["## The commands", "", *command_lines(plan, run_id, rent_after_days), ""]
    lines += ["## What to know before", "", *cautions(plan), "", "## Where the figures are from", ""]
    lines += [f"- `{name}`: {source}." for name, source in plan.machine.sources.items()]
    return "\n".join(lines) + "\n"


def obstacle_lines(plan: Plan) -> list[str]:
    """What does not fit, and each way out."""
    lines = []
    for obstacle in plan.obstacles:
        lines += [f"**Does not fit:** {obstacle.what}. Any of these would do:", ""]
        lines += [*(f"- {way}" for way in obstacle.instead), ""]
    return lines


def table(rows: list[tuple[str, str]]) -> list[str]:
    """Name and value as a Markdown table."""
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def frame_lines(frame: pd.DataFrame) -> list[str]:
    """A frame of text as a Markdown table."""
    head = f"| {' | '.join(frame.columns)} |"
    body = [f"| {' | '.join(map(str, row))} |" for row in frame.itertuples(index=False)]
    return [head, "|" + "---|" * len(frame.columns), *body]


def hour_notes(plan: Plan) -> list[str]:
    """How to read the hours."""
    return [
        "Generation, extraction and training are the middle of their intervals; `hours` is their sum with its "
        "interval, all figures at their worst or best together. Loading the target (twice, for a trillion weights "
        "30 to 90 minutes each) and everything that goes wrong come on top. Notebook 04 measures the three rates "
        "in its first minutes and replaces these."
    ]


def rent_text(plan: Plan, rent_after_days: float) -> str:
    """The threshold and what it comes to."""
    here = f"{told_range(plan.total)} hours" if plan.total else "not at all"
    frame = elsewhere(plan.target, plan.work, others(plan))
    if "hours" not in frame or frame["hours"].isna().all():
        return f"Here it takes {here}; none of the machines that were looked at can do it either."
    best = frame.loc[frame["hours"].idxmin()]
    return (
        f"Threshold: more than {rent_after_days:g} days here (`rent_after_days`). Here it takes {here}; quickest "
        f"is {best['what']}: {significant(best['hours'])} hours, {significant(best['gpu_hours'])} GPU-hours, to "
        f"be multiplied by an offer's price. Most hours go into {longest(plan)}: rent for that, if not for all; "
        "the training needs only the files of states, and copying those takes their size over the line's speed."
    )


def longest(plan: Plan) -> str:
    """The step that takes most hours."""
    return max(plan.hours, key=lambda step: plan.hours[step].mid, default="generation")


def command_lines(plan: Plan, run_id: str, rent_after_days: float) -> list[str]:
    """The commands in their order, the lab's own first."""
    lines = []
    for number, command in enumerate(
        commands(plan, run_id=run_id, free_gb=plan.free_gb or 0, rent_after_days=rent_after_days), start=1
    ):
        if number == 5:
            lines += ["What the lab runs by itself then, for doing it by hand or on other machines:", ""]
        lines += [f"{number}. {command.what}:", "", "   ```", f"   {command}", "   ```", ""]
    return lines[:-1]


def cautions(plan: Plan) -> list[str]:
    """What cost others days, as far as it can happen here."""
    found = [
        "- Stop or swap the production server first: the weights fill the GPUs (`labkit swap` brings it back).",
        "- The answers have to be this target's own, reasoning kept, not cut off by `max_tokens`.",
        "- The extraction server runs without prefix caching and without pipeline parallelism (vLLM refuses "
        "hidden states of DeepSeek-V3's family over it): tensor parallelism only.",
        "- Look at the share of positions where the last state gives the real next token before training starts.",
        "- The head's `max_position_embeddings` and RoPE have to be the target's; `draft.preflight` looks.",
    ]
    if brings_code(plan.target.name):
        found.append(
            "- `--trust-remote-code` lets code run that comes with the model, its tokenizer at least: read it "
            "first. It stands in the commands for doing it by hand alone; the lab itself never runs such code and "
            "wants a directory with a tokenizer.json."
        )
    if plan.served and plan.served.replicas == 1:
        found.append(
            "- One server fills this machine: measure the plain one for notebook 05 before the head is served "
            "(rows are kept by address), or let `labkit swap` change them over."
        )
    if "pcie" in plan.machine.name:
        found.append(
            "- Over PCIe a prefill spends about half of its time in AllReduce: look at NCCL's settings first (bus "
            "bandwidth from 22 to 42 GB/s by tuning alone), it pays in generation and extraction alike."
        )
    return found


def write(folder: Path, plan: Plan, *, rent_after_days: float, run_id: str = "") -> Path:
    """Write next-steps-eagle.md into a folder; returns its path."""
    path = Path(folder) / FILE
    with files.atomic(path) as temporary:
        temporary.write_text(markdown(plan, rent_after_days=rent_after_days, run_id=run_id), encoding="utf-8")
    return path
