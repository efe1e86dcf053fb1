"""Go or no-go, by number of streams and by category, and the answer in words and figures."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from labkit import agreement
from labkit.acceptance import Acceptance
from labkit.costmodel import stops_paying
from labkit.engine import sampling
from labkit.evaluation.candidates import BASELINE, EAGLE3, NGRAM
from labkit.evaluation.earlier import HELD_OUT
from labkit.evaluation.measuring import Measured
from labkit.evaluation.tables import word
from labkit.settings import Evaluation

ENDS = ("", "_low", "_high")


def verdict(table: pd.DataFrame, prompts_set: str = "benchmark", variant: str = EAGLE3) -> str:
    """go when the whole interval of the speedup lies above 1, no-go when it lies below, else unclear.

    Without a measured interval: not measured.
    """
    chosen = table[(table["variant"] == variant) & (table["prompts_set"] == prompts_set)]
    return "not measured" if chosen.empty else word(chosen.iloc[0])


def greedy(table: pd.DataFrame, k: int, variant: str = EAGLE3) -> pd.DataFrame:
    """The greedy rows of `points` (or `by_category`) for one variant and k, by streams."""
    chosen = table[(table["variant"] == variant) & (table["k"] == k) & (table["temperature"] == 0)]
    return chosen.sort_values("streams", kind="stable")


def by_k(table: pd.DataFrame, streams: int) -> pd.DataFrame:
    """The greedy rows of the head at one number of streams, by k."""
    chosen = table[(table["variant"] == EAGLE3) & (table["temperature"] == 0) & (table["streams"] == streams)]
    return chosen.sort_values("k")


def crossover(table: pd.DataFrame, k: int) -> dict[str, float]:
    """From how many streams on speculation stops paying: costmodel.stops_paying over the measured points.

    `low`: the interval reaches 1, so it is no longer a go; `mid`: the median falls below 1; `high`: the whole
    interval lies below. Infinite where that did not happen up to the most streams measured.
    """
    return stops_paying(greedy(table, k).dropna(subset=["speedup_low", "speedup_high"]))


def crossover_sentence(table: pd.DataFrame, k: int) -> str:
    """`crossover` in words."""
    known = greedy(table, k).dropna(subset=["speedup_low", "speedup_high"])
    if known.empty:
        return "No speedup has an interval, so nothing can be said of streams."
    found, most = crossover(table, k), int(known["streams"].max())
    if most == 1:
        return f"Only one stream was measured, at k={k}: **{known['verdict'].iloc[0]}** there."
    if math.isinf(found["low"]):
        return (
            f"At k={k} the whole interval lies above 1 at every number of streams measured, up to {most}: **go**."
        )
    told = {name: f"from {at:.0f}" if math.isfinite(at) else f"not up to {most}" for name, at in found.items()}
    return (
        f"At k={k} the speedup's interval reaches 1 **{told['low']}** streams on (no longer a go), its median "
        f"falls below 1 {told['mid']}, the whole interval lies below {told['high']} (no-go)."
    )


def by_streams(table: pd.DataFrame, k: int) -> pd.DataFrame:
    """What one reads before deciding, a row a number of streams: speedup, over n-gram, predicted, verdict."""
    names = ["streams", "tok_s", "throughput_tok_s", "acceptance_length"]
    names += [f"{name}{end}" for name in ("speedup", "over_ngram", "predicted") for end in ENDS]
    return greedy(table, k).reindex(columns=[*names, "verdict"]).reset_index(drop=True)


def best(measured: Measured, table: pd.DataFrame, settings: Evaluation) -> dict[str, Any]:
    """The row of `points` at the best k, greedy, at the settings' own streams; empty where it was not measured."""
    chosen = by_k(table, settings.concurrency)
    chosen = chosen[chosen["k"] == measured.best_k] if len(chosen) else chosen
    return chosen.iloc[0].to_dict() if len(chosen) else {}


