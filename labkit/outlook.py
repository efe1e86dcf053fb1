"""What speculation is predicted to bring before anyone trains or reloads: tables, options, verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from labkit import options
from labkit.costmodel import scenario as known
from labkit.costmodel.published import published
from labkit.costmodel.questions import answer, best_k, concurrency, length_at, rate_for, stops_paying
from labkit.costmodel.ranges import Range
from labkit.costmodel.step import StepModel
from labkit.costmodel.verdict import GO, NO_GO, UNCLEAR, verdict
from labkit.planner import refuse_too_large
from labkit.targets import Geometry

NS = (1, 2, 3, 4, 5, 6, 8)
DRAFTED = range(1, 9)
LOSSY = "E"


@dataclass(frozen=True)
class Outlook:
    """What `labkit plan` prints: the model, tables by title, ranked options, the verdict and its reason."""

    model: StepModel
    tables: dict[str, pd.DataFrame]
    ranked: pd.DataFrame
    verdict: str
    sentence: str
    best: dict[str, Any] | None  # the row of `ranked` predicted to bring most, of those that lose nothing


def outlook(
    target: str,
    hardware: str,
    *,
    engine: options.Engine | None = None,
    streams: int = 1,
    context_tokens: int = 2048,
    tensor_parallel_size: int = 0,
    reuse: Any = None,
) -> Outlook:
    """The outlook of a target (a shipped geometry or a config.json) on hardware of data/hardware.json.

    Raises UnknownGeometry and UnknownHardware with the names there are, DoesNotFit where the weights need more
    memory than the GPUs have. `tensor_parallel_size`: ranks, all GPUs at 0. `reuse`: r, where it was recorded;
    the published trend without.
    """
    changes = {} if reuse is None else {"reuse": reuse, "sources": {"reuse": "given"}}
    sizes = {"context_tokens": context_tokens, "tensor_parallel_size": tensor_parallel_size}
    model = known.model_of(target, hardware, **sizes, **changes)
    refuse_too_large(model.geometry, hardware, model.tensor_parallel_size)
    ranked = options.rank(model, engine=engine, streams=streams)
    word, sentence, best = judged(ranked)
    tables = {"A plain step": known.step_table(model), "Verifying n tokens": model.table(NS, streams)}
    if best is not None:
        drafting, length = drafting_with(model, best)
        tables["By k: " + named(best)] = by_k(drafting, length, best["num_speculative_tokens"], streams)
        tables["By streams: " + named(best)] = by_streams(drafting, length, best["num_speculative_tokens"])
    seen = known.scenario_for(model.geometry.name, model.hardware.name)
    if seen:
        tables |= {
            "The measured step, taken apart (a fit)": known.fit_table(seen, model),
            "Acceptance length that the n-gram slowdown implies": known.ngram_table(seen, model),
            "A trained head": known.head_table(seen, model),
            "Published boxes, predicted": known.boxes_table(seen),
            "Published box by streams, predicted": known.streams_table(seen),
        }
        tables["What others published, beside the model"] = published()
    return Outlook(model, tables, ranked, word, sentence, best)


def drafting_with(model: StepModel, best: Mapping[str, Any]) -> tuple[StepModel, Range]:
    """The model with what drafting costs under an option of options.rank, and that option's acceptance length."""
    length = Range(best["acceptance_low"], best["acceptance_length"], best["acceptance_high"])
    cost = Range(best["draft_ms_low"], best["draft_ms"], best["draft_ms_high"])
    return dataclasses.replace(model, draft_ms=cost), length


def by_case(models: Mapping[str, StepModel], best: Mapping[str, Any]) -> pd.DataFrame:
    """A row a case of costmodel.cases: verdict and speedup of an option of options.rank under its routing.

    Columns case, num_speculative_tokens, verify_ratio, break_even, speedup (each with _low, _high), verdict.
    """
    rows = []
    for case, model in models.items():
        (priced, length), k = drafting_with(model, best), int(best["num_speculative_tokens"])
        row = {"case": case, "verdict": verdict(priced, length, k).word}
        given = answer(priced, length, k)
        rows.append(row | {name: given[name] for name in given if name not in ("streams", "tpot_ms", "step_ms")})
    return pd.DataFrame(rows)


