"""The decision rule of notebook 05, answered by what was measured, and what to do next."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from labkit import agreement, bench
from labkit.bench.statistics import FEWEST
from labkit.costmodel.verdict import GO, NO_GO, UNCLEAR
from labkit.evaluation.measuring import Measured
from labkit.evaluation.tables import NOT_MEASURED, told, word
from labkit.settings import Evaluation

TOO_MANY = 25  # times as many prompts: then the median is so near 1 that the difference is of no use
ATTACHED = "the lab starts no n-gram server beside attached ones"
BETTER_HEAD = "a better head: more data and epochs raise the acceptance length (notebook 04 at a larger scale)"


def rules(row: dict[str, Any], measured: Measured, settings: Evaluation) -> str:
    """The rules of the notebook's first cell as a Markdown table: each, what was measured of it, its answer.

    `row`: of `points`, the head at its best k, greedy, at the settings' own streams; empty where unmeasured.
    """
    wrong, compared = len(agreement.unexplained(measured.compared)), len(measured.compared)
    outputs = f"{wrong} of {compared} outputs" if compared else "no outputs compared"
    differs = ("**yes: no-go**" if wrong else "no") if compared else NOT_MEASURED
    verdict, speedup = word(row) if row else NOT_MEASURED, told(row)
    above = {GO: "no", NOT_MEASURED: f"{NOT_MEASURED}: {no_ngram(settings)}"}
    above |= dict.fromkeys((UNCLEAR, NO_GO), "**yes: n-gram does as well**")
    lines = [("an output differs from greedy by more than a near-tie", outputs, differs)]
    for rule, wanted in (
        ("the speedup's whole interval lies above 1", GO),
        ("the interval holds 1", UNCLEAR),
        ("the whole interval lies below 1", NO_GO),
    ):
        known = f"**yes: {wanted}**" if verdict == wanted else "no"
        lines.append((rule, speedup, known if verdict in (GO, UNCLEAR, NO_GO) else verdict))
    over = over_ngram(row)
    lines.append(("the interval over n-gram does not lie above 1", told(row, "over_ngram"), above.get(over, over)))
    head = "| what is measured | here | answer |\n|---|---|---|\n"
    return head + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def over_ngram(row: dict[str, Any]) -> str:
    """`word` of the interval over n-gram: go where the head surely beats it."""
    names = {f"speedup{end}": row.get(f"over_ngram{end}", math.nan) for end in ("", "_low", "_high")}
    return word(names)


def no_ngram(settings: Evaluation) -> str:
    """Why n-gram was not measured beside the head."""
    return ATTACHED if settings.server else "no n-gram server answered at this point"


def advice(row: dict[str, Any], measured: Measured, settings: Evaluation) -> str:
    """What the rules say to do next, as Markdown; `row` as for `rules`."""
    if len(agreement.unexplained(measured.compared)):
        return (
            "**Next:** do not serve this head; outputs that differ are a bug, listed above under The same words."
        )
    if not row or pd.isna(row["speedup"]):
        return "**Next:** measure the head: `-p variant_server=...`, or give no server, then the lab starts them."
    verdict = word(row)
    said = {GO: go, UNCLEAR: unclear, NO_GO: no_go}.get(verdict, too_few)(row, measured, settings)
    said = f"**Next** ({verdict} at k={row['k']:.0f}, {settings.concurrency} in flight): {said}"
    if over_ngram(row) == NOT_MEASURED:
        said += f" Whether it beats n-gram is **not measured**: {no_ngram(settings)}. Notebook 02 measures that."
    return said


def go(row: dict[str, Any], measured: Measured, settings: Evaluation) -> str:
    """A go: deploy, unless n-gram does as well; other loads."""
    if over_ngram(row) in (UNCLEAR, NO_GO):
        over = told(row, "over_ngram")
        return f"serve n-gram, which does as well here and needs no head (over it {over}), or try {BETTER_HEAD}."
    said = f"serve the head with `num_speculative_tokens` {row['k']:.0f} for prompts like these at that load."
    if len(settings.streams) > 1:
        return f"{said} At other loads the crossover above decides."
    more = ",".join(str(settings.concurrency * times) for times in (1, 4, 16))
    return f"{said} Before other loads measure them: `-p sweep_streams={more}`, or what you serve."


def unclear(row: dict[str, Any], measured: Measured, settings: Evaluation) -> str:
    """Unclear: more prompts, about as many as the interval's width asks for, else repeats."""
    have, times = a_category(measured), factor_needed(row)
    if times > TOO_MANY:
        return (
            f"take it as neither faster nor slower: the median, {row['speedup']:.2f}×, is so near 1 that the "
            f"interval leaves it with over {TOO_MANY} times as many prompts only; a category may still differ."
        )
    wanted, there = max(have + 1, math.ceil(have * times)), there_are(settings)
    repeats = f"`-p repeats={2 * settings.repeats}`"
    if there <= have:
        return f"all prompts were sent ({there} a category), so {repeats}, or more prompts of your own."
    said = f"more prompts before anything is changed: `-p prompts_per_category={min(wanted, there)}`"
    rough = f"about {wanted} a category would bring the interval off 1, if the median stays"
    return f"{said} ({rough})" + (f", and {repeats}." if wanted > there else ".")


def no_go(row: dict[str, Any], measured: Measured, settings: Evaluation) -> str:
    """A no-go: serve without, or another head."""
    return f"serve without speculation at that many streams, or try {BETTER_HEAD}."


def too_few(row: dict[str, Any], measured: Measured, settings: Evaluation) -> str:
    """A speedup without an interval."""
    wanted = max(FEWEST, a_category(measured) + 1)
    return f"`-p prompts_per_category={wanted}`, or more in your file: below {FEWEST} there is no interval."


def factor_needed(row: dict[str, Any]) -> float:
    """How many times as many prompts would bring the interval off 1, if the median stays; infinite at 1.

    The arm of the interval towards 1 (in logarithms) shrinks with the square root of the number of prompts.
    """
    low, middle, high = (row[name] for name in ("speedup_low", "speedup", "speedup_high"))
    arm = math.log(middle / low) if middle > 1 else math.log(high / middle)
    return (arm / math.log(middle)) ** 2 if middle != 1 else math.inf


def a_category(measured: Measured) -> int:
    """The most prompts that were sent of a category."""
    counts = measured.sweep.groupby("category")["prompt_id"].nunique()
    return int(counts.max()) if len(counts) else 0


def there_are(settings: Evaluation) -> int:
    """The most prompts that there are of a category."""
    return int(bench.prompts(settings.prompts).groupby("category").size().max())
