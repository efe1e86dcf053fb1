"""What notebook 05 asks of a head: on which prompts, against which prediction, and go or no-go."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from labkit import acceptance, agreement, bench, conversations, draft, engine, files, targets, train
from labkit.acceptance import Acceptance
from labkit.settings import Evaluation, NgramBaseline

HELD_OUT = "held-out"


@dataclass(frozen=True)
class Pipeline:
    """The folder of notebook 04 in the same run, where the held-out conversations are; it may be missing."""

    folder: Path

    @property
    def there(self) -> bool:
        """Whether notebook 04 left a data set."""
        return (self.folder / "data" / "dataset.parquet").exists()

    def held_out(self, count: int) -> pd.DataFrame:
        """Prompts that training never saw, of the training kind: prompt_id, category, messages; may be empty."""
        if not self.there:
            return pd.DataFrame(columns=["prompt_id", "category", "messages"])
        rows = conversations.load(self.folder / "data")
        chosen = rows[rows.split == "held_out"].head(count)
        messages = [[dict(message) for message in messages] for messages in chosen.messages]
        return pd.DataFrame(
            {"prompt_id": chosen.prompt_id, "category": HELD_OUT, "messages": messages}
        ).reset_index(drop=True)

    def simulated(self, head: Path, target: targets.Target, settings: Evaluation) -> Acceptance | None:
        """Acceptance on the same held-out prompts and as many tokens, from the extracted states alone.

        None where notebook 04 left no states, or extracted other layers than the head reads.
        """
        states = self.folder / "hidden_states"
        record = states / "extraction.json"
        layers = files.read_json(head / "config.json").get("eagle_aux_hidden_state_layer_ids")
        if not self.there or not record.exists() or files.read_json(record)["layers"][:-1] != layers:
            return None
        samples = train.load_samples(self.folder / "data", states, "held_out")[: settings.held_out]
        short = [sample.cut(sample.prompt_tokens + settings.max_tokens) for sample in samples]
        return train.simulate(draft.load(head, target), short, settings.num_speculative_tokens)


def require_fit(head: Path, target: targets.Target) -> pd.DataFrame:
    """The head's pre-flight as a frame of one line; raises BadHead with all problems when it would not serve."""
    problems = draft.preflight(head, target)
    fatal = [problem for problem in problems if problem.fatal]
    if fatal:
        raise draft.BadHead(f"{head} does not fit {target.name}: {'; '.join(fatal)}", "export the head anew")
    config = files.read_json(head / "config.json")
    names = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_output")
    return pd.DataFrame(
        [{"head": head.name, "problems": len(problems)} | {name: str(config.get(name)) for name in names}]
    )


def acceptances(rows: pd.DataFrame) -> dict[str, Acceptance]:
    """The engine's acceptance pooled over the benchmark prompts, and over the held-out ones where there are."""
    held = rows["category"] == HELD_OUT
    parts = {"engine, benchmark prompts": rows[~held], "engine, held-out prompts": rows[held]}
    return {name: acceptance.from_rows(part) for name, part in parts.items() if part["drafts"].notna().any()}


def by_category(rows: pd.DataFrame) -> pd.DataFrame:
    """Acceptance length (bonus included) and counts of each category of benchmark rows."""
    known = rows[rows["drafts"].notna()]
    found = {category: acceptance.from_rows(group) for category, group in known.groupby("category", sort=False)}
    return acceptance.table(found).rename(columns={"source": "category"})


def speedups(rows: pd.DataFrame, variants: Sequence[str], seed: int) -> pd.DataFrame:
    """bench.speedup of each variant over the baseline, on benchmark and held-out prompts apart."""
    held = rows["category"] == HELD_OUT
    parts = {"benchmark": rows[~held], HELD_OUT: rows[held]}
    found = []
    for variant in variants:
        for name, part in parts.items():
            if (part["variant"] == variant).any() and (part["variant"] == "baseline").any():
                table = bench.speedup(part, "baseline", variant, seed=seed)
                found.append(table.assign(variant=variant, prompts_set=name))
    columns = ["variant", "prompts_set", "prompts", "speedup", "speedup_low", "speedup_high", "total_ratio"]
    return pd.concat(found)[[*columns, "length_drift", "same_output"]] if found else pd.DataFrame(columns=columns)


