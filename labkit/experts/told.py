"""What recording, counting and budgets found, in words, and the figures that a run's page begins with."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from labkit.experts.live import NO_BUDGET, pareto
from labkit.experts.routing import Routing
from labkit.targets import Geometry

Trend = Mapping[int, tuple[float, float, float]]  # n: low, mid, high of r


def recorded_sentence(name: str, shape: Geometry, routing: Routing) -> str:
    """What was recorded, of which model."""
    return (
        f"**{name}**: {shape.architecture}, {shape.num_moe_layers} of {shape.num_hidden_layers} layers route, "
        f"{shape.n_routed_experts} experts a layer, {shape.num_experts_per_tok} a token. Recorded: "
        f"{len(routing.experts):,} tokens of {len(set(routing.categories))} kinds of text in "
        f"{len(routing.categories)} contexts."
    )


def unique_sentence(by_window: pd.DataFrame, n: int) -> str:
    """Unique experts of n tokens beside independence; `by_window` is unique_by_window, n one of its lengths."""
    row = by_window.set_index("n").loc[n]
    return (
        f"{n} consecutive tokens touch **{row.unique_mean:.1f}** experts a layer [{row.low:.1f}, {row.high:.1f}] "
        f"instead of {by_window.set_index('n').unique_mean[1]:.0f} for one; independence predicts "
        f"{row.uniform:.1f}, popularity alone {row.popularity:.1f}: r({n}) = **{row.reuse:.2f}**."
    )


def sharing_sentence(overlap: pd.DataFrame, coverage: pd.DataFrame) -> str:
    """What tokens share; overlap_table and coverage."""
    distances = overlap.groupby("distance")[["overlap", "uniform"]].mean()
    near, far = distances.iloc[0], distances.iloc[-1]
    tops = coverage.groupby("top")[["coverage", "uniform"]].mean()
    first = tops.iloc[0]
    return (
        f"Neighbours share {near.overlap:.0%} of their experts, tokens {distances.index[-1]} apart "
        f"{far.overlap:.0%}; {near.uniform:.0%} would be chance. The {tops.index[0]} most used experts of a layer "
        f"hold {first.coverage:.0%} of all assignments, {first.uniform:.0%} if all were used alike."
    )


def reuse_sentence(name: str, by_window: pd.DataFrame, trend: Trend, n: int) -> str:
    """The measured reuse factor beside the published trend (reuse_trend)."""
    found = round(by_window.set_index("n").reuse[n], 2)
    low, mid, high = (round(value, 2) for value in trend[n])
    where = "above" if found > high else "below" if found < low else "inside"
    return (
        f"r({n}) of {name} is {found:.2f}; the published figures together say {mid:.2f} [{low:.2f}, {high:.2f}], "
        f"so it lies {where} that band. Figures of other models and texts, at other n: a band, not a curve."
    )


def budgets_beside(live: pd.DataFrame, offline: pd.DataFrame) -> pd.DataFrame:
    """live_budget with what the offline replay said of the same budgets, and which rows no other beats (`pareto`).

    mass_dropped_offline: of Replay.table, over the text that was recorded; `pareto`: by experts read and agreement
    of greedy tokens.
    """
    columns = ["method", "budget", "unique_budget", "saved", "perplexity_ratio", "perplexity_ratio_low"]
    columns += ["perplexity_ratio_high", "greedy_agreement", "acceptance_length_target", "mass_dropped"]
    said = offline[["method", "budget", "mass_dropped"]].rename(columns={"mass_dropped": "mass_dropped_offline"})
    found = live[columns].merge(said, on=["method", "budget"], how="left")
    found.loc[found["method"] == NO_BUDGET, "mass_dropped_offline"] = 0.0
    return found.assign(pareto=found.index.isin(pareto(live).index))


def budget_sentence(live: pd.DataFrame, agreement: float = 0.95) -> str:
    """What budgets lose, and the least that keeps `agreement` of the greedy tokens."""
    n, limited = int(live["n"].iloc[0]), live[live["method"] != NO_BUDGET]
    tightest = limited[limited["budget"] == limited["budget"].min()]
    least = tightest.loc[tightest["greedy_agreement"].idxmax()]
    kept = limited[limited["greedy_agreement"] >= agreement].sort_values("unique_budget")
    text = (
        f"**A budget is lossy**: under B = {least.budget:.0f} a step of {n} tokens reads {least.saved:.0%} fewer "
        f"experts, and {1 - least.greedy_agreement:.0%} of the most likely next tokens are no longer the target's "
        f"({least.method}; perplexity times {least.perplexity_ratio:.2f}). "
    )
    if kept.empty:
        return text + f"No budget tried keeps {agreement:.0%} of them."
    best = kept.iloc[0]
    return text + (
        f"To keep {agreement:.0%} of them it takes B = {best.budget:.0f} ({best.method}), "
        f"which saves {best.saved:.0%}."
    )


def headline(by_window: pd.DataFrame, n: int = 4) -> dict[str, float]:
    """unique_experts_n4 with its interval, uniform and popularity, and reuse_n4 (for n = 4)."""
    row = by_window.set_index("n").loc[n]
    names = {"": "unique_mean", "_low": "low", "_high": "high", "_uniform": "uniform", "_popularity": "popularity"}
    figures = {f"unique_experts_n{n}{end}": float(row[column]) for end, column in names.items()}
    return figures | {f"reuse_n{n}": float(row.reuse)}
