"""Each fix served, timed and profiled like the base, and the gain beside the one that was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy import stats

from labkit import engine, trace
from labkit.errors import LabError
from labkit.trace import profiler

if TYPE_CHECKING:
    from labkit.settings import Profiling

RESAMPLES = 2000
BASE = "as served"


def measure(
    settings: Profiling, chosen: dict[str, str], base: trace.Trace, folder: Path
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Serve each chosen fix and time the same requests as the base's: (a row a token, a row a changed category).

    The first: fix request token gap_ms, without the profiler. The second: `trace.compare` with the base, with
    `fix`; only for fixes that are served here. A fix that does not start is a row with `error` and no gap.
    """
    gaps, changes = [], []
    for name, url in chosen.items():
        try:
            client, traces = timed(settings, name, url, folder)
        except LabError as error:
            gaps.append(pd.DataFrame({"fix": [name], "gap_ms": [np.nan], "error": [str(error).splitlines()[0]]}))
            continue
        gaps.append(client[~client["profiled"]].assign(fix=name, error=""))
        if traces:
            changes.append(trace.compare(base, traces, window="period").assign(fix=name))
    columns = ["fix", "request", "token", "gap_ms", "error"]
    frame = pd.concat(gaps, ignore_index=True).reindex(columns=columns) if gaps else pd.DataFrame(columns=columns)
    return frame, pd.concat(changes, ignore_index=True) if changes else pd.DataFrame()


def timed(settings: Profiling, name: str, url: str, folder: Path) -> tuple[pd.DataFrame, trace.Trace | None]:
    """The client's view of one fix, and its traces where the lab serves it."""
    if url:
        return profiler.unprofiled(engine.attach(url), settings.decode_steps, settings.prompt_tokens), None
    traces = folder / "fixes" / name
    ranks = 1 if name == "single-rank" else settings.tensor_parallel_size
    return profiler.served(settings, name, ranks, traces, folder), trace.load(traces)


def compared(predicted: pd.DataFrame, client: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """A row a fix, the base first: predicted and measured side by side.

    Columns fix what tpot_ms speedup_low speedup_high (predicted) measured_speedup measured_low measured_high
    because error. `tpot_ms` and the measured speedup are of the client's median gap between tokens without the
    profiler, base over fix, with a 95% bootstrap interval; NaN where not measured.
    """
    plain = (
        client.loc[~client["profiled"].astype(bool), "gap_ms"].dropna() if len(client) else pd.Series(dtype=float)
    )
    base = {"fix": BASE, "what": "the base", "tpot_ms": plain.median(), "speedup_low": 1.0, "speedup_high": 1.0}
    unmeasured = ratio(np.zeros(0), np.zeros(0))  # the columns are there without any fix, too
    rows = [base | unmeasured | {"measured_speedup": 1.0 if len(plain) else np.nan, "because": "", "error": ""}]
    for row in predicted.itertuples():
        mine = measured[measured["fix"] == row.fix]
        gaps = mine["gap_ms"].dropna()
        told = {"fix": row.fix, "what": row.what, "tpot_ms": gaps.median(), "because": row.because}
        told |= {"speedup_low": row.speedup_low, "speedup_high": row.speedup_high}
        told["error"] = "; ".join(text for text in mine["error"].dropna().unique() if text)
        rows.append(told | ratio(plain.to_numpy(), gaps.to_numpy()))
    return pd.DataFrame(rows)


def ratio(base: np.ndarray, fix: np.ndarray) -> dict[str, float]:
    """Median gap of the base over the fix's, with a percentile bootstrap interval (scipy)."""
    if len(base) < 2 or len(fix) < 2:
        return dict.fromkeys(("measured_speedup", "measured_low", "measured_high"), np.nan)
    found = stats.bootstrap(
        (base, fix),
        lambda a, b, axis: np.median(a, axis=axis) / np.median(b, axis=axis),
        vectorized=True,
        paired=False,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = found.confidence_interval
    middle = float(np.median(base) / np.median(fix))
    return {"measured_speedup": middle, "measured_low": float(low), "measured_high": float(high)}


def sentence(table: pd.DataFrame, changes: pd.DataFrame) -> str:
    """What the fixes gave beside what was predicted, a line each, and which to take before speculating."""
    rows = table[table["fix"] != BASE]
    if rows.empty:
        return "One rank shares with nobody: no fix of communication applies."
    lines = [line(row, changes) for row in rows.itertuples()]
    done = rows.dropna(subset=["measured_speedup"])
    wins = done[done["measured_low"] > 1].sort_values("measured_speedup")
    if len(wins):
        best = wins.iloc[-1]
        lines.append(f"**Take {best.fix} before speculating:** {best.measured_speedup:.2f}× for a flag.")
    elif len(done):
        lines.append(
            "**None of those measured is faster than the base:** communication is not to be had cheaper here."
        )
    else:
        lines.append("Nothing was measured here: start the server with the fix's flags and give `fixes=name=URL`.")
    return "\n".join(f"- {text}" for text in lines)


def line(row: object, changes: pd.DataFrame) -> str:
    """One fix: prediction, measurement, and the category that changed most."""
    text = f"`{row.fix}` ({row.what}): predicted {span(row.speedup_low, row.speedup_high)} ({row.because})"
    if row.error:
        return f"{text}; could not be measured: {row.error}"
    if np.isnan(row.measured_speedup):
        return f"{text}; not measured"
    text += f"; measured **{row.measured_speedup:.2f}×** [{row.measured_low:.2f}, {row.measured_high:.2f}]"
    if len(changes) and row.fix in set(changes["fix"]):
        mine = changes[(changes["fix"] == row.fix) & (changes["category"] != "decode step")]
        most = mine.loc[mine["change_ms"].abs().idxmax()]
        text += f", most of all in {most.category} ({most.change_ms:+.2f} ms)"
    return text


def span(low: float, high: float) -> str:
    """A predicted interval in words."""
    if np.isnan(low):
        return "nothing"
    return f"{low:.2f}×" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}×"
