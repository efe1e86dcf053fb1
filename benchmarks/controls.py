"""How long each control takes to redraw on data of the demo's size: python -m benchmarks.controls

A redraw is what a moved slider costs the kernel: the pure function, the drawing and its picture (PNG, at the size
that a notebook shows). Every value of every knob is drawn, the others as at the start, each REPEATS times, as a
person moves them: a text that was drawn before is copied. Printed are the median, the range, the process' own CPU
time (median), which other processes disturb less, and the share of redraws within the goal.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from benchmarks import traces
from labkit import bench, costmodel, experts, outlook, prediction, targets, trace, widgets
from labkit.experts.routing import Routing
from labkit.plots import costmodel as cost_figures
from labkit.plots import training
from labkit.settings import NgramBaseline

GOAL_MS, REPEATS = 200.0, 3
TRACE = Path(__file__).parents[1] / "tests/data/trace_tp2_cpu"


def breakdown() -> widgets.Control:
    """01: the shipped trace of two ranks, repeated until it has the demo's 24 steps."""
    sources = sorted(TRACE.glob("*.gz"))
    with tempfile.TemporaryDirectory() as folder:
        traces.enlarge(sources, Path(folder), ranks=2, megabytes=12)
        return widgets.breakdown(trace.load(folder))


def lookup() -> widgets.Control:
    """02: answers of the demo's length to its prompts; an answer is its own prompt's tokens, then random ones."""
    settings, rng = NgramBaseline(), np.random.default_rng(0)
    tokenizer = targets.resolve(settings.target).tokenizer()
    chosen = bench.prompts(settings.prompts, settings.prompts_per_category, 0)
    prompts = [tokenizer.encode(messages[-1]["content"]) for messages in chosen["messages"]]
    answers = [(ids + rng.integers(0, 9999, 128).tolist())[: settings.max_tokens] for ids in prompts]
    rows = chosen.assign(prompt_token_ids=prompts, output_token_ids=answers)
    rows = pd.concat([rows] * settings.repeats, ignore_index=True)
    times = pd.DataFrame({"n": [1, 2, 4, 6], "step_ms": [20.0, 22, 25, 28]})
    given = {"k": settings.num_speculative_tokens, "lookup_max": settings.prompt_lookup_max}
    grid = prediction.grid(rows, times, times, **given)
    return widgets.lookup(grid, rows, times, times, **given, lookup_min=settings.prompt_lookup_min)


def activation() -> widgets.Control:
    """03: routing of the demo's size, drawn at random."""
    rng = np.random.default_rng(0)
    routing = Routing.of(rng.random((8192, 5, 48)).argpartition(6, axis=2)[:, :, :6], 48)
    given = {"ns": range(1, 17)}
    tables = [
        make(routing, **given).assign(model="random") for make in (experts.unique_by_window, experts.unique_table)
    ]
    return widgets.activation(*tables, 4)


def what_if() -> widgets.Control:
    """03: the step model of Kimi-K2.5 and the option that is best for it."""
    found = outlook.outlook("kimi-k2.5", "rtx-pro-6000-pcie-x8")
    drafting, length = outlook.drafting_with(found.model, found.best)
    choices = costmodel.choices(drafting, length.mid, int(found.best["num_speculative_tokens"]))
    draw = lambda **chosen: cost_figures.plot_speedup(costmodel.at_length(drafting, **chosen))  # noqa: E731
    return widgets.Control(draw, choices)


def progress() -> widgets.Control:
    """04: what is redrawn while training, at three moments of a training of 4,000 steps."""
    steps = np.arange(4000)
    rows = pd.DataFrame({"step": steps, "loss": 9 / np.sqrt(1 + steps), "epoch": steps // 1000})
    ends = steps % 1000 == 999
    rows["acceptance_length"] = np.where(ends, 1 + steps / 4000, np.nan)
    draw = lambda seen: training.plot_progress(rows.head(seen), figure=Figure())  # noqa: E731
    return widgets.Control(draw, {"seen": [1000, 2000, 4000]})


def sweep() -> widgets.Control:
    """05: three variants, five k, three numbers of streams, two temperatures, seven categories."""
    knobs = {"variant": ["eagle3", "ngram", "mtp"], "k": [1, 2, 3, 5, 7], "streams": [1, 4, 16]}
    knobs |= {"temperature": [0.0, 0.7], "category": ["all", "chat", "code", "qa", "copy", "story", "maths"]}
    table = pd.DataFrame(itertools.product(*knobs.values()), columns=list(knobs))
    table["speedup"] = 1 + table["k"] / table["variant"].map({"eagle3": 10, "ngram": 15, "mtp": 20})
    table = table.assign(acceptance_length=1.5 * table["speedup"], predicted_speedup=1.1 * table["speedup"])
    return widgets.sweep(table.assign(speedup_low=0.9 * table["speedup"], speedup_high=1.1 * table["speedup"]))


CONTROLS = {
    "01 breakdown by rank and steps": breakdown,
    "02 lookup by category, k, lengths": lookup,
    "03 experts by layer and n": activation,
    "03 what if": what_if,
    "04 live loss and acceptance": progress,
    "05 sweep by k, streams, category": sweep,
}


def redraw_ms(control: widgets.Control, chosen: dict[str, Any]) -> tuple[float, float]:
    """One redraw as a notebook does it: ms, and ms of this process' CPU time."""
    before, spent = time.perf_counter(), time.process_time()
    widgets.png(control.drawn(**chosen))
    return 1e3 * (time.perf_counter() - before), 1e3 * (time.process_time() - spent)


def moves(control: widgets.Control) -> Iterator[dict[str, Any]]:
    """Each value of each knob."""
    for name, values in control.choices.items():
        knob = widgets.control(name, values)
        first = [knob.value] if isinstance(knob.value, tuple) else []  # both ends of a slider: as at the start
        yield from ({name: value} for value in first or knob.options)


def main() -> None:
    """Redraw all, print a line each."""
    mpl.use("agg")
    print(f"redraw of a control, ms: median [fastest, slowest], CPU time; goal {GOAL_MS:.0f} ms")
    for name, make in CONTROLS.items():
        control = make()
        redraw_ms(control, {})  # fonts and the like, once a session
        taken, spent = zip(*(redraw_ms(control, chosen) for chosen in list(moves(control)) * REPEATS), strict=True)
        within = sum(ms <= GOAL_MS for ms in taken) / len(taken)
        reach = f"{statistics.median(taken):5.0f} [{min(taken):.0f}, {max(taken):.0f}]"
        cpu = f"CPU {statistics.median(spent):.0f}"
        print(f"  {name:36} {reach:18} {cpu:8} {within:5.0%} of {len(taken)} redraws within the goal")


if __name__ == "__main__":
    main()
