"""How a training is told to stop: signals, an event, a callback; it always stops between two steps, saved."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Protocol, Self

from labkit.errors import LabError

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(LabError):
    """A training was told to stop and has saved where it is."""

    exit_code = 75  # sysexits' EX_TEMPFAIL: run it again


class Flag(Protocol):
    """Anything that can be asked whether it is set: threading.Event, or what a button sets."""

    def is_set(self) -> bool:
        """Whether to stop."""


class Stopping:
    """While it is entered, SIGTERM and SIGINT ask the training to stop; a second one acts as before."""

    def __init__(self, flag: Flag | None = None) -> None:
        """`flag` is looked at between steps."""
        self.flag = flag or threading.Event()
        self.why = ""
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.handlers = {number: signal.signal(number, self.hear) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Give signals back to who had them."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers = {}

    def hear(self, number: int, _frame: FrameType | None) -> None:
        """Note a signal; the next one is not caught any more."""
        self.why = signal.Signals(number).name
        self.restore()

    @property
    def wanted(self) -> bool:
        """Whether the training is to stop after this step."""
        if not self.why and self.flag.is_set():
            self.why = "the stop flag"
        return bool(self.why)
