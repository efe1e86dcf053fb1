"""Training on a tiny target: the walk by hand, simulation against a draft run token by token, exact resumption."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_draft import VOCAB, H, tiny_target

from labkit import draft, extract, files, settings, train, vocab
from labkit.train import batches, checkpoint, loop, simulation

LAYERS = (1, 3, 4)
SETTINGS = settings.Eagle3Pipeline(
    scale="smoke", epochs=3, learning_rate=3e-3, batch_tokens=40, ttt_steps=2, draft_vocab_size=VOCAB // 2, seed=5
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target, a data set with a pattern to learn, its states, and a vocabulary."""
    return make(tmp_path_factory.mktemp("made"))


def make(folder):
    target = tiny_target(folder / "model")
    weights = load_file(target.path / "model.safetensors")
    table, gain = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
    generator = np.random.default_rng(0)
    rows = []
    for number in range(14):
        start = int(generator.integers(1, VOCAB // 2))
        length = int(generator.integers(9, 20))
        ids = [(start + 3 * i) % (VOCAB // 2 - 1) + 1 for i in range(length)]
        rows.append({"input_ids": ids, "loss_mask": [i >= 4 for i in range(length)], "prompt_tokens": 4})
        rows[-1] |= {"seq_len": length, "split": "held_out" if number >= 10 else "train"}
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


def fit(made, out, **more):
    return train.run(SETTINGS, **made, out_dir=out, layers=LAYERS, **more)


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
    """The folder of a training that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    fit(made, folder)
    return folder


@pytest.mark.parametrize(
    ("hits", "first", "accepted"),
    [
        # rows 0..5, one draft token: row 1 hits (on to 3), row 3 misses (on to 4), row 4 hits (end)
        ([[0, 1, 1, 0, 1, 1]], 1, [1, 0, 1]),
        # never: a draft for every token
        ([[0] * 5, [0] * 5], 0, [0, 0, 0, 0]),
        # a hit at depth 1 after a miss at depth 0 does not count
        ([[0, 0, 0, 0], [1, 1, 1, 1]], 0, [0, 0, 0]),
        # all: three tokens a step over rows 0..6
        ([[1] * 7, [1] * 7], 0, [2, 2]),
        # no token left after the answer's first: no draft
        ([[1, 1, 1]], 2, []),
    ],
)
def test_the_walk_by_hand(hits, first, accepted):
    assert train.walk(np.array(hits, dtype=bool), first) == accepted


def test_rows_pair_a_token_with_the_state_before_it_and_the_target_at_it(made):
    sample = train.load_samples(made["dataset_dir"], made["hidden_dir"], "train")[0]
    rows = batches.rows_of(sample)
    states = load_file(sample.path)["hidden_states"]
    assert rows["input_ids"].tolist() == sample.input_ids[1:].tolist()
    assert torch.equal(rows["hidden_states"], states[:-1, :3].flatten(1))
    assert torch.equal(rows["verifier_last_hidden_states"], states[1:, 3])
    assert rows["loss_mask"].tolist() == sample.loss_mask[1:].tolist()
    assert rows["position_ids"].tolist() == list(range(1, len(sample.input_ids)))


def test_a_plan_has_every_conversation_once_within_the_limit(made):
    samples = train.load_samples(made["dataset_dir"], made["hidden_dir"], "train")
    groups = batches.plan(samples, 40, seed=1)
    flat = [str(sample.path) for group in groups for sample in group]
    assert sorted(flat) == sorted(str(sample.path) for sample in samples)
    assert all(sum(s.rows for s in group) <= 40 for group in groups)
    assert flat != [str(s.path) for g in batches.plan(samples, 40, seed=2) for s in g]
    assert all(len(group) == 1 for group in batches.plan(samples, 1, seed=1))


def test_an_empty_split_is_an_error(made):
    with pytest.raises(train.NoTrainingData, match="no other conversation"):
        train.load_samples(made["dataset_dir"], made["hidden_dir"], "other")


@torch.inference_mode()
def drafted_token_by_token(model, sample, row, k):
    """What an engine does: the prefix into the cache, then each drafted token with the draft's own state."""
    from transformers import DynamicCache

    rows = batches.rows_of(sample)
    state = rows["hidden_states"][None, : row + 1].float()
    if model.input_norm is not None:
        state = model.input_norm(state)
    if model.fc_norm is not None:
        state = torch.cat([n(c) for n, c in zip(model.fc_norm, state.chunk(3, -1), strict=True)], -1)
    state, ids = model.fc(state), rows["input_ids"][None, : row + 1]
    cache, position, tokens = DynamicCache(), torch.arange(row + 1)[None], []
    for _ in range(k):
        joined = torch.cat([model.embed_tokens(ids), state], dim=-1)
        length = cache.get_seq_length() + ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None, -ids.shape[1] :]
        out = model.layers[0](
            joined,
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            position_embeddings=model.rotary_emb(joined, position),
        )[:, -1:]
        normed = model.norm(out)
        state = normed if model.config.norm_output else out
        guess = int(model.lm_head(normed).argmax())
        tokens.append(guess + int(model.d2t[guess]))
        ids, position = torch.tensor([[tokens[-1]]]), position[:, -1:] + 1
    return tokens


@pytest.mark.parametrize("flags", [{}, dict.fromkeys(draft.FLAGS, False), {"norm_output": True, "fc_norm": True}])
def test_simulation_equals_a_draft_run_token_by_token(made, flags, tmp_path, monkeypatch):
    """In full precision, since bf16 ties fall differently; a head trained a little, so that some are right."""
    monkeypatch.setattr(draft.head, "FLAGS", draft.FLAGS | flags)
    longer = settings.Eagle3Pipeline(**vars(SETTINGS) | {"epochs": 6})
    head = train.run(longer, **made, out_dir=tmp_path, layers=LAYERS)
    model = draft.load(head, made["target"]).eval()
    samples = train.load_samples(made["dataset_dir"], made["hidden_dir"], "held_out")
    batch = batches.pack(samples)
    with torch.inference_mode():
        hits = simulation.matches_of(model, batch | {"hidden_states": batch["hidden_states"].float()}, samples, 3)
    assert 0.05 < hits.mean() < 0.95
    start = 0
    for sample in samples:
        real = [*sample.input_ids.tolist(), -1, -1, -1, -1]
        for row in range(sample.prompt_tokens - 1, sample.rows - 1):
            drafted = drafted_token_by_token(model, sample, row, 3)
            expected = list(np.cumprod([d == r for d, r in zip(drafted, real[row + 2 :], strict=False)]))
            assert list(np.cumprod(hits[:, start + row])) == expected
        start += sample.rows


def test_it_learns_and_reports(made, whole):
    metrics = pd.read_parquet(whole / "metrics.parquet")
    assert list(metrics.step) == list(range(len(metrics)))
    assert metrics.loss.iloc[-3:].mean() < 0.7 * metrics.loss.iloc[:3].mean()
    by_epoch = metrics.dropna(subset="acceptance_length")
    assert list(by_epoch.epoch) == [0, 1, 2]
    assert by_epoch.acceptance_length.between(1, 1 + SETTINGS.ttt_steps).all()
    assert draft.preflight(whole / "head", made["target"]) == []
    assert not (whole / "checkpoint.safetensors").exists()


def test_a_finished_training_is_not_redone_and_other_settings_are(made, whole, tmp_path, monkeypatch):
    head = shutil.copytree(whole, tmp_path, dirs_exist_ok=True) / "head"
    steps = []
    real = loop.step
    monkeypatch.setattr(loop, "step", lambda *a, **k: (steps.append(1), real(*a, **k))[1])
    assert fit(made, tmp_path) == head
    assert not steps
    train.run(settings.Eagle3Pipeline(**vars(SETTINGS) | {"epochs": 1}), **made, out_dir=tmp_path, layers=LAYERS)
    assert steps


class Stop(Exception):
    """Stands for whatever ends a process."""


def assert_same(whole, cut):
    """Weights and losses of two trainings are equal to the last bit."""
    weights, again = (load_file(folder / "head" / "model.safetensors") for folder in (whole, cut))
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    losses = [list(pd.read_parquet(folder / "metrics.parquet").loss) for folder in (whole, cut)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("after", [1, 4, 7])
def test_an_interrupted_training_ends_with_the_same_weights(made, whole, tmp_path, monkeypatch, after):
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY_S", 0.0)
    seen = []

    def stop(_):
        seen.append(1)
        if len(seen) == after:
            raise Stop

    with pytest.raises(Stop):
        fit(made, tmp_path, watch=stop)
    assert checkpoint.peek(tmp_path / "checkpoint.safetensors")["step"] == after
    fit(made, tmp_path)
    assert_same(whole, tmp_path)


def test_a_checkpoint_that_was_cut_short_or_is_of_other_settings_is_not_used(made, whole, tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(b"cut short")
    fit(made, tmp_path)
    assert_same(whole, tmp_path)
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY_S", 0.0)
    other = settings.Eagle3Pipeline(**vars(SETTINGS) | {"seed": 6})
    with pytest.raises(Stop):
        train.run(other, **made, out_dir=tmp_path, layers=LAYERS, watch=stop_at_once)
    assert checkpoint.peek(path)["step"] == 1
    shutil.rmtree(tmp_path / "head")
    fit(made, tmp_path)
    assert_same(whole, tmp_path)


def stop_at_once(_):
    raise Stop


def test_a_loss_that_is_no_number_stops(made, tmp_path):
    wild = settings.Eagle3Pipeline(**vars(SETTINGS) | {"learning_rate": 1e30})
    with pytest.raises(train.Diverged, match="lower learning_rate"):
        train.run(wild, **made, out_dir=tmp_path, layers=LAYERS)


def test_kill_9_in_the_middle_goes_on_where_it_was(made, whole, tmp_path):
    source = tmp_path / "made"
    code = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        sys.path.insert(0, {str(settings.root() / "tests" / "unit")!r})
        import test_train
        from labkit.train import loop
        loop.CHECKPOINT_EVERY_S = 0.0
        made = test_train.make(Path({str(source)!r}))
        test_train.fit(made, Path({str(tmp_path)!r}), watch=lambda _: time.sleep(1))
        """
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"TORCHDYNAMO_DISABLE": "1"})
    path = tmp_path / "checkpoint.safetensors"
    deadline = time.time() + 120
    while (checkpoint.peek(path) or {}).get("step", 0) < 2 and time.time() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    steps = checkpoint.peek(path)["step"]
    assert steps >= 2
    assert not (tmp_path / "head").exists()
    fit(made | {"dataset_dir": source / "data", "hidden_dir": source / "hs"}, tmp_path)
    assert_same(whole, tmp_path)


def test_the_schedule_warms_up_and_ends_at_zero():
    assert loop.schedule(0.0) < 0.05
    assert loop.schedule(loop.WARMUP_SHARE) == pytest.approx(1.0)
    assert loop.schedule(1.0) == pytest.approx(0.0, abs=1e-9)
    assert loop.schedule((1 + loop.WARMUP_SHARE) / 2) == pytest.approx(0.5)
    values = [loop.schedule(x) for x in np.linspace(loop.WARMUP_SHARE, 1, 50)]
    assert values == sorted(values, reverse=True)
