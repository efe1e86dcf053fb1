"""What a training measures: a row a step, on the device until somebody looks, then parquet and TensorBoard."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from labkit import files
from labkit.errors import LabError

WHOLE_NUMBERS = ("step", "epoch", "tokens", "trained_tokens", "skipped")


class MetricsLost(LabError):
    """The rows of a training are gone or unreadable, and only training again would make others."""


def read_metrics(path: Path) -> pd.DataFrame:
    """What a training measured, a row a step (`Metrics.frame`), from its metrics.parquet; raises MetricsLost."""
    try:
        return files.read_parquet(path)
    except files.BrokenFile as error:
        remedy = f"bring a copy back, or train anew: delete {path.parent / 'head'} and run again"
        raise MetricsLost(error.what, remedy) from error


def tensorboard(folder: Path) -> Any:
    """A writer of event files in `folder`, or None where the package tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))


@dataclass
class Metrics:
    """The rows of a training; numbers that a device still computes wait in `pending` until `flush`."""

    path: Path
    rows: list[dict[str, float]] = field(default_factory=list)
    pending: list[tuple[dict[str, float], Sequence[str], torch.Tensor]] = field(default_factory=list)
    events: Any = None

    def add(self, row: dict[str, float], **measured: torch.Tensor) -> None:
        """A step's row, and scalars that are on the device."""
        values = torch.stack([value.detach().double() for value in measured.values()])
        self.pending.append((row, list(measured), values))

    def flush(self) -> list[dict[str, float]]:
        """Fetch what is pending, all at once, and return its rows."""
        if not self.pending:
            return []
        fetched = torch.stack([values for _row, _names, values in self.pending]).tolist()
        new = [
            row | dict(zip(names, values, strict=True))
            for (row, names, _tensor), values in zip(self.pending, fetched, strict=True)
        ]
        self.pending = []
        self.rows += new
        for row in new:
            self.write_events(row)
        return new

    def write_events(self, row: dict[str, float]) -> None:
        """The row as TensorBoard's scalars."""
        if self.events is None:
            return
        for name, value in row.items():
            if name not in ("step", "seconds") and math.isfinite(value):
                self.events.add_scalar(f"train/{name}", value, int(row["step"]))

    def evaluated(self, **values: float) -> None:
        """Add what held-out data said to the last row."""
        self.rows[-1] |= values
        self.write_events({"step": self.rows[-1]["step"], **values})

    @property
    def frame(self) -> pd.DataFrame:
        """Columns step epoch learning_rate tokens trained_tokens seconds loss grad_norm skipped acceptance_length
        validation_loss; the last two at the end of an epoch."""
        frame = pd.DataFrame(self.rows)
        return frame.astype({name: int for name in WHOLE_NUMBERS if name in frame})

    def write(self) -> pd.DataFrame:
        """Write them all to the parquet file, whole, so that a plot elsewhere can read it at any time."""
        frame = self.frame
        files.write_parquet(self.path, frame)
        if self.events is not None:
            self.events.flush()
        return frame


def opened(path: Path, rows: list[dict[str, float]], *, events: bool) -> Metrics:
    """Metrics that go on after `rows`; says so where TensorBoard's files cannot be written."""
    writer = tensorboard(path.parent / "tensorboard") if events else None
    if events and writer is None:
        warnings.warn(f"tensorboard is not installed: no event files, see {path.name} instead", stacklevel=2)
    return Metrics(path, list(rows), events=writer)
