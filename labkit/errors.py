"""The root of every failure that the lab explains: what happened, with the value seen, and what to do."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any


class LabError(Exception):
    """A failure with a remedy. Each module derives one class a kind of failure.

    `what` states the failure with the value seen and where; `remedy` says what to do about it. A command that
    ends with it has `exit_code`, and with 0 did what it was asked.
    """

    exit_code = 1

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        from labkit.calling import copyable

        return f"{self.what}\n  what to do: {copyable(self.remedy)}" if self.remedy else self.what


def tell_briefly() -> None:
    """In JupyterLab, show a LabError or an interrupt as what it says; %tb has the traceback. Headless as ever.

    By IPython's own set_custom_exc (tried with IPython 9.18, ipykernel 7.4).
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None and "LABKIT_HEADLESS" not in os.environ:
        shell.set_custom_exc((LabError, KeyboardInterrupt), brief)


def brief(
    shell: Any, kind: type[BaseException], error: BaseException, trace: TracebackType, tb_offset: int | None = None
) -> list[str]:
    """IPython's handler for these: the message without the way to it."""
    if isinstance(error, KeyboardInterrupt):
        error = kind("interrupted\n  what to do: run the cell again; what was finished is kept")
    shell.showtraceback((kind, error, trace), exception_only=True)
    return []
