"""What each choice of a head is worth: python -m benchmarks.head_ablations RUN --benchmark DIR --out DIR

Heads that differ in one thing, trained on the same conversations of notebook 04 (RUN is its folder) with states
computed on the fly, several processes at a time on one GPU. What is measured is the simulated acceptance length,
on held-out prompts and on the target's answers to the benchmark's (DIR, a data set of `conversations`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit import conversations, draft, extract, files, targets, train, vocab
from labkit.settings import Eagle3Pipeline
from labkit.targets import Target

BASE: dict[str, Any] = {
    "states_from": "on-the-fly",
    "draft_vocab_size": 8192,
    "batch_tokens": 4096,
    "learning_rate": 1e-3,
    "ttt_steps": 3,
    "epochs": 1,
}
FURTHER = {"start": "data/heads/smollm2-eagle3"}  # goes on from the shipped head, all else as the base
CHANGES: dict[str, dict[str, Any]] = {
    "base": {},
    "draft vocabulary 4k": {"draft_vocab_size": 4096},
    "draft vocabulary 16k": {"draft_vocab_size": 16384},
    "draft vocabulary 49k": {"draft_vocab_size": 49152},
    "2 layers": {"draft_layers": 2},
    "1 TTT step": {"ttt_steps": 1},
    "5 TTT steps": {"ttt_steps": 5},
    "lk_hybrid loss": {"loss": "lk_hybrid"},
    "KL and TV loss": {"loss": '{"kl_div": 0.5, "tv": 0.5}'},
    "lm_head trained": {"lm_head": "trained"},
    "learning rate 3e-3": {"learning_rate": 3e-3},
    "learning rate 3e-4": {"learning_rate": 3e-4},
    "1,024 tokens a step": {"batch_tokens": 1024},
    "16,384 tokens a step": {"batch_tokens": 16384},
    "layers 9,19,29": {"aux_layers": "9,19,29"},
    "layers 2,15,29": {"aux_layers": "2,15,29"},
    "random start": {"start": "scratch"},
    "a quarter of the data, four times": {"data": 4, "epochs": 4},
    "a sixteenth of the data, 16 times": {"data": 16, "epochs": 16},
    "off-policy text": {"data": "off-policy"},
    "shipped head": FURTHER,
    "shipped head, lm_head trained": FURTHER | {"lm_head": "trained"},
    "shipped head, lk_hybrid loss": FURTHER | {"loss": "lk_hybrid"},
    "shipped head, KL and TV loss": FURTHER | {"loss": '{"kl_div": 0.5, "tv": 0.5}'},
    "shipped head, learning rate 2e-3": FURTHER | {"learning_rate": 2e-3},
}


def part(dataset: pd.DataFrame, tokens: int) -> pd.DataFrame:
    """Training rows of about so many tokens, and all held-out ones."""
    rows = dataset[dataset.split == "train"]
    return pd.concat([rows[rows.seq_len.cumsum() <= tokens], dataset[dataset.split == "held_out"]])


def off_policy(dataset: pd.DataFrame, target: Target, tokens: int) -> pd.DataFrame:
    """As many tokens of text that the target did not write: it came with language and system."""
    from labkit.pretrain import shipped

    tokenizer, rows, left = target.tokenizer(), [], tokens
    for document in shipped.documents().sample(frac=1.0, random_state=0).itertuples():
        ids = tokenizer(document.text, add_special_tokens=False)["input_ids"][:512]
        if left < 0:
            break
        left -= len(ids)
        mask = [False] * 8 + [True] * (len(ids) - 8)
        if len(ids) > 16:
            rows.append({"split": "train", "input_ids": ids, "loss_mask": mask, "prompt_tokens": 8})
    frame = pd.DataFrame(rows).assign(prompt_id=[f"text-{i}" for i in range(len(rows))])
    held_out = dataset[dataset.split == "held_out"]
    return pd.concat([frame, held_out[[*frame.columns]]], ignore_index=True)


def one(name: str, run: Path, benchmark: Path, out: Path, tokens: int, held_out: int) -> dict[str, Any]:
    """Train one head and look at it."""
    change = dict(CHANGES[name])
    amount = change.pop("data", 1)
    settings = Eagle3Pipeline(**BASE | change)
    target = targets.resolve(settings.target)
    dataset = conversations.load(run / "data")
    counts = vocab.count(*columns(dataset), target.geometry.vocab_size)
    foreign = amount == "off-policy"
    chosen = off_policy(dataset, target, tokens) if foreign else part(dataset, tokens // amount)
    kept = chosen.split == "held_out"
    chosen = pd.concat([chosen[~kept], chosen[kept].head(held_out)], ignore_index=True)
    data, folder = out / "data" / slug(name), out / slug(name)
    files.write_parquet(data / "dataset.parquet", chosen)
    required = vocab.required_ids(target.tokenizer())
    mapping = vocab.build(counts, settings.draft_vocab_size, required)
    head_dir = train.run(
        settings,
        target=target,
        dataset_dir=data,
        hidden_dir=folder / "none",
        vocab=mapping,
        out_dir=folder,
    )
    metrics = files.read_parquet(folder / "metrics.parquet")
    layers = extract.layers_of(settings.aux_layers, target.geometry.num_hidden_layers)
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, source = draft.load(head_dir, target).to(device), train.OnTheFly(target, layers, device)
    found: dict[str, Any] = {"head": name, "train_tokens": int(metrics.tokens.sum())}
    found |= {"seconds": float(metrics.seconds.max()), "megabytes": size(head_dir)}
    for where, folder in {"held_out": data, "benchmark": benchmark}.items():
        samples = train.load_samples(folder, folder, "held_out")
        result = train.simulate(model, samples, 3, batch_tokens=8192, source=source)
        found |= {f"{where}_length": result.mean_length}
        found |= {f"{where}_position_{i + 1}": rate for i, rate in enumerate(result.per_position)}
    return found


def columns(dataset: pd.DataFrame) -> tuple[Any, Any]:
    """Ids and masks of the training rows, which the vocabulary is counted on."""
    rows = dataset[dataset.split == "train"]
    return rows.input_ids, rows.loss_mask


def size(head_dir: Path) -> float:
    """Megabytes of a head's weights."""
    return (head_dir / "model.safetensors").stat().st_size / 1e6


