"""Nothing may be left running after a fault; the figures of the run are printed at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults import figures

OURS = ("resource_tracker", "forkserver")  # multiprocessing's own helpers, which live as long as the process


def children() -> set[psutil.Process]:
    """The processes below this one that are no helpers of Python's."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if not any(word in " ".join(process.cmdline()) for word in OURS):
                found.add(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Every process that a test or the lab started in it has ended."""
    before = children()
    yield
    _, left = psutil.wait_procs(list(children() - before), timeout=15)
    told = [" ".join(process.cmdline())[:100] for process in left if process.is_running()]
    for process in left:
        process.kill()
    assert not told, f"still running: {told}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Each passed test outside of the fuzzers and the checks of security is a fault that was survived."""
    name = Path(report.nodeid.partition("::")[0]).name
    if report.when == "call" and report.passed and not name.startswith(("test_fuzz_", "test_security.")):
        figures.DONE["faults"] += "tests/faults/" in report.nodeid


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The line for LOG.md."""
    if figures.DONE:
        terminalreporter.write_line(f"faults: {figures.summary()}")