def judged(baseline: pd.DataFrame, variant: pd.DataFrame, plain: engine.OnDemand) -> pd.DataFrame:
    """agreement.compare and judge over both variants' rows; an empty frame where the variant was not measured."""
    columns = {"prompt_id": "string", "category": "string", "identical": "bool", "position": "Int64"}
    none = pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in columns.items()})
    none = none.assign(gap_nats=pd.Series(dtype="Float64"), near_tie=pd.Series(dtype="boolean"))
    if variant.empty:
        return none
    rows = pd.concat([baseline, variant], ignore_index=True)
    try:
        compared = agreement.compare(rows, "baseline", variant["variant"].iloc[0])
    except agreement.NoTokenIds:  # other servers than vLLM: the speedup stands, the words cannot be compared
        return none
    return agreement.judge(compared, plain)


def ngram_rows(settings: Evaluation, prompts: pd.DataFrame, also: Sequence[Path]) -> pd.DataFrame:
    """Rows of the n-gram variant with notebook 02's lookup settings: its own rows where they fit, else measured.

    With an attached baseline nothing is started here: the frame is empty unless notebook 02's rows fit.
    """
    names = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
    earlier = [files.read_json(path / "run.json")["settings"] for path in also if (path / "run.json").exists()]
    source = earlier[0] if earlier else vars(NgramBaseline())
    chosen = dataclasses.replace(settings, variant_server="")  # that one serves the head
    return bench.measure_variant(chosen, "ngram", prompts, also=also, **{name: source[name] for name in names})


def verdict(table: pd.DataFrame, prompts_set: str = "benchmark", variant: str = "eagle3") -> str:
    """go when the whole interval of the speedup lies above 1, no-go when it lies below, else unclear.

    Without a measured interval: not measured.
    """
    chosen = table[(table["variant"] == variant) & (table["prompts_set"] == prompts_set)]
    if chosen.empty or chosen[["speedup_low", "speedup_high"]].isna().any(axis=None):
        return "not measured"
    line = chosen.iloc[0]
    if line["speedup_low"] > 1:
        return "go"
    return "no-go" if line["speedup_high"] < 1 else "unclear"


def conclusion(
    settings: Evaluation, table: pd.DataFrame, accepted: dict[str, Acceptance], simulated: Acceptance | None
) -> str:
    """The answer in words, from the run's own figures, with its limits."""
    said = [f"**{verdict(table)}** on the benchmark's prompts, **{verdict(table, HELD_OUT)}** on held-out ones."]
    for line in table[table["variant"] == "eagle3"].to_dict("records"):
        interval = f"[{line['speedup_low']:.2f}, {line['speedup_high']:.2f}]"
        said.append(f"{line['prompts_set'].capitalize()} prompts: speedup {line['speedup']:.2f}× {interval}.")
    said += [f"Acceptance length, {name}: {found.mean_length:.2f}." for name, found in accepted.items()]
    if simulated is not None:
        said.append(f"Simulated on the held-out prompts: {simulated.mean_length:.2f}.")
    if not accepted:
        said.append("No server with the head was measured, so there is no go or no-go: give `variant_server`.")
    limits = (
        f"Limits: {settings.concurrency} request(s) in flight, greedy, k={settings.num_speculative_tokens}, "
        f"{settings.max_tokens} tokens a request, servers measured one after the other on this machine."
    )
    more = "More data and epochs raise the acceptance length: notebook 04 at a larger scale."
    return "\n\n".join([" ".join(said), limits, more])


def headline(
    table: pd.DataFrame, accepted: dict[str, Acceptance], simulated: Acceptance | None, same: float
) -> dict[str, Any]:
    """The scalars of run.json: speedups with intervals, acceptance lengths, identical outputs, verdict."""
    values: dict[str, Any] = {"verdict": verdict(table), "verdict_held_out": verdict(table, HELD_OUT)}
    for name, end in (("benchmark", ""), (HELD_OUT, "_held_out")):
        for line in table[table["prompts_set"] == name].to_dict("records"):
            for bound in ("", "_low", "_high"):
                values[f"{line['variant']}_speedup{end}{bound}"] = line[f"speedup{bound}"]
    lengths = {
        "eagle3_acceptance_length": accepted.get("engine, benchmark prompts"),
        "eagle3_acceptance_length_held_out": accepted.get("engine, held-out prompts"),
        "eagle3_acceptance_length_simulated": simulated,
    }
    values |= {name: found.mean_length for name, found in lengths.items() if found is not None}
    return values | {"identical_outputs": same}
