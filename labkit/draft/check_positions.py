"""What config.json of a head says wrongly of positions: RoPE, their number, a sliding window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from labkit.draft.config import raw_config, rope_of
from labkit.draft.forms import Head
from labkit.draft.problem import ANEW, CONFIG, Problem
from labkit.targets import Target
from labkit.targets.configs import unwrap

ROPE_KEYS = ("rope_type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
ROPE_KEYS += ("low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "partial_rotary_factor")
ROPE_DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "factor": 1.0, "partial_rotary_factor": 1.0}


def plain(rope: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the angles, defaults filled in; a scaling by 1 is none."""
    values = {name: rope.get(name, ROPE_DEFAULTS.get(name)) for name in ROPE_KEYS}
    if values["rope_type"] in ("yarn", "linear", "dynamic") and float(values["factor"] or 1.0) == 1.0:
        values["rope_type"] = "default"
    if values["rope_type"] == "default":
        values = {"rope_type": "default", "rope_theta": values["rope_theta"]}
    return {name: float(value) if isinstance(value, int) else value for name, value in values.items()}


def rope_problems(head: Head, target: Target) -> Iterator[Problem]:
    """RoPE other than the target's, said in one schema only, or in two that differ (SpecForge#265, #742)."""
    layer = head.layer if head.form == "speculators" else head.written
    mine, its = rope_of(layer), rope_of(unwrap(raw_config(target))[0])
    trained = (head.record.get("trained_with") or {}).get("rope_parameters")
    if plain(mine) != plain(its) and trained in (None, mine):  # else trained_problems says it
        ours = bool(head.record)
        yield Problem(
            "rope",
            f"{CONFIG}: rope_parameters",
            f"rope_parameters is {mine}, the target's is {its}: "
            + (
                "acceptance falls, the more the longer the text"
                if ours or head.form == "speculators"
                else "well only if the head was trained with just that"
            ),
            "write the RoPE that the head was trained with, in both schemas",
            fatal=ours or head.form == "speculators",
        )
    old = {name: layer[name] for name in ("rope_theta", "rope_scaling") if name in layer}
    if (
        "rope_parameters" in layer
        and old
        and plain(rope_of(old | {"rope_theta": layer.get("rope_theta")})) != plain(mine)
    ):
        yield Problem(
            "rope schemas",
            f"{CONFIG}: rope_parameters and rope_theta",
            f"they differ: {layer['rope_parameters']} against {old}: each engine takes another one",
            "write the same RoPE in both",
        )
    if "rope_parameters" in layer and plain(rope_of(old)) != plain(mine) and "rope_theta" not in old:
        yield Problem(
            "rope schemas",
            f"{CONFIG}: rope_theta",
            "only rope_parameters says the RoPE: what is older than Transformers 5 takes base 10000, unscaled",
            "write rope_theta and rope_scaling, too",
            fatal=False,
        )


def position_problems(head: Head, target: Target, max_model_len: int) -> Iterator[Problem]:
    """Fewer positions than will be served: beyond them drafts are worth little (SpecForge#271)."""
    said, trained = head.layer.get("max_position_embeddings"), head.record.get("trained_with") or {}
    its = max(trained.get("max_position_embeddings") or 0, target.geometry.max_position_embeddings)
    if not isinstance(said, int):
        yield Problem(
            "positions",
            f"{CONFIG}: max_position_embeddings",
            "max_position_embeddings is not said: engines take 2048",
            f"write {its}",
            fatal=head.form != "other",
        )
    elif said < min(its, max_model_len):
        yield Problem(
            "positions",
            f"{CONFIG}: max_position_embeddings",
            f"max_position_embeddings is {said}, the target's is {its}: acceptance falls on long texts",
            f"write {its}, or serve with --max-model-len {said}",
        )


def window_problems(head: Head, engine: str) -> Iterator[Problem]:
    """A sliding window that the draft was trained with and would be served without (speculators#684)."""
    layer = head.layer
    kinds, window = layer.get("layer_types") or [], layer.get("sliding_window")
    where = f"{CONFIG}: sliding_window"
    sliding = "sliding_attention" in kinds
    if sliding and not window:
        yield Problem(
            "window", where, "layer_types has sliding_attention, but no sliding_window says how wide", ANEW
        )
    elif sliding and engine == "sglang":
        remedy = f"serve with --speculative-draft-window-size {window}"
        yield Problem("window", where, f"SGLang ignores the draft's sliding window of {window}", remedy)
    elif layer.get("use_sliding_window") and window and not sliding:
        yield Problem(
            "window",
            where,
            f"the draft has a sliding window of {window}, but layer_types does not say so: engines attend to all",
            "write layer_types with sliding_attention, or use_sliding_window false where it was trained without",
        )
    if kinds and len(kinds) < layer.get("num_hidden_layers", 1):
        yield Problem("window", f"{CONFIG}: layer_types", f"{len(kinds)} entries for more layers", ANEW)