def headline(
    table: pd.DataFrame, accepted: dict[str, Acceptance], simulated: Acceptance | None, same: float
) -> dict[str, Any]:
    """The scalars of run.json: speedups with intervals, acceptance lengths, identical outputs, verdict."""
    values: dict[str, Any] = {"verdict": verdict(table), "verdict_held_out": verdict(table, HELD_OUT)}
    for name, end in (("benchmark", ""), (HELD_OUT, "_held_out")):
        for line in table[table["prompts_set"] == name].to_dict("records"):
            for bound in ENDS:
                values[f"{line['variant']}_speedup{end}{bound}"] = line[f"speedup{bound}"]
    lengths = {
        "eagle3_acceptance_length": accepted.get("engine, benchmark prompts"),
        "eagle3_acceptance_length_held_out": accepted.get("engine, held-out prompts"),
        "eagle3_acceptance_length_simulated": simulated,
    }
    values |= {name: found.mean_length for name, found in lengths.items() if found is not None}
    return values | {"identical_outputs": same}


def sweep_headline(
    measured: Measured, table: pd.DataFrame, categories: pd.DataFrame, settings: Evaluation
) -> dict[str, Any]:
    """More scalars: the best k and what it brings, the crossover, lengths averaged over categories, rates.

    Outputs that differ from greedy by more than a near-tie make the verdict a no-go.
    """
    values: dict[str, Any] = {"best_k": measured.best_k, "most_streams": max(settings.streams)}
    if len(agreement.unexplained(measured.compared)):
        values["verdict"] = "no-go"  # over what the speed says
    row = best(measured, table, settings)
    for name in ("acceptance_length", "tok_s"):
        values[f"best_k_{name}"] = row.get(name)
    for name in ("speedup", "over_ngram", "predicted"):
        values |= {f"best_k_{name}{end}": row.get(f"{name}{end}") for end in ENDS}
    values |= {f"crossover_streams_{name}": at for name, at in crossover(table, measured.best_k).items()}
    own = by_k(categories, settings.concurrency)
    own = own[own["k"] == settings.num_speculative_tokens]
    values["eagle3_acceptance_length_category_mean"] = float(own["acceptance_length"].mean())
    for variant in (BASELINE, NGRAM):
        plain = table[(table["variant"] == variant) & (table["streams"] == settings.concurrency)]
        plain = plain[plain["temperature"] == 0]["tok_s"]
        values[f"{variant}_tok_s"] = float(plain.iloc[0]) if len(plain) else None
    return values


def conclusion(
    settings: Evaluation,
    measured: Measured,
    speedups: pd.DataFrame,
    table: pd.DataFrame,
    accepted: dict[str, Acceptance],
    simulated: Acceptance | None,
) -> str:
    """The answer in words, from the run's own figures, with its limits."""
    said = [
        f"**{verdict(speedups)}** on the benchmark's prompts, **{verdict(speedups, HELD_OUT)}** on held-out ones."
    ]
    if wrong := len(agreement.unexplained(measured.compared)):
        said = [
            f"**no-go**, whatever the speed: {wrong} outputs differ from greedy by more than a near-tie.",
            *said,
        ]
    for line in speedups[speedups["variant"] == EAGLE3].to_dict("records"):
        said.append(f"{line['prompts_set'].capitalize()} prompts: speedup {told(line)}.")
    said += [f"Acceptance length, {name}: {found.mean_length:.2f}." for name, found in accepted.items()]
    if simulated is not None:
        said.append(f"Simulated on the held-out prompts: {simulated.mean_length:.2f}.")
    if not accepted:
        said.append("No server with the head was measured, so there is no go or no-go: give `variant_server`.")
    row = best(measured, table, settings)
    if row and len(settings.ks) > 1:
        said.append(f"Of k = {settings.sweep_k} the best is **{measured.best_k}**: {told(row)}.")
    if row:
        said.append(crossover_sentence(table, measured.best_k))
    limits = (
        f"Limits: {settings.concurrency} request(s) in flight unless said otherwise, greedy, "
        f"k={settings.num_speculative_tokens}, {settings.max_tokens} tokens a request; servers {measured.how}."
    )
    if settings.sweep_temperature and not settings.server and sampling.broken():
        limits += f" Nothing at a temperature: {sampling.broken()} writes garbage where it samples and speculates."
    more = "More data and epochs raise the acceptance length: notebook 04 at a larger scale."
    return "\n\n".join([" ".join(said), limits, more])


def told(line: dict[str, Any]) -> str:
    """A speedup with its interval."""
    return f"{line['speedup']:.2f}× [{line['speedup_low']:.2f}, {line['speedup_high']:.2f}]"
