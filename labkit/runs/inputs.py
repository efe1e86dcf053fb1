"""What a person brings to a run, looked at before a notebook starts: are prompts readable, do servers answer?"""

from __future__ import annotations

from typing import Any

from labkit.settings import Settings


def refuse(chosen: Settings) -> None:
    """Raise what the notebook would raise of its prompts once it had started a kernel, or a server.

    bench.BadPrompts for the benchmark's (02, 05), conversations.BadPromptFile for a data set's file (04).
    """
    source: Any = getattr(chosen, "prompts", None)
    if chosen.notebook.startswith("04"):
        from labkit.conversations import raw

        raw.refuse_missing(raw.source(source))
    elif source is not None:
        from labkit import bench

        bench.prompts(source)


def refuse_servers(chosen: Settings) -> None:
    """Raise ServerUnreachable or BadUrl, naming the parameter, where a given server does not answer."""
    if getattr(chosen, "server", "") or getattr(chosen, "variant_server", ""):
        from labkit.bench import attached

        attached.require_answers(chosen)
