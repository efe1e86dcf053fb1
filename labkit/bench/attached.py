"""Servers that were given by address: do they answer, and are they what they were given for?"""

from __future__ import annotations

import warnings
from typing import Any

import pandas as pd

from labkit import acceptance, engine
from labkit.engine import urls
from labkit.engine.server import entry_at
from labkit.errors import LabError

ROWS = {"server": ("baseline-", "step-times"), "variant_server": ("ngram-", "eagle3-")}
EVERY_STEP = 0.9  # of a head's steps have a draft: all but those at the end of the context


class WrongServer(LabError):
    """A server that was given by its address is not what it was given for."""


def require_answers(settings: Any) -> None:
    """Raise engine.ServerUnreachable or BadUrl, naming the parameter, for an address where nothing answers.

    All are asked at once, so that a mistyped second one is not found out after the first was measured. One whose
    rows are there already may be away: they are used again.
    """
    for name in ("server", "variant_server"):
        url = getattr(settings, name, "")
        try:
            if not url or (rows_of(settings, name) and not entry_at(urls.base_url(url))):
                continue
            engine.attach(url, getattr(settings, "model", "") or None)
        except (engine.ServerUnreachable, urls.BadUrl) as error:
            raise type(error)(f"{name}={url}: {error.what}", error.remedy) from error


def rows_of(settings: Any, name: str) -> bool:
    """Whether the run holds whole measurements of the server that this parameter names."""
    found = [path.name for path in settings.folder.parent.glob("*/measured/*.parquet")]
    return any(each.startswith(ROWS[name]) and "-incomplete" not in each for each in found)


def speculative_tokens(url: str) -> int | None:
    """The most tokens that a server drafts a step, 0 where it does not speculate; None where it does not tell.

    vLLM publishes a counter a draft position where it speculates, and none where it does not (/metrics).
    """
    try:
        counters = acceptance.snapshot(urls.base_url(url))
    except acceptance.Unreadable:
        return None
    if counters.speculates:
        return len(counters.accepted_at) or None
    return 0 if "generated" in counters.values else None


def refuse_wrong(settings: Any, variant: str) -> None:
    """Raise WrongServer where what is about to be measured is not what its parameter says; warn where it may be.

    A baseline that speculates is somebody's own server as it is, unless the other one does not: then the two are
    swapped. The variant speculates, by as many tokens as the settings say.
    """
    if variant == "baseline" and settings.server:
        refuse_baseline(settings)
    elif variant != "baseline" and settings.variant_server:
        refuse_variant(settings, speculative_tokens(settings.variant_server))
        warn_of_two_models(settings)


def refuse_baseline(settings: Any) -> None:
    """`refuse_wrong` for the baseline; what is wrong with the other server is said now, not after this one."""
    drafts = speculative_tokens(settings.server)
    other = speculative_tokens(settings.variant_server) if getattr(settings, "variant_server", "") else None
    if drafts and other == 0:
        raise WrongServer(
            f"server={settings.server} speculates ({drafts} tokens a draft) and "
            f"variant_server={settings.variant_server} does not",
            "they are swapped: give each the other's address",
        )
    if drafts:
        warnings.warn(
            f"server={settings.server} speculates already ({drafts} tokens a draft): its rates are not those of "
            "plain decoding, and nothing can be predicted from them",
            stacklevel=4,
        )
    if other is not None:
        refuse_variant(settings, other)


def refuse_variant(settings: Any, drafts: int | None) -> None:
    """`refuse_wrong` for the variant, which drafts so many tokens a step; None where it does not tell."""
    wanted, url = settings.num_speculative_tokens, settings.variant_server
    if drafts == 0:
        raise WrongServer(
            f"variant_server={url} does not speculate: it counts no drafts",
            "start it with --speculative-config (docs/bring-your-own.md), or leave variant_server out",
        )
    if drafts is not None and drafts != wanted:
        raise WrongServer(
            f"variant_server={url} drafts {drafts} tokens a step, num_speculative_tokens is {wanted}",
            f"give -p num_speculative_tokens={drafts}, or start the server with {wanted}",
        )


def warn_of_two_models(settings: Any) -> None:
    """Warn where the two servers' models have neither name nor directory in common."""
    told = []
    for url in (settings.server, settings.variant_server):
        entry = entry_at(urls.base_url(url), settings.model) if url else {}
        told.append({str(value) for value in (entry.get("id"), entry.get("root")) if value})
    if all(told) and not told[0] & told[1]:
        names = [" or ".join(sorted(each)) for each in told]
        warnings.warn(
            f"server serves {names[0]}, variant_server serves {names[1]}: both should serve one model",
            stacklevel=4,
        )


def refuse_another_method(rows: pd.DataFrame, url: str) -> None:
    """Raise WrongServer where rows that should be a head's have many steps without a draft, as n-gram's have."""
    try:
        share = acceptance.from_rows(rows).drafting_share
    except acceptance.NoCounters:
        return
    if share < EVERY_STEP:
        raise WrongServer(
            f"variant_server={url} drafted in {share:.0%} of its steps only: an EAGLE-3 head drafts in every one",
            "this looks like n-gram: start it with the head (method eagle3 in --speculative-config)",
        )
