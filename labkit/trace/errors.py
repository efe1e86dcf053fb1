"""What can be wrong with traces: one class a failure."""

from __future__ import annotations

from labkit.errors import LabError


class TraceNotFound(LabError):
    """There is no trace file at a path."""


class NotATrace(LabError):
    """A file is no Kineto trace, or nothing in it can be read."""


class NoKernels(LabError):
    """A trace says when work was launched, but not what ran: time cannot be attributed."""


class NoSteps(LabError):
    """A trace has no steps: neither markers nor a repetition."""


class CaptureFailed(LabError):
    """A server did not profile, or its trace files did not come."""
