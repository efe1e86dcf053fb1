"""next-steps.md: what to try, in which order, and why not the rest."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from labkit import files


def next_steps(ranked: pd.DataFrame, *, title: str, verdict: str = "") -> str:
    """Markdown of `rank`'s frame: the order to try, a table, and what is impossible."""
    possible, others = ranked[ranked["possible"]], ranked[~ranked["possible"]]
    lines = [f"# Next steps: {title}", ""]
    if verdict:
        lines += [f"Verdict before anything is tried: **{verdict}**", ""]
    lines += ["Cheapest first among what may pay; speedups are predicted, with intervals, not measured.", ""]
    lines += [
        "| # | option | draft | hours | acceptance length | speedup | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [table_row(row) for row in possible.to_dict("records")]
    lines += ["", "## In words", ""]
    lines += [in_words(row) for row in possible.to_dict("records")]
    if len(others):
        lines += ["", "## Not possible", ""]
        lines += [
            f"- {row.option} ({row.what}{f', {row.draft}' if row.draft else ''}): {row.why}."
            for row in others.itertuples()
        ]
    return "\n".join(lines) + "\n"


def table_row(row: dict) -> str:
    """One possible option as a row of the table."""
    hours = f"{row['hours']:g} [{row['hours_low']:g}, {row['hours_high']:g}]"
    length = f"{row['acceptance_length']:.2f} [{row['acceptance_low']:.2f}, {row['acceptance_high']:.2f}]"
    speedup = f"{row['speedup']:.2f} [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]"
    what = f"{row['option']}: {row['what']}"
    return f"| {row['rank']} | {what} | {row['draft']} | {hours} | {length} | {speedup} | {row['verdict']} |"


def in_words(row: dict) -> str:
    """One possible option as a sentence: what to measure, what to know, where the figures are from."""
    text = f"{row['rank']}. {row['option']}, {row['draft'] or row['what']}: {row['verdict']}."
    if row["measure_next"]:
        text += f" Measure {row['measure_next']}."
    if row["why"]:
        text += f" Note: {row['why']}."
    return f"{text} Source: {row['source']}."


def write_next_steps(folder: Path | str, ranked: pd.DataFrame, *, title: str, verdict: str = "") -> Path:
    """Write next-steps.md into a run folder; returns its path."""
    path = Path(folder) / "next-steps.md"
    with files.atomic(path) as temporary:
        temporary.write_text(next_steps(ranked, title=title, verdict=verdict), encoding="utf-8")
    return path
