"""Does this installation fit? Versions and machine at a glance, and a probe through every seam."""

from __future__ import annotations

from labkit.doctor.components import Line, examine, report
from labkit.doctor.probe import Outcome, ProbeFailed, probe

__all__ = ["Line", "Outcome", "ProbeFailed", "examine", "probe", "report"]
