"""The answer of notebook 02: whether n-gram is faster where it was measured, else whether it is worth trying."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from labkit import ngram
from labkit.acceptance import Acceptance
from labkit.prediction.steps import NOISE

AGAIN = "Measure both again on a quiet machine: the same command with `--force`."


def conclusion(beside: pd.DataFrame, found: dict[str, Acceptance]) -> str:
    """The answer in Markdown, its verdict first, from prediction.beside and what is known of acceptance."""
    line = beside.iloc[0]
    return predicted(line, found) if np.isnan(line["measured"]) else measured(line, found)


def measured(line: pd.Series, found: dict[str, Acceptance]) -> str:
    """The verdict of a measurement: what its interval says, and whether the machine was quiet enough for it."""
    ratio, low, high, total = (float(line[f"measured{end}"]) for end in ("", "_low", "_high", "_total"))
    word = "faster" if low > 1 else "slower" if high < 1 else "neither clearly faster nor slower"
    spread = "too few prompts for an interval" if np.isnan(low) else f"95% interval {low:.2f} to {high:.2f}"
    cost = step_cost(line, found)
    if cost < NOISE:
        tokens = ngram.best(found)[1].tokens_per_step
        return (
            f"**n-gram looks {word}, but the machine was not quiet: {ratio:.2f}×, {spread}.** Over all tokens it "
            f"is {total:.2f}×, so a step of the n-gram server would take {cost:.2f} times as long as a plain one, "
            "which no draft can do: the baseline was slowed by something else. At equal step times "
            f"{tokens:.2f}× is the most. {AGAIN} {yields(found)}"
        )
    text = f"**n-gram is {word}: {ratio:.2f}×, {spread}.** {yields(found)} Over all tokens it is {total:.2f}×"
    if np.isnan(cost):
        return f"{text}."
    if round(cost, 2) < 1:
        return f"{text}, so a step of the n-gram server costs about a plain one ({cost:.2f}; below 1 is noise)."
    return (
        f"{text}, so a step of the n-gram server takes {cost:.2f} times as long as a plain one: looking up, "
        "verifying, and the scheduling that goes with it."
    )


def predicted(line: pd.Series, found: dict[str, Acceptance]) -> str:
    """The verdict before any n-gram server was started, or why there is none."""
    if np.isnan(line["predicted"]):
        return f"**Neither predicted nor measured: that takes token ids and step times.** {yields(found)}"
    low, high, word = line["predicted_low"], line["predicted_high"], worth(line)
    spread = (
        "too few prompts for an interval"
        if np.isnan(low)
        else f"95% interval over prompts {low:.2f} to {high:.2f}"
    )
    text = (
        f"**Is n-gram worth trying? {word.capitalize()}: {line['predicted']:.2f}× is predicted, nothing measured "
        f"({line['prompts']:.0f} prompts, {spread}).** {yields(found)}"
    )
    if line["step_cost"] < NOISE:
        text += (
            f" By the step times such a step would be cheaper than a plain one ({line['step_cost']:.2f}). {AGAIN}"
        )
    else:
        text += f" By the step times an average step costs {line['step_cost']:.2f} plain ones."
    if word == "unclear" and not line["step_cost"] < NOISE:
        text += " More prompts narrow the interval: `prompts_per_category`."
    return (
        f"{text} Not in it: the lookup's own time and, of an attached server, what it gives up for speculating "
        "(asynchronous scheduling). A `variant_server` that speculates measures both."
    )


def worth(line: pd.Series) -> str:
    """yes, no or unclear: whether a predicted interval lies above 1 or below; empty without a prediction.

    Step times by which a drafting step is cheaper than a plain one prove nothing.
    """
    if np.isnan(line["predicted"]):
        return ""
    if line["step_cost"] < NOISE:
        return "unclear"
    return "yes" if line["predicted_low"] > 1 else "no" if line["predicted_high"] < 1 else "unclear"


def yields(found: dict[str, Acceptance]) -> str:
    """What a step yields, and who says so."""
    name, a = ngram.best(found)
    if name == ngram.UNKNOWN:
        return (
            "What a drafting step yields is not known: the servers told neither acceptance counts nor token ids "
            "(a vLLM server answers return_token_ids, and its /metrics counts drafts)."
        )
    drafting = (
        f"A drafting step yields {a.mean_length:.2f} tokens (bonus included, {name}); counting"
        if a.drafts
        else (f"No step found anything to draft ({name}); counting")
    )
    return f"{drafting} steps that find nothing to draft, a step yields {a.tokens_per_step:.2f}."


def step_cost(line: pd.Series, found: dict[str, Acceptance]) -> float:
    """An average step of the n-gram server in plain ones, over all tokens; NaN where not measured."""
    return float(ngram.best(found)[1].tokens_per_step / line["measured_total"])


def limits(settings: Any, prompts: int, beside: pd.DataFrame) -> str:
    """What the answer holds for, and where to go on from here."""
    turns = "by turns" if settings.server and settings.variant_server else "one after the other"
    turns = "" if beside["measured"].isna().all() else f", the servers {turns}"
    return (
        f"Limits: {settings.concurrency} request(s) in flight, {settings.max_tokens} tokens a request, {prompts} "
        f"prompts{turns}. Why verifying costs what it does on a mixture of experts: notebook 03. A draft without "
        "repetition: next, the plan, then notebook 04, measured in 05."
    )


def headline(
    base: pd.Series, spread: tuple[float, float], beside: pd.DataFrame, found: dict[str, Acceptance]
) -> dict[str, Any]:
    """The figures of run.json: baseline with its interval, acceptance, measured and predicted speedup.

    `base` is the baseline's row of bench.summary, `spread` its bench.rate_interval.
    """
    line, (source, best) = beside.iloc[0], ngram.best(found)
    foretold = found.get(ngram.PREDICTED)
    values = {"baseline_tok_s": base["tok_s"], "baseline_tok_s_low": spread[0], "baseline_tok_s_high": spread[1]}
    values |= {"baseline_ttft_ms": base["ttft_ms"], "baseline_tpot_ms": base["tpot_ms"]}
    values |= {"ngram_acceptance_length": best.mean_length, "ngram_acceptance_rate": best.rate}
    values |= {"ngram_tokens_per_step": best.tokens_per_step, "ngram_acceptance_source": source}
    values |= {"ngram_acceptance_length_predicted": foretold.mean_length if foretold else np.nan}
    for end in ("", "_low", "_high"):
        values[f"ngram_speedup{end}"] = line[f"measured{end}"]
        values[f"ngram_speedup_predicted{end}"] = line[f"predicted{end}"]
    cost = step_cost(line, found)
    values |= {"ngram_step_cost": cost, "ngram_quiet": None if np.isnan(cost) else bool(cost >= NOISE)}
    return values | {"ngram_worth_trying": worth(line)}
