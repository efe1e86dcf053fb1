"""Two frames of one name beside each other: medians and spread of each figure by what identifies its rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from labkit import files

# Columns that say what a row is about, the more important first; rows that agree in all of them are repeats.
KEYS = (
    *("variant", "fix", "case", "option", "collective", "mode", "phase", "kind", "model", "weights", "method"),
    *("scope", "prompts_set", "category", "source", "split", "server", "step", "rank", "k", "n", "streams"),
    *("lookup_max", "lookup_min", "budget", "position", "draft_vocab_size", "bytes", "ranks", "layer", "call"),
)
NO_FIGURES = {"started_s", "start_us", "seed", "repeat", "sample", "request", "token", "chunks"}
MOST_GROUPS = 200


@dataclass
class Compared:
    """What became of one result file."""

    name: str
    keys: list[str] = field(default_factory=list)
    rows: tuple[int, int] = (0, 0)
    figures: list[dict[str, object]] = field(default_factory=list)  # those that differ
    same: int = 0  # figures that are equal in both
    only: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))  # groups that one run lacks
    constant: list[tuple[str, str, str]] = field(default_factory=list)  # keys of one value that is another in B
    why_not: str = ""

    @property
    def repeats(self) -> bool:
        """Whether any figure has several rows, and so a spread."""
        return any(line["spread_a"] or line["spread_b"] for line in self.figures)


def compare(name: str, first: Path, second: Path) -> Compared:
    """Result file `name` of both stage folders. Raises files.BrokenFile.

    Figures are numeric columns; each is pooled over the rows of a group: median, quartiles where there are several
    rows, and the ratio of the medians, second over first.
    """
    frames = [files.read_parquet(folder / f"{name}.parquet") for folder in (first, second)]
    found = Compared(name, rows=(len(frames[0]), len(frames[1])))
    keys = [keys_of(frame) for frame in frames]
    if keys[0] != keys[1]:
        found.why_not = f"rows are told apart by {listed(keys[0])} in A, by {listed(keys[1])} in B"
        return found
    single = [key for key in keys[0] if all(len(frame[key].unique()) == 1 for frame in frames)]
    values = [(key, *(str(frame[key].iloc[0]) for frame in frames)) for key in single]
    found.constant = [line for line in values if line[1] != line[2]]
    found.keys = few_enough(frames, [key for key in keys[0] if key not in single])
    labels = [labels_of(frame, found.keys) for frame in frames]
    found.only = (sorted({*labels[0]} - {*labels[1]}), sorted({*labels[1]} - {*labels[0]}))
    pooled = [pool(frame, label, found.keys) for frame, label in zip(frames, labels, strict=True)]
    both = pooled[0].merge(pooled[1], on=["group", "figure"], suffixes=("_a", "_b"), sort=False)
    equal = (both["median_a"] == both["median_b"]) & (both["low_a"] == both["low_b"])
    found.same = int(equal.sum())
    found.figures = [figure(row) for row in both[~equal].to_dict("records")]
    return found


def keys_of(frame: pd.DataFrame) -> list[str]:
    """The key columns of a frame; a number called step is a repeat, and the rank of an option is a figure."""
    found = [name for name in KEYS if name in frame]
    if "step" in found and pd.api.types.is_numeric_dtype(frame["step"]):
        found.remove("step")
    if "option" in found and "rank" in found:
        found.remove("rank")
    return found


def few_enough(frames: list[pd.DataFrame], keys: list[str]) -> list[str]:
    """The keys, without the last ones where they make more groups than anybody reads."""
    while keys and max(len(frame[keys].drop_duplicates()) for frame in frames) > MOST_GROUPS:
        keys = keys[:-1]
    return keys


def labels_of(frame: pd.DataFrame, keys: list[str]) -> list[str]:
    """What each row is about, in words; numbers with their name."""
    words = [
        [f"{key}={value}" if pd.api.types.is_numeric_dtype(frame[key]) else str(value) for value in frame[key]]
        for key in keys
    ]
    return [", ".join(row) for row in zip(*words, strict=True)] if keys else ["all rows"] * len(frame)


def pool(frame: pd.DataFrame, labels: list[str], keys: list[str]) -> pd.DataFrame:
    """group figure median low high count: a row for each figure of each group."""
    numeric = [n for n in frame.select_dtypes("number").columns if n not in keys and n not in NO_FIGURES]
    long = pd.concat(
        [
            pd.DataFrame({"group": labels, "figure": n, "value": frame[n].astype("float64").to_numpy()})
            for n in numeric
        ]
        or [pd.DataFrame({"group": [], "figure": [], "value": []})]
    )
    grouped = long.dropna().groupby(["group", "figure"], sort=False)["value"]
    parts = {"low": grouped.quantile(0.25), "median": grouped.median(), "high": grouped.quantile(0.75)}
    return pd.DataFrame(parts | {"count": grouped.size()}).reset_index()


def figure(row: dict[str, float]) -> dict[str, object]:
    """One line of the page."""
    one, other = row["median_a"], row["median_b"]
    apart = row["low_b"] > row["high_a"] or row["high_b"] < row["low_a"]
    several = min(row["count_a"], row["count_b"]) > 1
    return {
        "group": row["group"],
        "figure": row["figure"],
        "a": one,
        "b": other,
        "spread_a": (row["low_a"], row["high_a"], row["count_a"]) if row["count_a"] > 1 else None,
        "spread_b": (row["low_b"], row["high_b"], row["count_b"]) if row["count_b"] > 1 else None,
        "ratio": other / one if one else None,
        "apart": apart and several,
    }


def listed(names: list[str]) -> str:
    """Names in words."""
    return ", ".join(names) or "nothing"
