"""A tiny target, a data set with a pattern to learn, and its states: what the training tests share."""

import dataclasses

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from test_draft import VOCAB, H, tiny_target

from labkit import draft, extract, files, settings, train, vocab

LAYERS = (1, 3, 4)
SETTINGS = settings.Eagle3Pipeline(
    scale="smoke", epochs=3, learning_rate=3e-3, batch_tokens=40, ttt_steps=2, draft_vocab_size=VOCAB // 2, seed=5
)


def changed(**values):
    return dataclasses.replace(SETTINGS, **values)


def masks(length, number):
    """One answer, and in every third conversation a second one, which the last token does not end."""
    mask = [i >= 4 for i in range(length)]
    if number % 3 == 2:
        mask[length // 2 : length // 2 + 2] = [False, False]
        mask[-1] = False
    return mask


def make(folder, conversations=14):
    target = tiny_target(folder / "model")
    weights = load_file(target.path / "model.safetensors")
    table, gain = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
    generator = np.random.default_rng(0)
    rows = []
    for number in range(conversations):
        start = int(generator.integers(1, VOCAB // 2))
        length = int(generator.integers(9, 20))
        ids = [(start + 3 * i) % (VOCAB // 2 - 1) + 1 for i in range(length)]
        rows.append({"prompt_id": f"p{number}", "input_ids": ids, "loss_mask": masks(length, number)})
        split = "held_out" if number >= conversations - 4 else "train"
        rows[-1] |= {"seq_len": length, "split": split, "prompt_tokens": 4}
        torch.manual_seed(number)
        following = torch.tensor([*ids[1:], 1])
        states = torch.stack([table[torch.tensor(ids)] + 0.1 * torch.randn(length, H) for _ in range(3)], dim=1)
        last = (table[following] / gain)[:, None]  # what final norm and lm_head turn into the token
        tensors = {"hidden_states": torch.cat([states, last], dim=1).bfloat16(), "token_ids": torch.tensor(ids)}
        (folder / "hs").mkdir(exist_ok=True)
        save_file(tensors, extract.states_path(folder / "hs", number))
    files.write_parquet(folder / "data" / "dataset.parquet", pd.DataFrame(rows))
    chosen = vocab.build(np.arange(VOCAB)[::-1].copy(), VOCAB // 2)
    return {"target": target, "dataset_dir": folder / "data", "hidden_dir": folder / "hs", "vocab": chosen}


def fresh_head(made, **more):
    """A head for the tiny target that was not trained yet."""
    return draft.build(made["target"], made["vocab"], LAYERS, **more)


def fit(made, out, chosen=SETTINGS, **more):
    return train.run(chosen, **made, out_dir=out, layers=LAYERS, **more)


def samples_of(made, split="train"):
    return train.load_samples(made["dataset_dir"], made["hidden_dir"], split)


def assert_same(whole, cut):
    """Weights and losses of two trainings are equal to the last bit."""
    weights, again = (load_file(folder / "head" / "model.safetensors") for folder in (whole, cut))
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    one, two = (pd.read_parquet(folder / "metrics.parquet").drop(columns="seconds") for folder in (whole, cut))
    pd.testing.assert_frame_equal(one, two, check_exact=True)