def slug(name: str) -> str:
    """A name for files."""
    return "".join(c if c.isalnum() else "-" for c in name)


def main() -> None:
    """Train all, a few at a time, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--benchmark", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=3_000_000)
    parser.add_argument("--held-out", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--only", nargs="*", default=list(CHANGES))
    parser.add_argument("--one", default="")
    given = parser.parse_args()
    if given.one:
        found = one(given.one, given.run, given.benchmark, given.out, given.tokens, given.held_out)
        files.write_json(given.out / f"{slug(given.one)}.json", found)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    same = [str(given.run), "--benchmark", str(given.benchmark), "--out", str(given.out)]
    same += ["--tokens", str(given.tokens), "--held-out", str(given.held_out)]

    def start(name: str) -> int:
        with (given.out / f"{slug(name)}.log").open("wb") as log:
            words = [sys.executable, "-m", "benchmarks.head_ablations", *same, "--one", name]
            return subprocess.run(words, stdout=log, stderr=log, check=False).returncode

    with ThreadPoolExecutor(given.jobs) as pool:
        codes = list(pool.map(start, given.only))
    paths = [given.out / f"{slug(name)}.json" for name in given.only]
    table = pd.DataFrame([json.loads(path.read_text()) for path in paths if path.exists()])
    files.write_parquet(given.out / "ablations.parquet", table)
    with pd.option_context("display.width", 250, "display.max_columns", 20):
        print(table.replace({np.nan: None}).round(3).to_string(index=False))
    failed = [name for name, code in zip(given.only, codes, strict=True) if code]
    print(f"failed: {failed}" if failed else "none failed")


if __name__ == "__main__":
    main()
