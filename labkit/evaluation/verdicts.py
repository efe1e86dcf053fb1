"""Go or no-go, by number of streams and by category, and the answer in words and figures."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from labkit import agreement
from labkit.acceptance import Acceptance
from labkit.engine import sampling
from labkit.evaluation.advice import advice
from labkit.evaluation.candidates import BASELINE, EAGLE3, NGRAM
from labkit.evaluation.earlier import HELD_OUT
from labkit.evaluation.measuring import Measured
from labkit.evaluation.streams import crossover, crossover_sentence
from labkit.evaluation.tables import ENDS, NOT_MEASURED, told, word
from labkit.settings import Evaluation


def verdict(table: pd.DataFrame, prompts_set: str = "benchmark", variant: str = EAGLE3) -> str:
    """go when the whole interval of the speedup lies above 1, no-go when it lies below, else unclear.

    Without an interval: too few prompts, or not measured.
    """
    chosen = table[(table["variant"] == variant) & (table["prompts_set"] == prompts_set)]
    return NOT_MEASURED if chosen.empty else word(chosen.iloc[0])


def by_k(table: pd.DataFrame, streams: int) -> pd.DataFrame:
    """The greedy rows of the head at one number of streams, by k."""
    chosen = table[(table["variant"] == EAGLE3) & (table["temperature"] == 0) & (table["streams"] == streams)]
    return chosen.sort_values("k")


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

    crossover_streams_*: None where it was not reached up to most_streams, or cannot be told (`crossover`).
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
    for name, at in crossover(table, measured.best_k).items():
        values[f"crossover_streams_{name}"] = at if math.isfinite(at) else None
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
    return "\n\n".join([" ".join(said), advice(row, measured, settings), limits])
