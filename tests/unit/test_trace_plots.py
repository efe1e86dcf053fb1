"""The figures and sentences of notebook 01, for what it may meet: two ranks, one, one step, no communication."""

from __future__ import annotations

from pathlib import Path

import kineto
import matplotlib as mpl
import pytest
from matplotlib.axes import Axes

from labkit import trace
from labkit.plots import profile

mpl.use("Agg")


def lonely(folder: Path, steps: int) -> trace.Trace:
    """One rank without communication."""
    events = []
    for step in range(steps):
        events += kineto.marked("step[DECODE bs=1]", 100.0 * step, 80.0, step + 1)
        events.append(kineto.kernel("gemm", 100.0 * step + 10, 60.0))
    return trace.load(kineto.write(folder / "rank0.json", events, **kineto.rank_meta(0, 1)))


CASES = {
    "two ranks": lambda folder: trace.load(kineto.two_ranks(folder)),
    "one of two": lambda folder: trace.load(kineto.two_ranks(folder) / "rank0.pt.trace.json.gz"),
    "one step": lambda folder: trace.load(kineto.two_ranks(folder, steps=1)),
    "alone": lambda folder: lonely(folder, 3),
    "alone, one step": lambda folder: lonely(folder, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_everything_that_the_notebook_shows(tmp_path: Path, case: str) -> None:
    found = CASES[case](tmp_path)
    cases = trace.what_if(found)
    drawn = [
        profile.plot_breakdown(found.parts()),
        profile.plot_timeline(found.timeline()),
        profile.plot_waits(found.waits()),
        profile.plot_what_if(cases),
    ]
    for ax in drawn:
        assert isinstance(ax, Axes)
        assert ax.get_title()
        assert ax.get_xlabel()
        mpl.pyplot.close(ax.figure)
    sentences = [trace.wait_sentence(found), trace.allreduce_sentence(found), trace.conclusion(found, cases)]
    assert all(text and "nan" not in text for text in sentences)
    assert (cases["speedup"] >= 1).all()
    assert (found.counts()["steps"] == len(found.steps()) / len(found.ranks)).all()


def test_every_category_has_a_style() -> None:
    from labkit.trace import names

    assert set(profile.STYLE) == set(names.CATEGORIES)
