"""Are the head's greedy outputs the target's own, at every point of the sweep, but for near-ties?"""

from __future__ import annotations

import contextlib
import os

import pandas as pd

from labkit import agreement, files
from labkit.engine import OnDemand
from labkit.evaluation.candidates import BASELINE, EAGLE3
from labkit.settings import Evaluation

KINDS = {"prompt_id": "string", "category": "string", "identical": "bool", "position": "Int64"}
KINDS |= {"gap_nats": "Float64", "near_tie": "boolean", "k": "int64", "streams": "int64"}
KINDS |= {"allowed_nats": "float64"}
OTHER = "other"
WIDEST_NATS = 0.5  # four steps of bf16 numbers between 16 and 32: no witness allows more


def none() -> pd.DataFrame:
    """No outputs compared."""
    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in KINDS.items()})


def judged_points(rows: pd.DataFrame, plain: OnDemand, settings: Evaluation) -> pd.DataFrame:
    """agreement.compare and judge of each greedy point of the head, with its k and streams; may be empty.

    Every point is held against the baseline's first outputs at the settings' own concurrency. Where other numbers
    of tokens share a step the engine's kernels round otherwise, with or without a head: with more than one stream
    a gap counts as a near-tie up to `allowed_nats`, the largest by which the baseline at another number of streams
    differs from itself, between NEAR_TIE_NATS and WIDEST_NATS. What was asked before is not asked again.
    """
    greedy = rows[(rows["temperature"] == 0) & rows["variant"].isin([BASELINE, EAGLE3])]
    plainly = greedy["variant"] == BASELINE
    own = greedy[plainly & (greedy["streams"] == settings.concurrency)]
    found, apart = [], [agreement.NEAR_TIE_NATS]
    for _, itself in greedy[plainly & (greedy["streams"] != settings.concurrency)].groupby("streams"):
        with contextlib.suppress(agreement.NoTokenIds):
            gaps = judged(against(own, itself), plain, settings)["gap_nats"]
            apart += list(gaps[agreement.within(gaps, WIDEST_NATS).fillna(False)])
    for (k, streams), mine in greedy[~plainly].groupby(["k", "streams"]):
        with contextlib.suppress(agreement.NoTokenIds):  # other servers than vLLM: words cannot be compared
            compared = judged(against(own, mine), plain, settings)
            allowed = agreement.NEAR_TIE_NATS if streams == 1 else max(apart)
            compared["near_tie"] = agreement.within(compared["gap_nats"], allowed)
            found.append(compared.assign(k=k, streams=streams, allowed_nats=allowed))
    return pd.concat(found, ignore_index=True) if found else none()


def against(own: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """agreement.compare of the baseline's outputs with others, the baseline's own at more streams among them."""
    return agreement.compare(pd.concat([own, other.assign(variant=OTHER)], ignore_index=True), BASELINE, OTHER)


def judged(compared: pd.DataFrame, plain: OnDemand, settings: Evaluation) -> pd.DataFrame:
    """agreement.judge, kept on disk under what it depends on."""
    names = ["prompt_id", "identical", "baseline_token", "variant_token", "prompt_token_ids", "prefix_ids"]
    digest = files.digest(compared[names].to_dict("records"))
    path = settings.folder / "measured" / f"agreement-{digest}.parquet"
    if path.exists() and not os.environ.get("LABKIT_FORCE"):
        return files.read_parquet(path)
    found = agreement.judge(compared, plain)
    files.write_parquet(path, found)
    return found


def sentence(compared: pd.DataFrame) -> str:
    """How many outputs are identical, and whether the others are near-ties, as Markdown."""
    if compared.empty:
        return "No outputs could be compared: that takes token ids from both servers, and one with the head."
    wrong, points = len(agreement.unexplained(compared)), len(compared.groupby(["k", "streams"]))
    most = compared["allowed_nats"].max()
    wide = most > agreement.NEAR_TIE_NATS
    also = f", with several streams up to {most:.2g}, as the baseline from itself" if wide else ""
    told = (
        f"**{agreement.share_identical(compared):.0%}** of {len(compared)} greedy outputs at {points} points "
        f"of the sweep are identical; of those that differ, {wrong} do so by more than a near-tie "
        f"({agreement.NEAR_TIE_NATS} nats{also})."
    )
    return told + (" **Those are a bug: do not trust this head's server.**" if wrong else "")
