"""How well a prediction did (`beside`), and why n-gram gains on one category and loses on another."""

from __future__ import annotations

import pandas as pd

from labkit.prediction.steps import NOISE
from labkit.prediction.tables import CLOSE


def sentence(beside: pd.DataFrame) -> str:
    """How well the prediction did, and what the rest is."""
    line, table = beside.iloc[0], beside.iloc[1:]
    if pd.isna(line["predicted"]):
        return "Nothing can be predicted: that takes token ids (vLLM's return_token_ids) and step times."
    if pd.isna(line["measured"]):
        told = ", ".join(f"{row.category} {row.predicted:.2f}×" for row in table.itertuples())
        return f"Predicted from step times, nothing measured to compare with: {told}."
    text = f"Over all prompts {line['predicted']:.2f}× was predicted and {line['measured']:.2f}× measured"
    if line["right"] is not None:
        text += f": {'' if line['right'] else 'not '}within {CLOSE:.0%} or inside the interval"
    text = f"{text}. {categories(table)}"
    if line["tokens_per_step"] / line["measured_total"] < NOISE:
        return f"{text} How long its steps took cannot be judged: the machine was not quiet."
    text += f" An average step of the n-gram server took {line['step_overhead']:.2f} times as long as predicted."
    return f"{text} {explanation(beside)}".rstrip()


def categories(table: pd.DataFrame) -> str:
    """In how many categories the prediction is right, of those whose measurement has an interval."""
    judged, missed = table.dropna(subset=["right"]), table[table["right"].eq(False)]
    if judged.empty:
        return "No category has enough prompts for an interval, so none is judged by itself."
    text = f"It is right in {len(judged) - len(missed)} of the {len(judged)} categories that have an interval."
    if len(missed):
        told = ", ".join(
            f"{row.category} {row.predicted:.2f}× for {row.measured:.2f}×" for row in missed.itertuples()
        )
        text += f" It missed {told}."
    return text


def explanation(beside: pd.DataFrame) -> str:
    """Whether the n-gram server's own step times explain what was missed; empty where nothing was."""
    lines = beside.dropna(subset=["explained_right"])
    missed = lines[~lines["right"].astype(bool)]
    if missed.empty:
        return ""
    explained = int(missed["explained_right"].sum())
    text = (
        "With that server's own times of a plain and of a drafting step the same simulated acceptance is right in "
        f"{explained} of the {len(missed)} that were missed"
    )
    if explained == 0:
        return f"{text}: the cost of a step is not what lies between."
    return f"{text}: there the cost of a step was misjudged, not the acceptance."


def reasons(beside: pd.DataFrame, changed: float) -> str:
    """The category that gains most and the one that loses most, and why: tokens a step against its cost.

    `changed` is what `scheduling` found.
    """
    table = beside.iloc[1:]
    shown = "measured" if table["measured"].notna().any() else "predicted"
    known = table.dropna(subset=[f"{shown}_total", "tokens_per_step"]).sort_values(f"{shown}_total")
    if known.empty:
        return "No category has both token ids and a rate, so no reason can be given."
    told = [reason(row, shown, changed) for row in (known.iloc[-1], known.iloc[0])]
    disturbed = (known["tokens_per_step"] / known[f"{shown}_total"]).iloc[[-1, 0]].lt(NOISE).all()
    return " ".join(told[:1] if disturbed or len(known) == 1 else told)


def reason(row: pd.Series, shown: str, changed: float) -> str:
    """Why n-gram is faster or slower on one category: tokens a step = ratio of all tokens x cost of a step.

    A step that drafts cannot cost less than a plain one: a cost below 1 is said to be noise, or a busy machine.
    """
    ratio, tokens = float(row[f"{shown}_total"]), float(row["tokens_per_step"])
    few = {1: " (from one prompt)", 2: " (from two prompts)"}.get(int(row["prompts"]), "")
    cost, where = tokens / ratio, f"on {row['category']}{few}"
    if cost < NOISE:
        times = "the benchmark of one server" if shown == "measured" else "some step times"
        return (
            f"The {ratio:.2f}× {where} is no gain of n-gram's alone: at {tokens:.2f} tokens a step it would take "
            f"steps of {cost:.2f} plain ones, and none is cheaper than a plain one. The machine was busier during "
            f"{times} than during the rest."
        )
    changes = f"{ratio - 1:.0%} faster" if ratio > 1 else f"{1 - ratio:.0%} slower"
    verb = "as fast as no speculation" if abs(ratio - 1) < 0.005 else changes
    part = f" ({changed:.2f} of that is scheduling)" if changed > 1.02 else ""
    costs = f"costs {cost:.2f} plain ones{part}"
    if round(cost, 2) < 1:
        costs = f"costs about one plain one ({cost:.2f}; what is below 1 is noise)"
    said = "is" if shown == "measured" else "should be"
    return f"n-gram {said} {verb} {where} because a step there yields {tokens:.2f} tokens and {costs}."
