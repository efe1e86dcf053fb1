"""Acceptance of one request from what its response says of itself: vLLM's metrics, SGLang's meta_info."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.acceptance.counts import Acceptance, Impossible
from labkit.acceptance.sources import from_positions, from_steps, of_verified

# SGLang's names for a request's accepted and drafted tokens, newest first.
ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
MOST = 4096  # draft tokens a step: nobody drafts more, and there is a count for each
DRAFTED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")


def from_response(told: Mapping[str, Any], tokens: int) -> Acceptance:
    """Acceptance from a response's own account; `tokens`: of the answer, the first one included."""
    if "spec_verify_ct" in told:
        return from_sglang(told, int(told.get("completion_tokens") or tokens))
    return from_vllm(told)


def from_vllm(metrics: Mapping[str, Any]) -> Acceptance:
    """From vLLM's metrics.speculative_decoding: exact by step at level `detailed`, else from the histogram.

    The server has to run with --per-request-spec-decode-metrics summary or detailed (vLLM 0.32).
    """
    k, accepted = int(metrics["num_spec_tokens"]), metrics.get("per_step_accepted")
    if not 0 <= k <= MOST:
        raise Impossible(f"the response speaks of {k} draft tokens a step", "is this vLLM's own account?")
    if accepted is not None and metrics.get("per_step_drafted") is not None:
        return from_steps(metrics["per_step_drafted"], accepted, k=k)
    histogram = metrics["acceptance_histogram"]  # [j]: steps that accepted exactly j draft tokens
    return from_positions(at_least(histogram, k), drafts=sum(histogram), drafted=metrics["num_draft_tokens"])


def from_sglang(meta: Mapping[str, Any], completion_tokens: int) -> Acceptance:
    """From SGLang's meta_info: spec_verify_ct steps yielded the tokens after the first.

    Its spec_accept_length is completion_tokens / spec_verify_ct, first token included; here that one is left out.
    Positions are known where its histogram adds up to the accepted tokens; versions differ in whether its index
    counts the bonus token, and one that fits neither way is left out.
    """
    verified, tokens = int(meta["spec_verify_ct"]), completion_tokens - 1
    accepted = next((int(meta[name]) for name in ACCEPTED if meta.get(name) is not None), None)
    drafted = next((int(meta[name]) for name in DRAFTED if meta.get(name) is not None), None)
    whole = of_verified(verified, tokens, drafted, accepted)
    histogram = [int(n) for n in meta.get("spec_accept_histogram") or ()]
    for shifted in (histogram, histogram[1:]):
        total = sum(j * steps for j, steps in enumerate(shifted))
        if len(shifted) > 1 and sum(shifted) == verified and total == whole.accepted:
            at = at_least(shifted, len(shifted) - 1)
            options = {"drafts": verified, "drafted": drafted, "steps": verified, "tokens": tokens}
            return Acceptance(accepted_at=tuple(at), **options)
    return whole


def at_least(histogram: Sequence[int], k: int) -> list[int]:
    """Steps that accepted more than i tokens, for i below k, from the number that accepted exactly j."""
    return [sum(histogram[position + 1 :]) for position in range(k)]