def own_reuse(recorded: Geometry, served: Geometry, measured: Mapping[int, float]) -> Mapping[int, float] | None:
    """The measured reuse where the recorded model is the one that is served, else None: the published band."""
    facts = ("hidden_size", "num_hidden_layers", "n_routed_experts", "num_experts_per_tok")
    same = all(getattr(recorded, name) == getattr(served, name) for name in facts)
    return measured if same else None


def headline(found: Outlook, n: int) -> dict[str, Any]:
    """Scalars for a run's page: what is served, verify_ratio at n tokens, the verdict and its speedup."""
    model, best = found.model, found.best or {}
    figures = {f"predicted_speedup{end}": best.get(f"speedup{end}") for end in ("_low", "", "_high")}
    figures |= {"predicted_verdict": found.verdict, "predicted_with": best.get("draft")}
    served = f"{model.geometry.name} on {model.hardware.name}"
    return figures | {"served": served, "verify_ratio": model.verify_ratio(n).mid}


def conclusion(found: Outlook, *, recorded: str, measured: Mapping[int, float], n: int) -> str:
    """The answer of notebook 03 with its limits; `recorded` is the model whose reuse was measured."""
    model, best = found.model, found.best or {}
    name, curve = model.geometry.name, model.curve
    taken = Range(*(float(np.interp(n, list(curve), side)) for side in zip(*curve.values(), strict=True)))
    text = (
        f"{name} on {model.hardware.name}: verifying {n} tokens is predicted to cost "
        f"**{model.verify_ratio(n).told()}** plain steps, with r({n}) = {taken.told()}; "
        f"{recorded} was measured at {measured[n]:.2f}. **{found.sentence}** "
    )
    k = best.get("num_speculative_tokens", n - 1)
    return text + (
        "Limits: one stream; windows are of consecutive text, and rejected drafts may route otherwise; cost and "
        f"speedup are predicted, with acceptance as published for k = {k:.0f}, not measured here"
        + ("" if recorded == name else f"; routing is that of {recorded}, a small model, not of {name}")
        + ". Next: `next-steps.md` says what to try first; notebook 04 trains a head, 05 measures whether it pays."
    )


def by_k(model: StepModel, length: Range, k: int, streams: int) -> pd.DataFrame:
    """Cost and gain by drafted tokens, at the conditional rates that give k of them that acceptance length."""
    rates = [rate_for(side, k) for side in length]
    lengths = {drafted: Range(*(length_at(rate, drafted) for rate in rates)) for drafted in DRAFTED}
    table = pd.DataFrame([answer(model, reached, drafted, streams) for drafted, reached in lengths.items()])
    best = best_k(table)["num_speculative_tokens"].iloc[0]
    names = ["num_speculative_tokens", "acceptance_length", "verify_ratio", "break_even", "tpot_ms"]
    chosen = table[[*names, "speedup_low", "speedup", "speedup_high"]]
    return chosen.assign(best=chosen["num_speculative_tokens"] == best)


def by_streams(model: StepModel, length: Range, k: int) -> pd.DataFrame:
    """Speculation by number of streams."""
    frame = concurrency(model, length, k)
    names = ["streams", "tok_s", "speculative_tok_s", "verify_ratio", "break_even"]
    return frame[[*names, "speedup_low", "speedup", "speedup_high"]]


def named(row: dict[str, Any]) -> str:
    """An option as one says it."""
    return f"{row['option']}, {row['draft'] or row['what']}"


