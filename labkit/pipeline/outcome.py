"""What notebook 04 says at its end: costs beside their prediction, headline, conclusion."""

from __future__ import annotations

from typing import Any

import pandas as pd

from labkit.acceptance import Acceptance
from labkit.vocab import VocabMap


def costs(
    dataset: pd.DataFrame, metrics: pd.DataFrame, laps: dict[str, float], forecast: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Seconds, tokens and tokens a second of each step in this run; a step that was taken up has few seconds.

    With `forecast` (calibrate's) what was predicted stands beside it: predicted_s with _low and _high.
    """
    tokens = {
        "answers": int(dataset.answer_tokens.sum()),
        "states": int(dataset.seq_len.sum()),
        "training": int(metrics.tokens.sum()),
    }
    rows = [{"step": name, "seconds": seconds, "tokens": tokens.get(name, 0)} for name, seconds in laps.items()]
    table = pd.DataFrame(rows)
    table = table.assign(tokens_per_s=table.tokens / table.seconds)
    if forecast is None:
        return table
    return table.merge(forecast[["step", "predicted_s_low", "predicted_s", "predicted_s_high"]], "left", "step")


def headline(
    dataset: pd.DataFrame, simulated: Acceptance, metrics: pd.DataFrame, mapping: VocabMap
) -> dict[str, Any]:
    """The scalars of run.json."""
    return {
        "acceptance_length_simulated": simulated.mean_length,
        "samples": int((dataset.split == "train").sum()),
        "answer_tokens": int(dataset.answer_tokens.sum()),
        "draft_vocab_size": mapping.draft_vocab_size,
        "final_loss": float(metrics.loss.tail(20).mean()),
        "training_seconds": float(metrics.seconds.max()),
    }


def conclusion(dataset: pd.DataFrame, simulated: Acceptance, metrics: pd.DataFrame, k: int) -> str:
    """The answer in words, with its limits."""
    best = metrics.acceptance_length.max()
    trained = int(metrics.tokens.sum())
    answer = "Yes" if simulated.mean_length >= 1.3 else "Not yet"
    conversations = int((dataset.split == "train").sum())
    return (
        f"{answer}: after {trained:,} tokens of training in {metrics.seconds.max():.0f} s its drafts are worth "
        f"**{simulated.mean_length:.2f}** tokens a step at k={k} on held-out prompts of the training kind (best "
        f"epoch {best:.2f}). That is simulated; the engine's own figure, and whether it pays, is the question of "
        f"notebook 05.\n\nLimits: {conversations} conversations, {whose(dataset)} answers. More data "
        "helps before anything else does: where the held-out length falls "
        "while the loss still does, the head has begun to learn its data by heart."
    )


def whose(dataset: pd.DataFrame) -> str:
    """Whose answers the head was trained on, as an adjective."""
    if "origin" in dataset and (dataset.origin != "target").any():
        return "the data set's own"
    hottest = dataset.temperature.max() if "temperature" in dataset else 0
    return f"the target's own (sampled, temperature {hottest:g})" if hottest else "the target's own greedy"


def told(table: pd.DataFrame, otherwise: str) -> Any:
    """The table, or in a notebook a sentence where it is empty."""
    from IPython.display import Markdown

    return table if len(table) else Markdown(otherwise)
