"""Beside speculators itself: its data set, collation, model and losses against the lab's, and its command."""

import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from train_data import LAYERS, SETTINGS, changed, fit, fresh_head, samples_of

from labkit import draft, files, train
from labkit.train import batches, optimizer, order, peer, start
from labkit.train.unroll import Unrolled

STEPS = 3
LOSSES = ["kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid", '{"ce": 0.1, "tv": 0.9}']


@pytest.fixture(scope="module")
def dataset(made, tmp_path_factory):
    """Our data in speculators' form, read by its own data set; states from our files."""
    from hs_connectors import FileTransfer
    from speculators.train.data import ArrowDataset

    folder = train.for_speculators(made["dataset_dir"], tmp_path_factory.mktemp("peer") / "data", made["vocab"])
    transfer = FileTransfer(made["hidden_dir"])
    return ArrowDataset(64, folder, transfer, on_missing="raise", hidden_states_dtype=torch.float32)


def peers_batch(dataset, samples, max_len):
    """A batch as speculators' trainer makes it."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    collate = CollateFn(max_len, 32, num_target_layers=3, dtype=torch.float32, preprocess=shift_batch)
    batch = collate([dataset[int(one.path.stem.removeprefix("hs_"))] for one in samples])
    assert not batch.pop("error_records")
    return batch


def heads(made, **flags):
    torch.manual_seed(3)
    model = fresh_head(made, ttt_steps=STEPS, **flags)
    draft.warm_start(model, made["target"])
    return model


def peers_loss(model, batch, loss="kl_div", decay=1.0, ttt_steps=STEPS):
    from speculators.losses import resolve_loss_config

    how = {"loss_config": resolve_loss_config(loss, "eager"), "ttt_step_loss_decay": decay}
    return model(**batch, ttt_steps=ttt_steps, **how)


def own_loss(model, samples, loss="kl_div", decay=1.0):
    answer = Unrolled(model, loss)(batches.pack(samples, STEPS), STEPS, drafts=True)
    counts = sum(one.trained(STEPS) for one in samples)
    return sum(decay**i * answer["sums"][i] / int(counts[i]) for i in range(STEPS)), answer["drafts"]


@pytest.mark.parametrize("decay", [1.0, 0.8])
@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_equals_speculators_own(made, dataset, loss, decay):
    samples, model = samples_of(made)[:6], heads(made)
    peers = peers_loss(model, peers_batch(dataset, samples, 120), loss, decay)[1]
    own, _ = own_loss(model, samples, loss, decay)
    assert own.item() == pytest.approx(peers.item(), rel=1e-4)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        {"fc_norm": True, "norm_output": False},
    ],
)
def test_gradients_and_drafts_equal_speculators_own(made, dataset, flags, monkeypatch):
    monkeypatch.setattr(batches, "ROW_TOKENS", 30)  # several rows, where the peer has one
    samples, model = samples_of(made)[:6], heads(made, **flags)
    tokens, loss, _ = peers_loss(model, peers_batch(dataset, samples, 120))
    loss.backward()
    peers = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    own, drafts = own_loss(model, samples)
    own.backward()
    assert set(peers) == {name for name, p in model.named_parameters() if p.grad is not None} >= {"fc.weight"}
    for name, p in model.named_parameters():
        if name in peers:
            assert torch.allclose(p.grad, peers[name], rtol=1e-3, atol=1e-4 * float(peers[name].abs().max())), name
    places, offset = batches.pack(samples, STEPS)["places"], 0
    for one, (row, begin) in zip(samples, places, strict=True):
        for step in range(STEPS):
            rows = slice(0, one.tokens - 1 - step)
            ids = tokens[step][0, offset : offset + one.tokens - 1][rows]
            assert torch.equal(ids + model.d2t[ids], drafts[step, row, begin : begin + one.tokens][rows])
        offset += one.tokens - 1


def test_sliding_window_layers_see_as_far_as_speculators_ones(made, dataset):
    samples, model = samples_of(made)[:4], heads(made)
    whole, _ = own_loss(model, samples)
    model.sliding_window, model.sliding_window_indices = 3, [0]
    model.uses_sliding_window_attn, model.uses_full_attn = True, False
    peers = peers_loss(model, peers_batch(dataset, samples, 90))[1]
    own, _ = own_loss(model, samples)
    assert own.item() == pytest.approx(peers.item(), rel=1e-4)
    assert own.item() != pytest.approx(whole.item(), rel=1e-4)


def test_the_first_step_of_a_training_has_the_loss_that_speculators_data_and_model_give(made, dataset, tmp_path):
    """The same hidden states, both pipelines, fp32: within 1e-4."""
    chosen = changed(precision="fp32", epochs=1, ttt_steps=STEPS, batch_tokens=100)
    fit(made, tmp_path, chosen)
    own = pd.read_parquet(tmp_path / "metrics.parquet").loss[0]
    group = order.plan(samples_of(made), 100, seed=SETTINGS.seed)[0]
    assert len(group) > 4
    model = start.head(chosen, made["target"], made["vocab"], LAYERS)
    peers = peers_loss(model, peers_batch(dataset, group, 128))[1]
    assert own == pytest.approx(peers.item(), rel=1e-4)


def resolved(made, tmp_path, chosen=SETTINGS, **more):
    from speculators.train.config import TrainConfig

    places = {name: made[name] for name in ("target", "dataset_dir", "hidden_dir", "vocab")}
    command = train.speculators_command(chosen, **places, out_dir=tmp_path, layers=LAYERS, **more)
    words = shlex.split(command)
    cut = words.index("speculators.train" if words[0] == "torchrun" else "train") + 1
    return TrainConfig.resolve(words[cut:]).flatten(), words


def test_speculators_takes_the_command_and_reads_the_data(made, tmp_path):
    from speculators.train.cli import create_transformer_layer_config
    from speculators.train.dataloader import create_train_val_loaders

    chosen = changed(loss='{"ce": 0.1, "tv": 0.9}', ttt_decay=0.8)
    flags, words = resolved(made, tmp_path, chosen)
    assert words[:2] == ["speculators", "train"]
    expected = {
        "ttt_steps": 2,
        "ttt_step_loss_decay": 0.8,
        "loss_fn": '{"ce": 0.1, "tv": 0.9}',
        "lr": 3e-3,
        "epochs": 3,
        "seed": 5,
        "optimizer": "adamw",
        "scheduler_type": "cosine",
        "scheduler_warmup_ratio": optimizer.WARMUP_SHARE,
        "total_seq_len": 40,
        "target_layer_ids": [1, 3, 4],
        "draft_vocab_size": 32,
        "speculator_type": "eagle3",
        "on_missing": "raise",
        **draft.FLAGS,
    }
    assert {name: flags[name] for name in expected} == expected
    layer = create_transformer_layer_config(
        flags["verifier_name_or_path"],
        flags["num_layers"],
        flags["draft_arch"],
        flags["draft_hidden_act"],
        flags["sliding_window"],
        flags["full_attention_indices"],
    )
    own = fresh_head(made).config.transformer_layer_config
    assert layer.layer_types == ["full_attention"]
    for name in ("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "rope_parameters"):
        assert getattr(layer, name) == getattr(own, name), name
    for name in ("d2t", "t2d"):
        assert np.array_equal(np.load(flags[f"{name}_path"]), getattr(made["vocab"], name).numpy())
    wanted = ["data_path", "total_seq_len", "vllm_endpoint", "on_missing", "verifier_name_or_path"]
    wanted += ["request_timeout", "max_retries", "generation_validation_retries"]
    wanted += ["max_consecutive_generation_failures"]
    from hs_connectors import FileTransfer

    train_loader, val_loader = create_train_val_loaders(
        **{name: flags[name] for name in wanted},
        train_data_ratio=flags["train_data_ratio"],
        hidden_states_dtype=torch.float32,
        transfer=FileTransfer(Path(flags["hidden_states_path"])),
        hidden_size=32,
        num_target_layers=3,
        num_workers=0,
        prefetch_factor=1,
        preprocess=None,
    )
    assert (len(train_loader.dataset), len(val_loader.dataset)) == (10, 4)
    last = val_loader.dataset[3]
    assert last["input_ids"].tolist() == samples_of(made, "held_out")[-1].input_ids.tolist()
    assert last["loss_mask"].tolist() == samples_of(made, "held_out")[-1].loss_mask.tolist()


def test_several_processes_and_a_head_to_start_from_are_in_the_command(made, tmp_path):
    flags, words = resolved(made, tmp_path, changed(start=str(tmp_path / "head")), processes=4)
    assert words[:5] == ["torchrun", "--standalone", "--nproc_per_node=4", "-m", "speculators.train"]
    assert flags["from_pretrained"] == str(tmp_path / "head")


def test_data_whose_splits_are_mixed_is_not_given_to_speculators(made, tmp_path):
    frame = files.read_parquet(made["dataset_dir"] / "dataset.parquet")
    files.write_parquet(tmp_path / "mixed" / "dataset.parquet", frame.iloc[::-1])
    with pytest.raises(train.UnorderedSplits, match="after held-out"):
        peer.for_speculators(tmp_path / "mixed", tmp_path / "out", made["vocab"])
