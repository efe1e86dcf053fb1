"""Checks on extracted states; predicting the real next token from them catches a wrong layer or norm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from labkit import conversations, files, settings, targets
from labkit.extract import diagnosis, forms, heads, record, reference
from labkit.extract.layers import BadLayers
from labkit.extract.states import REMEDY, problems
from labkit.progress import progress

COLUMNS = ["row", "check", "value", "limit", "remedy"]
GREEDY_AGREEMENT, SAMPLED_AGREEMENT = 0.95, 0.3  # another layer's states agree in a few per cent
REFERENCE_ROWS, REFERENCE_TOKENS = 2, 256
ALIEN = 0.5  # relative distance to the nearest layer of the reference: these are no states of this model


def verify(
    out_dir: Path,
    *,
    dataset_dir: Path | None = None,
    target_path: Path | None = None,
    min_agreement: float | None = None,
    sample: int = 32,
    layers: Sequence[int] | None = None,
    shard: str = "",
    split: str = "",
    compare: bool | None = None,
) -> pd.DataFrame:
    """The problems of an extraction, a row each (columns row check value limit remedy); empty when all is well.

    Every file is read: length, layers, width, dtype, token ids, finite, non-zero. For `sample` files spread over
    the set, final norm and lm_head are applied to the last state on answer positions; for greedy answers its top
    token is the real next token in nearly all of them, and where it is not, the known mistakes are tried and the
    one that fits is named. `min_agreement` is the smallest share accepted: by default 0.95, and 0.3 for answers
    that were sampled. `layers`: the ids that there should be, the layer count as the last; `shard` and
    `split`: the rows. `compare` runs a few rows through Transformers and tells for each place whose layer's states
    it holds; None: where the target fits in memory. attrs: `agreement`, the share over all positions; `compared`,
    "" or why no comparison was made.
    """
    wanted = files.read_json(out_dir / record.RECORD)
    dataset = conversations.load(dataset_dir or out_dir / wanted["dataset"])
    path = target_path or settings.place(wanted["target"])
    if layers is not None and list(layers) != wanted["layers"]:
        raise BadLayers(f"{out_dir} holds layers {wanted['layers']}, not {list(layers)}", "extract these layers")
    mine = record.rows_of(dataset, shard, split)
    found = file_problems(out_dir, dataset, mine, wanted)
    broken = {row[0] for row in found}
    sound = [row for row in mine if row not in broken]
    chosen = sorted({sound[int(i)] for i in np.linspace(0, len(sound) - 1, min(sample, len(sound)))})
    rows = {row: read_row(out_dir, dataset, row) for row in chosen}
    limit = limit_of(dataset) if min_agreement is None else min_agreement
    agreed, share = agreement_problems(rows, path, wanted, limit)
    compared, why = comparison(rows, path, wanted, compare) if rows else ([], "no file is sound")
    frame = pd.DataFrame([*found, *agreed, *compared], columns=COLUMNS)
    frame.attrs |= {"agreement": share, "compared": why}
    return frame


def limit_of(dataset: pd.DataFrame) -> float:
    """The agreement to expect of a data set's answers."""
    sampled = "temperature" in dataset and not (dataset.temperature == 0).all()
    others = "origin" in dataset and not (dataset.origin == "target").all()  # said by somebody else
    return SAMPLED_AGREEMENT if sampled or others else GREEDY_AGREEMENT


def read_row(out_dir: Path, dataset: pd.DataFrame, row: int) -> diagnosis.Row:
    """One conversation with its states; without a loss mask, what follows the prompt is the target's."""
    ids = torch.tensor(np.array(dataset.input_ids.iloc[row]), dtype=torch.long)
    states = forms.load_states(record.states_path(out_dir, row))[forms.STATES]
    if "loss_mask" in dataset:
        return diagnosis.Row(states, ids, torch.tensor(np.array(dataset.loss_mask.iloc[row], dtype=bool)))
    return diagnosis.Row(states, ids, torch.arange(len(ids)) >= int(dataset.prompt_tokens.iloc[row]))


