"""Two runs beside each other: what was asked, what it ran on, what came out, and whether the figures compare."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit import settings
from labkit.errors import LabError
from labkit.runs import told
from labkit.runs.archive import opened, records, run_name
from labkit.runs.frames import Compared, compare
from labkit.runs.render import environment, write
from labkit.runs.scrub import Scrubber

NO_WORK = {"run_id", "server", "variant_server"}  # where something ran, not what was done
MOST_FIGURES = 400
Line = tuple[str, Any, Any]  # name, in A, in B


class NothingShared(LabError):
    """Two runs have no notebook in common."""


@dataclass
class Stage:
    """One notebook in both runs."""

    notebook: str
    settings: list[Line]
    conditions: list[Line]
    scalars: list[dict[str, Any]]
    frames: list[Compared] = field(default_factory=list)
    only: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))  # result files of one run alone
    dirty: bool = False

    @property
    def work(self) -> list[str]:
        """Names of the settings that differ and decide what was measured."""
        return [name for name, _, _ in self.settings if name not in NO_WORK]

    @property
    def verdict(self) -> str:
        """Whether the figures of this notebook compare, and what a difference means."""
        unseen = (
            " Files of the lab differed from the commit in at least one run: the code may differ unseen."
            * self.dirty
        )
        elsewhere = [name for name, _, _ in self.settings if name in NO_WORK - {"run_id"}]
        other = [name for name, _, _ in self.conditions] + elsewhere
        if self.work:
            return f"The figures do not compare directly: {', '.join(self.work)} differ.{unseen}"
        if other:
            return (
                f"The same settings; {', '.join(other)} differ: differences are theirs, or chance. How much a run "
                f"varies by itself only a second run under the same conditions says.{unseen}"
            )
        return f"Settings, versions and hardware are the same: differences are how much a run varies.{unseen}"


@dataclass
class Difference:
    """Two runs, notebook by notebook."""

    names: tuple[str, str]
    stages: list[Stage]
    only: tuple[list[str], list[str]]


def diff(first: str | Path, second: str | Path) -> Difference:
    """Compare two runs (ids, folders or zips).

    Raises UnknownRun, BadArchive, BadRecord, files.BrokenFile, and NothingShared where they share no notebook.
    """
    with opened(first) as one, opened(second) as other:
        found = records(one), records(other)
        shared = [notebook for notebook in found[0] if notebook in found[1]]
        if not shared:
            held = " and ".join(", ".join(each) or "none" for each in found)
            raise NothingShared(
                f"{first} and {second} share no notebook: {held}", "give two runs of the same notebook"
            )
        stages = [stage(n, (found[0][n], found[1][n]), (one / n, other / n)) for n in shared]
    only = [n for n in found[0] if n not in found[1]], [n for n in found[1] if n not in found[0]]
    return Difference((run_name(first), run_name(second)), stages, only)


def stage(notebook: str, found: tuple[dict, dict], folders: tuple[Path, Path]) -> Stage:
    """One notebook's settings, conditions, scalars and result files."""
    files = [{path.stem for path in folder.glob("*.parquet")} for folder in folders]
    conditions = told.compared(*found)
    return Stage(
        notebook,
        differing(found[0]["settings"], found[1]["settings"]),
        differing(*conditions),
        [scalar(*line) for line in beside(found[0]["headline"], found[1]["headline"])],
        [compare(name, *folders) for name in sorted(files[0] & files[1])],
        (sorted(files[0] - files[1]), sorted(files[1] - files[0])),
        any(told.part(record["provenance"], "source").get("dirty") for record in found),
    )


def beside(first: dict[str, Any], second: dict[str, Any]) -> list[Line]:
    """Every name of both with its two values."""
    return [(name, first.get(name), second.get(name)) for name in dict.fromkeys([*first, *second])]


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[Line]:
    """Those that are not the same."""
    return [line for line in beside(first, second) if line[1] != line[2]]


def scalar(name: str, one: Any, other: Any) -> dict[str, Any]:
    """A headline figure of both, with difference and ratio where both are finite numbers."""
    numbers = all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in (one, other)
    )
    change = {"difference": other - one, "ratio": other / one if one else None} if numbers else {}
    return {"name": name, "a": one, "b": other, "difference": None, "ratio": None} | change


def shown(value: Any) -> str:
    """A value in few characters: four significant digits, whole numbers whole, a dash for nothing."""
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, float):
        whole = value.is_integer() and abs(value) < 1e15
        return f"{value:,.0f}" if whole or 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def spread(value: tuple[float, float, float] | None) -> str:
    """Quartiles and how many rows they are of."""
    return f"[{shown(value[0])}, {shown(value[1])}], {value[2]:.0f} rows" if value else ""


def page(found: Difference, out: Path | None = None) -> Path:
    """Write the comparison as one self-contained page; returns its path."""
    out = out or settings.outputs() / f"diff-{found.names[0]}-{found.names[1]}.html"
    told_with = {"shown": shown, "spread": spread, "most": MOST_FIGURES}
    template = environment().get_template("diff_page.html.j2")
    write(out, Scrubber().text(template.render(title=" | ".join(found.names), found=found, **told_with)))
    return out


def text(found: Difference) -> str:
    """The short form for a terminal."""
    lines = [f"A: {found.names[0]}   B: {found.names[1]}"]
    lines += [f"only in {run}: {', '.join(names)}" for run, names in zip("AB", found.only, strict=True) if names]
    for each in found.stages:
        lines += ["", each.notebook, f"  {each.verdict}"]
        lines += [f"  {name}: {shown(a)} | {shown(b)}" for name, a, b in each.settings + each.conditions]
        width = max((len(line["name"]) for line in each.scalars), default=0)
        for line in each.scalars:
            ratio = f"  {line['ratio']:.2f}x" if line["ratio"] is not None else ""
            lines.append(f"  {line['name']:<{width}}  {shown(line['a']):>10}  {shown(line['b']):>10}{ratio}")
        apart = sum(bool(line["apart"]) for frame in each.frames for line in frame.figures)
        many = f"  {len(each.frames)} result files in both; {apart} figures with repeats have quartiles apart"
        lines += [many, *(f"  {f.name}: {n} is {a} in A, {b} in B" for f in each.frames for n, a, b in f.constant)]
        lines += [f"  {f.name}: not compared: {f.why_not}" for f in each.frames if f.why_not]
    return "\n".join(lines)
