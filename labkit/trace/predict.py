"""How many collectives a decode step should have, and what a different count means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from labkit.trace.model import Trace
from labkit.trace.summary import per_step

if TYPE_CHECKING:
    from labkit.targets import Geometry


COUNTED = ["rank", "collective", "calls_per_step", "least", "most", "steps"]


def geometry_of(target: str) -> Geometry:
    """The geometry of a shipped name, a directory or config.json, or of a target that the lab builds."""
    from labkit import targets
    from labkit.targets.geometry import UnknownGeometry

    try:
        return targets.geometry(target)
    except UnknownGeometry:
        return targets.resolve(target).geometry


def counts(trace: Trace, geometry: Geometry | None = None) -> pd.DataFrame:
    """Calls a decode step, a row a rank and collective: calls_per_step least most steps between_steps predicted.

    `calls_per_step` is the median; `between_steps` are calls outside of all steps, for each decode step (on a GPU
    the marked step ends before the logits are gathered). `predicted` (missing without a geometry) is what tensor
    parallelism over all ranks asks for: two AllReduces a layer, one for the embedding, one gather of the logits.
    """
    every = per_step(trace)
    if every.empty:
        return pd.DataFrame(columns=[*COUNTED, "between_steps", "predicted"])
    found = every.groupby(["rank", "collective"])["calls"].agg(["median", "min", "max", "size"]).reset_index()
    found.columns = COUNTED
    calls = trace.collectives()
    outside = calls[calls["step"].isna()].groupby(["rank", "collective"]).size()
    places = pd.MultiIndex.from_frame(found[["rank", "collective"]])
    found["between_steps"] = (outside.reindex(places, fill_value=0).to_numpy() / found["steps"]).round(2)
    expected = (
        {} if geometry is None else {"AllReduce": geometry.expected_allreduces(world(trace)), "AllGather": 1}
    )
    found["predicted"] = found["collective"].map(expected).astype("Float64")
    return found


def world(trace: Trace) -> int:
    """How many ranks share the model: as the traces say, else as many as there are."""
    return max([len(trace.ranks), *(rank.world_size or 0 for rank in trace.ranks)])


def allreduce_sentence(trace: Trace, geometry: Geometry | None = None) -> str:
    """What the count of AllReduces a decode step is, step by step where they differ, and why it is that."""
    every = per_step(trace)
    reduces = every[every["collective"] == "AllReduce"]
    if reduces.empty:
        return "No AllReduce in any decode step: one rank, or communication of another kind."
    usual = int(reduces["calls"].median())
    parts = [f"{usual} AllReduces a decode step"]
    odd = reduces[reduces["calls"] != usual]
    if len(odd):
        told = ", ".join(f"{row.calls} in step {row.step} of rank {row.rank}" for row in odd.head(4).itertuples())
        more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
        parts[0] += f" ({told}{more}: a call that the trace lacks, or a step of another shape)"
    if geometry is not None:
        parts.append(comparison(usual, geometry, world(trace)))
    return "; ".join(parts) + "."


def comparison(measured: int, geometry: Geometry, ranks: int) -> str:
    """The measured count beside the geometry's, and what a difference usually is."""
    layers, expected = geometry.num_hidden_layers, geometry.expected_allreduces(ranks)
    if ranks < 2:
        return "one rank alone needs none"
    law = f"2 × {layers} layers + 1 for the embedding = {expected} for {geometry.name} on {ranks} ranks"
    if measured == expected:
        return law
    apart = measured - expected
    reasons = {
        -1: "the embedding is not split, or a call is missing",
        -layers: "one a layer is gone: attention is replicated (data-parallel), or fused with another call",
        -layers - 1: "one a layer and the embedding's are gone: data-parallel attention",
    }
    why = reasons.get(apart)
    if why is None:
        why = (
            "sampling, routing or a drafter add some"
            if apart > 0
            else "some are fused, or other collectives stand in"
        )
    return f"the geometry predicts {law}: {abs(apart)} {'more' if apart > 0 else 'fewer'} were seen ({why})"
