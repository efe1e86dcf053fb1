"""What a person brings to a run, looked at before a notebook starts: are the prompts there, can they be read?"""

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
