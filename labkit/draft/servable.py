"""The form of a head that the installed vLLM serves with everything it was trained with."""

from __future__ import annotations

from pathlib import Path

from labkit.draft.check_config import DRAFT_MODEL, READERS, unread_in
from labkit.draft.export import convert
from labkit.draft.forms import read


def servable(head_dir: Path, folder: Path) -> Path:
    """The head itself, or its llama form, written below `folder`, where only that one is served as it was trained.

    vLLM 0.24 drops norm_output when it reads speculators' form; its draft model has it and takes it from the llama
    form. Raises BadHead; what neither form brings is left to `preflight`.
    """
    head = read(head_dir)
    reader = READERS.get(head.form)
    if not reader or not set(unread_in(reader, head)) - set(unread_in(DRAFT_MODEL, head)):
        return head_dir
    return convert(head_dir, folder / "head_llama_form", "llama")