def judged(ranked: pd.DataFrame) -> tuple[str, str, dict[str, Any] | None]:
    """The verdict over all options that lose nothing: word, sentence, and the option predicted to bring most."""
    rows = ranked[ranked["possible"] & (ranked["option"] != LOSSY)]
    if rows.empty:
        return NO_GO, "no-go: nothing can draft for this target here.", None
    best = rows.loc[rows["speedup"].idxmax()].to_dict()
    first = rows.iloc[0].to_dict()
    word = GO if (rows["verdict"] == GO).any() else NO_GO if (rows["verdict"] == NO_GO).all() else UNCLEAR
    interval = f"{best['speedup']:.2f} [{best['speedup_low']:.2f}, {best['speedup_high']:.2f}]"
    text = f"{word}: most is expected of {named(best)}, {interval} times as fast"
    if word == UNCLEAR and best["measure_next"]:
        text += f"; next measure {best['measure_next']}"
    return word, f"{text}. First to try: {named(first)} ({first['hours']:g} hours).", best


def text(found: Outlook) -> str:
    """The outlook as `labkit plan` prints it."""
    model = found.model
    lines = [f"{model.geometry.name} on {model.hardware.name}, {model.tensor_parallel_size} ranks", ""]
    lines += [f"At 4 tokens a step: {model.regime(4).loading}, {model.regime(4).why}", ""]
    for title, table in found.tables.items():
        shown = table.drop(columns=[c for c in ("source", "how") if c in table])
        lines += [title, printed(shown), ""]
        if title.startswith("By streams"):
            lines += [f"  {stops_sentence(table)}", ""]
        if "speedup_published" in table:
            lines += [f"  {trust(table)}", ""]
    columns = ["rank", "option", "draft", "possible", "hours", "speedup_low", "speedup", "speedup_high", "verdict"]
    lines += ["Options, in the order to try", printed(found.ranked[columns]), ""]
    lines += [f"  {row.option} {row.draft}: {row.why}" for row in found.ranked.itertuples() if row.why]
    lines += ["", "Inputs", printed(found.model.inputs().assign(source=lambda f: f["source"].str[:60])), ""]
    return "\n".join([*lines, found.sentence])


def trust(table: pd.DataFrame) -> str:
    """Up to how many streams a prediction held where one was published (scenario.streams_table)."""
    inside = (table["speedup_low"] <= table["speedup_published"]) & (
        table["speedup_published"] <= table["speedup_high"]
    )
    missed = table["streams"][~inside]
    if missed.empty:
        return "the published speedups all lie in the predicted intervals"
    told = ", ".join(f"{n:g}" for n in missed)
    return f"the published speedup lies outside the predicted interval at {told} streams: do not rely on it there"


def stops_sentence(table: pd.DataFrame) -> str:
    """`stops_paying` as a sentence."""
    found, most = stops_paying(table), f"{table['streams'].max():g}"
    if found["low"] == float("inf"):
        return f"speculation pays at every number of streams that was tried, up to {most}"
    told = {name: f"{n:g}" if n < float("inf") else f"more than {most}" for name, n in found.items()}
    return f"speculation stops paying from {told['mid']} [{told['low']}, {told['high']}] streams on"


def printed(table: pd.DataFrame) -> str:
    """A frame as indented text, three significant digits, nothing for what is not known."""
    body = table.to_string(index=False, float_format=lambda v: f"{v:.4g}", na_rep="-")
    return "\n".join(f"  {line}" for line in body.splitlines())


def as_json(found: Outlook) -> dict[str, Any]:
    """The outlook as plain data: tables as lists of rows, NaN as null."""

    def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
        return frame.astype(object).where(frame.notna(), None).to_dict("records")

    return {
        "target": found.model.geometry.name,
        "hardware": found.model.hardware.name,
        "verdict": found.verdict,
        "sentence": found.sentence,
        "inputs": rows(found.model.inputs()),
        "options": rows(found.ranked),
        "tables": {title: rows(table) for title, table in found.tables.items()},
    }
