"""The headline table of a run: which figures, from which notebook, and how to read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Headline = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One line of the headline table."""

    what: str
    value: str
    note: str
    notebook: str


def number(headline: Headline, name: str, form: str = ".2f", unit: str = "") -> str:
    """A figure as text; a dash where it was not measured, or where a run.json from elsewhere has no number."""
    value = headline.get(name)
    return f"{value:{form}}{unit}" if isinstance(value, (int, float)) else "–"


def speedup(headline: Headline, prefix: str) -> str:
    """A speedup with its interval."""
    found = [headline.get(f"{prefix}{end}") for end in ("", "_low", "_high")]
    middle, low, high = (value if isinstance(value, (int, float)) else None for value in found)
    if middle is None:
        return "–"
    return f"{middle:.2f}×" + (f" [{low:.2f}, {high:.2f}]" if low is not None and high is not None else "")


def baseline_rate(headline: Headline) -> str:
    """The baseline's decode rate with its interval."""
    low, high = (number(headline, f"baseline_tok_s_{end}", ".1f") for end in ("low", "high"))
    spread = f" [{low}, {high}]" if "–" not in (low, high) else ""
    return number(headline, "baseline_tok_s", ".1f", " tok/s") + spread


def measured_note(headline: Headline) -> str:
    """How to read the measured n-gram speedup, and whether it can be believed."""
    if headline.get("ngram_speedup") is None:
        return "not measured: that takes a variant_server"
    if headline.get("ngram_quiet") is False:
        cost = number(headline, "ngram_step_cost")
        return f"machine not quiet: a step would cost {cost} plain ones; measure again with --force"
    return "median over paired prompts, 95% interval"


def predicted_note(headline: Headline) -> str:
    """Whether n-gram is worth trying by its prediction."""
    word = headline.get("ngram_worth_trying") or "–"
    return f"worth trying: {word}; the baseline's tokens and step times, 95% interval over prompts"


def expert_note(headline: Headline) -> str:
    """How to read the unique experts, with the reuse factor."""
    uniform, reuse = number(headline, "unique_experts_n4_uniform"), number(headline, "reuse_n4")
    return f"experts a layer that 4 consecutive tokens touch; independence predicts {uniform}; r = {reuse}"


def outlook_note(headline: Headline) -> str:
    """What the prediction before anything is trained is for, and its verdict."""
    served, word = headline.get("served") or "–", headline.get("predicted_verdict") or "–"
    return f"{word}; {headline.get('predicted_with') or '–'}, for {served}, before anyone trains"


def acceptance_note(headline: Headline) -> str:
    """The same figure on held-out prompts, measured and simulated, as far as they are there."""
    held_out, simulated = (
        number(headline, f"eagle3_acceptance_length_{kind}") for kind in ("held_out", "simulated")
    )
    return beside({"of the training kind": held_out, "simulated there": simulated})


def beside(told: dict[str, str]) -> str:
    """A note on benchmark prompts, with what is there of other figures beside."""
    there = [f"{name}: {value}" for name, value in told.items() if value != "–"]
    return "benchmark prompts" + (f"; {', '.join(there)}" if there else "")


# notebook: (what, value, note) for each line, each from that notebook's headline
LINES: dict[str, list[tuple[str, Callable[[Headline], str], Callable[[Headline], str]]]] = {
    "01_profiling": [
        (
            "decode step",
            lambda h: number(h, "decode_step_ms", ".1f", " ms"),
            lambda h: "median over steps and ranks, profiled",
        ),
        (
            "AllReduce share",
            lambda h: number(h, "allreduce_share", ".1%"),
            lambda h: "of a decode step's wall time, transfer and wait",
        ),
        (
            "AllReduces a step",
            lambda h: number(h, "allreduce_per_step", ".0f"),
            lambda h: "counted in the traces of all ranks",
        ),
    ],
    "02_ngram_baseline": [
        (
            "baseline",
            baseline_rate,
            lambda h: "decode, one stream unless the page says otherwise; 95% interval over prompts",
        ),
        (
            "n-gram acceptance length",
            lambda h: number(h, "ngram_acceptance_length"),
            lambda h: "tokens a drafting step yields, bonus token included",
        ),
        (
            "n-gram speedup",
            lambda h: speedup(h, "ngram_speedup"),
            measured_note,
        ),
        (
            "n-gram speedup, predicted",
            lambda h: speedup(h, "ngram_speedup_predicted"),
            predicted_note,
        ),
    ],
    "03_expert_activation": [
        ("unique experts at n=4", lambda h: number(h, "unique_experts_n4", ".1f"), expert_note),
        ("predicted speedup", lambda h: speedup(h, "predicted_speedup"), outlook_note),
    ],
    "05_evaluation": [
        (
            "EAGLE-3 acceptance length",
            lambda h: number(h, "eagle3_acceptance_length"),
            acceptance_note,
        ),
        (
            "EAGLE-3 speedup",
            lambda h: speedup(h, "eagle3_speedup"),
            lambda h: beside({"held-out prompts": speedup(h, "eagle3_speedup_held_out")}),
        ),
        (
            "go or no-go",
            lambda h: str(h.get("verdict") or "–"),
            lambda h: "go when the speedup's whole interval lies above 1",
        ),
    ],
}


def rows(headlines: dict[str, Headline]) -> list[Row]:
    """The table's lines for the stages that are there."""
    return [
        Row(what, value(headlines[notebook]), note(headlines[notebook]), notebook)
        for notebook, lines in LINES.items()
        if notebook in headlines
        for what, value, note in lines
    ]


def text_table(headlines: dict[str, Headline]) -> str:
    """The table for a terminal."""
    lines = rows(headlines)
    width = max((len(row.what) for row in lines), default=0)
    value_width = max((len(row.value) for row in lines), default=0)
    return "\n".join(f"  {row.what:<{width}}  {row.value:>{value_width}}  {row.note}" for row in lines)
