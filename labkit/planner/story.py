"""The plan that belongs to a run: for the model that is served, on its machine; written into the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from labkit.planner import writing
from labkit.planner.plan import Plan, plan, verdict
from labkit.planner.work import Work

PROMPT_SHARE = 10  # a tenth of a conversation is prompt, where only its length is given, and at most
LONGEST_PROMPT = Work().prompt_tokens


def of_run(settings: Any) -> Plan:
    """The plan of a notebook's settings: `plan_for` on `plan_hardware`, plan_conversations of plan_tokens.

    What the settings do not have takes the planner's own defaults.
    """
    length = getattr(settings, "plan_tokens", Work().length)
    prompt = max(1, min(LONGEST_PROMPT, length // PROMPT_SHARE))
    work = Work(
        conversations=getattr(settings, "plan_conversations", Work().conversations),
        prompt_tokens=prompt,
        answer_tokens=length - prompt,
        ttt_steps=getattr(settings, "ttt_steps", Work().ttt_steps),
    )
    free_gb = float(getattr(settings, "plan_disk_gb", 0)) or None
    return plan(settings.plan_for, settings.plan_hardware, work, free_gb=free_gb)


def write(settings: Any, found: Plan | None = None) -> Plan:
    """Write next-steps-eagle.md into the run's folder; returns the plan."""
    found = found or of_run(settings)
    days = getattr(settings, "rent_after_days", 2.0)
    writing.write(settings.folder.parent, found, rent_after_days=days)
    return found


def sentence(settings: Any, found: Plan) -> str:
    """The plan in a sentence, with a link from a notebook's page to the file."""
    word, why = verdict(found, getattr(settings, "rent_after_days", 2.0))
    return (
        f"A head of its own for {found.target.name} on {found.machine.what}: **{word}** ({why}). The plan, with "
        f"data, disk, hours, what to rent and the exact commands: [{writing.FILE}](../{writing.FILE}); in a "
        f"terminal `labkit plan --train --target {found.target.name} --hardware {found.machine.name}`."
    )


def advice(settings: Any, found: Plan, measured: pd.DataFrame) -> str:
    """What to do next about a head for the model that was measured (a benchmark's rows).

    The plan in a sentence where it is that model's or was asked for; else it stands as an example, which it is.
    """
    known = measured["model"].dropna()
    served = Path(str(known.iloc[0]) if len(known) else settings.target).name
    asked = settings.plan_for != type(settings).plan_for
    if asked or served.lower() == found.target.name.lower():
        return sentence(settings, found)
    return (
        f"Whether a head of its own pays for {served}, which was measured here, is not planned yet: `labkit plan "
        "--train --target CONFIG.json --hardware NAME` says what one takes, with its own config.json and a "
        "machine of data/hardware_training.json, and so do `plan_for` and `plan_hardware` here. "
        f"What such a plan looks like: [{writing.FILE}](../{writing.FILE}), for {found.target.name} on "
        f"{found.machine.what}, an example and no advice on {served}."
    )