def file_problems(
    out_dir: Path, dataset: pd.DataFrame, mine: Sequence[int], wanted: dict[str, Any]
) -> list[list[Any]]:
    """What is wrong with each file by itself, and files whose type is another than most have."""
    rows: list[list[Any]] = []
    types: dict[int, str] = {}
    for row in progress(mine, "checking states"):
        try:
            tensors = forms.load_states(record.states_path(out_dir, row))
        except files.BrokenFile as error:
            rows.append([row, "readable", error.what, "", error.remedy])
            continue
        found = problems(tensors, dataset.input_ids.iloc[row], wanted)
        types[row] = str(tensors[forms.STATES].dtype).removeprefix("torch.")
        rows += [[row, name, value, "", REMEDY[name]] for name, value in found.items()]
    most = Counter(types.values()).most_common(1)
    rows += [
        [row, "dtype", kind, most[0][0], REMEDY["dtype"]] for row, kind in types.items() if kind != most[0][0]
    ]
    return rows


def agreement_problems(
    rows: dict[int, diagnosis.Row], path: Path, wanted: dict[str, Any], limit: float
) -> tuple[list[list[Any]], float]:
    """The rows whose last states do not give the next token, with the likely cause; and the share over all."""
    if not rows:
        return [], float("nan")
    head = heads.final_head(path)
    hits = {row: one.agreement(head).numpy() for row, one in rows.items()}
    share = float(np.concatenate(list(hits.values())).mean())
    already = [row for row, one in rows.items() if diagnosis.normed(head, one.states[:, -1])]
    if already:
        value = f"{hits[already[0]].mean():.3f}"
        text = f"{diagnosis.NORMED.name}: {diagnosis.NORMED.remedy}"
        return [[row, "final_norm", value, f"{limit}", text] for row in already], share
    low = too_low(hits, limit)
    why = diagnosis.cause([rows[row] for row in low], head, path, wanted["layers"], limit) if low else ""
    return [[row, "agreement", f"{found.mean():.3f}", f"{limit}", why] for row, found in low.items()], share


def too_low(hits: dict[int, np.ndarray], limit: float) -> dict[int, np.ndarray]:
    """The files that agree too little; two near-ties more than the limit allows say nothing of a short answer."""
    low = {row: found for row, found in hits.items() if len(found) and found.mean() < limit}
    if low and np.concatenate(list(hits.values())).mean() < limit:
        return low
    return {row: found for row, found in low.items() if found.sum() < limit * len(found) - 2}


def comparison(
    rows: dict[int, diagnosis.Row], path: Path, wanted: dict[str, Any], compare: bool | None
) -> tuple[list[list[Any]], str]:
    """Places that hold another layer's states than asked for, by Transformers' own; or why that was not looked at.

    The only check that sees a layer off by one among those that the head reads (vllm#43671).
    """
    if compare is False:
        return [], "not asked for"
    if compare is None and not reference.fits(path):
        return [], "the target is too large to be run here beside the check"
    try:
        model = reference.Reference(targets.Target(path.name, path, "recorded by the extraction"))
    except reference.NoReference as error:
        if compare:
            raise
        return [], error.what
    every = list(range(wanted["layers"][-1] + 1))
    found = []
    for row in sorted(rows, key=lambda row: len(rows[row].ids))[:REFERENCE_ROWS]:
        ids = rows[row].ids[:REFERENCE_TOKENS]
        theirs = model.states([ids.numpy()], every)[0]
        for place, layer in enumerate(wanted["layers"]):
            apart = diagnosis.by_layer(rows[row].states[: len(ids), place], theirs)
            found += place_problems(row, place, layer, apart)
    return found, ""


def place_problems(row: int, place: int, layer: int, apart: np.ndarray) -> list[list[Any]]:
    """What is wrong with one place, from its distance to each layer's states."""
    nearest = int(apart.argmin())
    if apart[nearest] > ALIEN:
        value = f"no layer's states: the nearest is {nearest}, {apart[nearest]:.2f} away"
        return [
            [row, f"place {place}", value, f"layer {layer}", "the states are another model's or other tokens'"]
        ]
    if nearest == layer:
        return []
    off = nearest - layer
    kind = "off by one layer" if abs(off) == 1 else f"{abs(off)} layers {'late' if off > 0 else 'early'}"
    remedy = (
        f"{kind}: vLLM's id k is the residual entering layer k, so an id after a layer counts one more; start the "
        "server with the ids of this run"
    )
    return [[row, f"place {place}", f"layer {nearest}'s states", f"layer {layer}", remedy]]
