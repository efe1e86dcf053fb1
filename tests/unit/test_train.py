"""Training on a tiny target: alignment and walks by hand, simulation against a draft run by tokens, refusals."""

import json
import os
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from train_data import SETTINGS, assert_same, changed, fit, fresh_head, samples_of

from labkit import draft, files, settings, train, vocab
from labkit.train import batches, loop, metrics, optimizer, order, simulation, start
from labkit.train.batches import Sample
from labkit.train.unroll import BAD_LOSS, BAD_STATES, GOOD, Unrolled


@pytest.fixture(scope="module")
def trained(made, whole):
    return draft.load(whole / "head", made["target"]).eval()


def sample(mask, ids=None, path="hs_0.safetensors"):
    mask = np.array(mask, dtype=bool)
    return Sample(path, np.arange(len(mask)) if ids is None else np.array(ids), mask, int(mask.argmax()))


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


def test_each_answer_of_a_conversation_is_walked_by_itself():
    """Tokens 10..19; answers are tokens 2..5 and 8..9; row t drafts for tokens t + 2 and t + 3."""
    talk = sample([0, 0, 1, 1, 1, 1, 0, 0, 1, 1], range(10, 20))
    assert talk.spans == [(2, 6), (8, 10)]
    drafts = np.full((2, 9), -5)
    drafts[:, 1] = [13, 14]  # from token 12 on: both right, the bonus is 15, the answer's last: no more drafts
    drafts[:, 7] = [19, 20]  # from token 18: right; then the conversation ends
    assert simulation.steps(talk, drafts) == [2, 1]
    drafts[:, 1] = [
        13,
        -5,
    ]  # one right; the bonus is 14; row 3 (token 14) drafts 15, and what lies past the answer
    drafts[:, 3] = [15, 16]
    assert simulation.steps(talk, drafts) == [1, 1, 1]


def test_a_batch_pairs_each_token_with_the_state_before_it_and_the_target_at_it(made):
    """speculators' own alignment, conversation by conversation; the mask is shifted with the tokens."""
    from speculators.models.eagle3.data import shift_batch

    samples = samples_of(made)[:5]
    batch = batches.pack(samples, 2)
    slots = {name: batch[name].flatten(0, 1) for name in ("token_ids", "position_ids", "states", "document_ids")}
    found = 0
    for number, one in enumerate(samples):
        states = load_file(one.path)["hidden_states"]
        peer = shift_batch(
            {
                "input_ids": torch.from_numpy(one.input_ids).long(),
                "hidden_states": states[:, :-1].flatten(1),
                "verifier_last_hidden_states": states[:, -1],
                "loss_mask": torch.from_numpy(one.loss_mask),
                "lengths": torch.tensor([one.tokens]),
                "position_ids": torch.arange(one.tokens),
            }
        )
        own = batch["trained"][slots["document_ids"][batch["trained"]] == number]
        rows = torch.nonzero(peer["loss_mask"]).flatten()
        assert len(own) == len(rows) > 0
        assert torch.equal(slots["token_ids"][own + 1], peer["input_ids"][rows])
        assert torch.equal(slots["position_ids"][own] + 1, peer["position_ids"][rows])
        assert torch.equal(slots["states"][own, :-1].flatten(1), peer["hidden_states"][rows])
        assert torch.equal(slots["states"][own + 1, -1], peer["verifier_last_hidden_states"][rows])
        found += len(own)
    assert found == len(batch["trained"])


def test_the_first_token_of_an_answer_is_where_supervision_begins():
    """The engine's first draft starts from the answer's first token, with the state before it."""
    talk = sample([0, 0, 0, 1, 1, 1, 0, 1, 1])
    assert talk.trained_rows.tolist() == [2, 3, 4, 6, 7]
    first_rows = [first - 1 for first, _end in talk.spans]
    assert first_rows == [2, 6]
    assert set(first_rows) <= set(talk.trained_rows.tolist())
    assert talk.trained(4).tolist() == [
        5,
        5,
        5,
        4,
    ]  # at step 3, row 2's target would be foreseen from before row 0
    assert sample([1, 1, 1]).spans == [(1, 3)]


def test_a_plan_has_every_conversation_once_within_the_limit(made):
    samples = samples_of(made)
    groups = order.plan(samples, 40, seed=1)
    flat = [str(one.path) for group in groups for one in group]
    assert sorted(flat) == sorted(str(one.path) for one in samples)
    assert all(sum(s.tokens for s in group) <= 40 for group in groups)
    assert flat != [str(s.path) for g in order.plan(samples, 40, seed=2) for s in g]
    assert all(len(group) == 1 for group in order.plan(samples, 1, seed=1))


@pytest.mark.parametrize("parts", [1, 2, 3, 20])
def test_shares_are_a_partition_of_about_equal_size(parts):
    group = [sample([1] * length, path=str(length)) for length in (5, 30, 7, 12, 9, 30, 4)]
    taken = order.shares(group, parts)
    assert len(taken) == parts
    assert sorted(id(one) for part in taken for one in part) == sorted(map(id, group))
    sizes = [sum(one.tokens for one in part) for part in taken]
    assert max(sizes) - min(sizes) <= max(one.tokens for one in group)


def test_rows_hold_each_document_once_and_are_no_longer_than_need_be(monkeypatch):
    monkeypatch.setattr(batches, "ROW_TOKENS", 16)
    samples = [sample([0] + [1] * (length - 1)) for length in (9, 5, 7, 12, 3)]
    batch = batches.pack(samples, 3, None)
    documents = batch["document_ids"]
    assert documents.shape == (3, 16)  # 12 + 3, 9 + 7, 5: first fit, longest first
    for number, (one, (row, first)) in enumerate(zip(samples, batch["places"], strict=True)):
        assert documents[row, first : first + one.tokens].tolist() == [number] * one.tokens
        assert (documents == number).sum() == one.tokens
    assert batch["trained"].tolist() == sorted(batch["trained"].tolist(), key=batch["trained"].tolist().index)
    assert "states" not in batch


def test_data_that_cannot_train_a_head_is_refused_with_the_likely_cause(made, tmp_path):
    with pytest.raises(train.NoTrainingData, match="no other conversation"):
        samples_of(made, "other")
    frame = files.read_parquet(made["dataset_dir"] / "dataset.parquet")
    empty = frame.assign(loss_mask=[[False] * len(ids) for ids in frame.input_ids])
    files.write_parquet(tmp_path / "empty" / "dataset.parquet", empty)
    with pytest.raises(train.NoTrainingData, match=r"loss mask of all 10 train .* empty") as caught:
        train.load_samples(tmp_path / "empty", made["hidden_dir"], "train")
    assert "max_model_len" in caught.value.remedy
    assert "chat template" in caught.value.remedy
    files.write_parquet(tmp_path / "leak" / "dataset.parquet", frame.assign(prompt_id="same"))
    with pytest.raises(train.LeakedSplit, match="such as same"):
        train.load_samples(tmp_path / "leak", made["hidden_dir"], "train")


@torch.inference_mode()
def drafted_token_by_token(model, one, row, k):
    """What an engine does: the prefix into the cache, then each drafted token with the draft's own state."""
    from transformers import DynamicCache

    state = load_file(one.path)["hidden_states"][None, : row + 1, :-1].flatten(2).float()
    if model.input_norm is not None:
        state = model.input_norm(state)
    if model.fc_norm is not None:
        state = torch.cat([n(c) for n, c in zip(model.fc_norm, state.chunk(3, -1), strict=True)], -1)
    state, ids = model.fc(state), torch.from_numpy(one.input_ids[1 : row + 2]).long()[None]
    cache, position, tokens = DynamicCache(), torch.arange(1, row + 2)[None], []
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
    model = draft.load(fit(made, tmp_path, changed(epochs=6)), made["target"]).eval()
    accepted, drafts = [], 0
    for one in samples_of(made, "held_out"):
        for first, end in one.spans:
            place = first
            while place < end - 1:  # the engine's own walk: it drafts from the token at `place`
                drafted = drafted_token_by_token(model, one, place - 1, 3)
                real = [*one.input_ids[place + 1 : end].tolist(), -1, -1, -1]
                hits = [d == r for d, r in zip(drafted, real, strict=False)]
                accepted.append(int(np.cumprod(hits).sum()))
                drafts += 1
                place += accepted[-1] + 1
    assert 0 < sum(accepted) < 3 * drafts
    monkeypatch.setattr(torch, "autocast", lambda *_a, **_k: torch.no_grad())
    found = train.simulate(model, samples_of(made, "held_out"), 3, batch_tokens=40)
    assert found.drafts == drafts
    assert list(found.accepted_at) == [sum(a > i for a in accepted) for i in range(3)]


def test_a_token_outside_the_draft_vocabulary_is_a_miss():
    talk = sample([0, 0, 1, 1, 1], [1, 2, 60, 61, 62])
    assert simulation.steps(talk, np.array([[0, 29, 30, 31], [0, 30, 31, 0]])) == [
        0,
        0,
    ]  # draft ids, not target ids


def test_it_learns_and_reports(made, whole):
    rows = pd.read_parquet(whole / "metrics.parquet")
    assert list(rows.step) == list(range(len(rows)))
    assert rows.loss.iloc[-3:].mean() < 0.7 * rows.loss.iloc[:3].mean()
    by_epoch = rows.dropna(subset="acceptance_length")
    assert list(by_epoch.epoch) == [0, 1, 2]
    assert by_epoch.acceptance_length.between(1, 1 + SETTINGS.ttt_steps).all()
    assert by_epoch.validation_loss.is_monotonic_decreasing
    assert rows[rows.epoch == 1].trained_tokens.sum() == sum(len(s.trained_rows) for s in samples_of(made))
    assert draft.preflight(whole / "head", made["target"]) == []
    assert not list(whole.glob("*checkpoint*"))
    record = files.read_json(whole / "head" / "training.json")
    assert record["optimizer"]["weight_decay"] == 0.01
    assert record["skipped"] == {}


def test_a_finished_training_is_not_redone_and_other_settings_are(made, whole, tmp_path, monkeypatch):
    head = shutil.copytree(whole, tmp_path, dirs_exist_ok=True) / "head"
    steps = []
    real = loop.Loop.step
    monkeypatch.setattr(loop.Loop, "step", lambda *a, **k: (steps.append(1), real(*a, **k))[1])
    assert fit(made, tmp_path) == head
    assert not steps
    fit(made, tmp_path, changed(epochs=1))
    assert steps


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: os.truncate(path, 5000)])
def test_a_head_without_whole_weights_is_trained_again(made, whole, tmp_path, damage):
    head = shutil.copytree(whole, tmp_path, dirs_exist_ok=True) / "head"
    damage(head / "model.safetensors")
    fit(made, tmp_path)
    assert (head / "model.safetensors").read_bytes() == (whole / "head" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: os.truncate(path, 100)])
def test_lost_metrics_are_an_error_that_names_the_price(whole, tmp_path, damage):
    """A head that took days is not trained again for a figure."""
    path = shutil.copy(whole / "metrics.parquet", tmp_path / "metrics.parquet")
    assert len(train.read_metrics(path))
    damage(path)
    with pytest.raises(train.MetricsLost, match=r"metrics\.parquet") as lost:
        train.read_metrics(path)
    assert str(tmp_path / "head") in lost.value.remedy


def evaluate(model, samples, k=2):
    with torch.no_grad():
        return Unrolled(model)(batches.pack(samples, k), k)


def test_how_conversations_are_packed_changes_no_loss(made, trained, monkeypatch):
    samples = samples_of(made)
    together = evaluate(trained, samples)["sums"]
    monkeypatch.setattr(batches, "ROW_TOKENS", 30)
    assert torch.allclose(evaluate(trained, samples)["sums"], together, rtol=1e-5)
    alone = sum(evaluate(trained, [one])["sums"] for one in samples)
    assert torch.allclose(alone, together, rtol=1e-5)


def test_held_out_loss_is_a_mean_over_trained_tokens(made, trained):
    samples = samples_of(made, "held_out")
    packed = [(group, batches.pack(group, 2)) for group in order.plan(samples, 30, seed=None)]
    found = simulation.evaluate(Unrolled(trained), packed, 2, torch.device("cpu"), ttt_decay=0.5)
    sums = sum(evaluate(trained, [one])["sums"] for one in samples).tolist()
    counts = [sum(int(one.loss_mask[1 + step :].sum()) for one in samples) for step in range(2)]
    assert found.loss == pytest.approx(sums[0] / counts[0] + 0.5 * sums[1] / counts[1], rel=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_not_finite_leave_out_their_conversation_and_no_other(made, trained, value):
    samples = samples_of(made)[:4]
    batch = batches.pack(samples, 2)
    row, first = batch["places"][2]
    batch["states"][row, first + 3, 1, 5] = value
    answer = Unrolled(trained)(batch, 2)
    assert answer["documents"].tolist() == [GOOD, GOOD, BAD_STATES, GOOD]
    rest = evaluate(trained, [samples[0], samples[1], samples[3]])
    assert torch.allclose(answer["sums"], rest["sums"], rtol=1e-5)
    answer["sums"].sum().backward()
    grads = [p.grad for p in trained.parameters() if p.grad is not None]
    assert grads
    assert all(torch.isfinite(grad).all() for grad in grads)


def poisoned(made, folder, broken):
    """A copy of the data in which some files of states hold a NaN."""
    copy = shutil.copytree(made["hidden_dir"], folder / "hs")
    for number in broken:
        tensors = load_file(copy / f"hs_{number}.safetensors")
        tensors["hidden_states"][2, 0, 0] = float("nan")
        save_file(tensors, copy / f"hs_{number}.safetensors")
    return made | {"hidden_dir": copy}


def test_a_bad_conversation_is_counted_and_named_and_many_end_the_training(made, tmp_path):
    head = fit(poisoned(made, tmp_path / "one", [3]), tmp_path / "out", changed(epochs=2))
    assert json.loads((head / "training.json").read_text())["skipped"] == {"hs_3.safetensors": 2}
    assert pd.read_parquet(tmp_path / "out" / "metrics.parquet").loss.notna().all()
    with pytest.raises(train.BadSamples, match=r"conversations have states that are not finite.*hs_"):
        fit(poisoned(made, tmp_path / "many", range(8)), tmp_path / "bad")


def test_a_loss_that_is_no_number_stops(made, tmp_path):
    with pytest.raises(train.Diverged, match="lower learning_rate"):
        fit(made, tmp_path, changed(learning_rate=1e30))


def test_a_single_broken_gradient_changes_nothing_but_is_seen(made, trained):
    """A weight that is infinite makes the loss so; the document is marked, the gradient dropped."""
    model = fresh_head(made)
    with torch.no_grad():
        model.fc.weight[0, 0] = float("inf")
    unrolled = Unrolled(model)
    answer = unrolled(batches.pack(samples_of(made)[:3], 2), 2)
    assert answer["documents"].tolist() == [BAD_LOSS] * 3
    answer["sums"].sum().backward()
    torch.nn.utils.clip_grad_norm_(unrolled.parameters(), 1.0)
    optimizer.drop_broken(unrolled)
    assert all((p.grad == 0).all() for p in unrolled.parameters() if p.grad is not None)


def test_a_file_of_states_that_is_cut_short_is_named(made, tmp_path):
    copy = shutil.copytree(made["hidden_dir"], tmp_path / "hs")
    path = copy / "hs_1.safetensors"
    tensors = load_file(path)
    save_file({name: tensor[:-1].clone() for name, tensor in tensors.items()}, path)
    with pytest.raises(files.BrokenFile, match=r"hs_1.*states for"):
        fit(made | {"hidden_dir": copy}, tmp_path / "out")


def test_an_unknown_loss_is_refused_with_the_names_there_are(made, tmp_path):
    with pytest.raises(train.BadLoss, match="lk_hybrid"):
        fit(made, tmp_path, changed(loss="huber"))


def test_parts_of_a_step_weigh_by_their_tokens(made, tmp_path):
    """Three parts, one after the other, are the same step: loss and weights within rounding."""
    one = fit(made, tmp_path / "one", changed(precision="fp32"))
    three = fit(made, tmp_path / "three", changed(precision="fp32", accumulate=3))
    losses = [pd.read_parquet(head.parent / "metrics.parquet").loss for head in (one, three)]
    assert np.allclose(*losses, rtol=1e-4)
    weights = [draft.load(head, made["target"]).fc.weight for head in (one, three)]
    assert torch.allclose(*weights, atol=2e-3)


def test_ahead_hands_on_items_and_errors_in_order_and_ends_when_told():
    assert list(order.Ahead(range(20))) == list(range(20))

    def failing():
        yield 1
        raise ZeroDivisionError("in the thread")

    made = order.Ahead(failing())
    assert next(made) == 1
    with pytest.raises(ZeroDivisionError, match="in the thread"):
        next(made)
    endless = order.Ahead(iter(int, 1))
    next(endless)
    endless.close()
    assert not endless.thread.is_alive()


class Writer:
    """Stands for TensorBoard's."""

    def __init__(self):
        self.seen = []

    def add_scalar(self, name, value, step):
        self.seen.append((name, step, value))

    def flush(self):
        pass


def test_events_are_written_where_tensorboard_is_and_its_lack_is_said(tmp_path, monkeypatch):
    writer = Writer()
    monkeypatch.setattr(metrics, "tensorboard", lambda _folder: writer)
    kept = metrics.opened(tmp_path / "metrics.parquet", [], events=True)
    row = {"step": 7, "acceptance_length": float("nan"), "seconds": 1.0, "learning_rate": 0.5}
    kept.add(row, loss=torch.tensor(2.0))
    kept.flush()
    kept.evaluated(acceptance_length=1.5)
    assert ("train/loss", 7, 2.0) in writer.seen
    assert ("train/acceptance_length", 7, 1.5) in writer.seen
    assert not [1 for name, _step, value in writer.seen if np.isnan(value)]
    monkeypatch.setattr(metrics, "tensorboard", lambda _folder: None)
    with pytest.warns(UserWarning, match="tensorboard is not installed"):
        metrics.opened(tmp_path / "metrics.parquet", [], events=True)


def test_the_schedule_warms_up_and_ends_at_zero():
    assert optimizer.schedule(0.0) < 0.05
    assert optimizer.schedule(optimizer.WARMUP_SHARE) == pytest.approx(1.0)
    assert optimizer.schedule(1.0) == pytest.approx(0.0, abs=1e-9)
    assert optimizer.schedule((1 + optimizer.WARMUP_SHARE) / 2) == pytest.approx(0.5)
    values = [optimizer.schedule(x) for x in np.linspace(optimizer.WARMUP_SHARE, 1, 50)]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(("name", "value"), [("precision", "fp8"), ("states_from", "cloud"), ("accumulate", 0)])
def test_settings_that_training_does_not_know_are_refused_early(name, value):
    with pytest.raises(settings.BadParameter, match=name):
        changed(**{name: value})


def first_loss(folder):
    return pd.read_parquet(folder / "metrics.parquet").loss[0]


def test_training_on_from_a_head_begins_where_it_ended(made, whole, trained, tmp_path):
    chosen = changed(start=str(whole / "head"), precision="fp32", epochs=1)
    head = fit(made, tmp_path / "on", chosen)
    group = order.plan(samples_of(made), SETTINGS.batch_tokens, seed=SETTINGS.seed)[0]
    counts = sum(one.trained(2) for one in group)
    expected = float((evaluate(trained, group)["sums"] / torch.tensor(counts)).sum())
    assert first_loss(tmp_path / "on") == pytest.approx(expected, rel=1e-4)
    assert files.read_json(head / "training.json")["start"] == files.digest_file(whole / "head/model.safetensors")


def test_from_scratch_is_the_seeds_own_head_and_warm_is_not(made):
    fresh = fresh_head(made, seed=SETTINGS.seed)
    begun = [
        start.head(changed(start=how), made["target"], made["vocab"], (1, 3, 4)) for how in ("scratch", "warm")
    ]
    assert torch.equal(begun[0].fc.weight, fresh.fc.weight)
    assert not torch.equal(begun[1].fc.weight, fresh.fc.weight)


def test_a_head_over_other_layers_or_nowhere_is_no_start(made, whole, tmp_path):
    with pytest.raises(train.BadStart, match="reads layers"):
        train.run(changed(start=str(whole / "head")), **made, out_dir=tmp_path, layers=(0, 2, 4))
    with pytest.raises(train.BadStart, match="nor a head directory"):
        fit(made, tmp_path, changed(start="warmer"))


def test_a_head_goes_on_with_another_vocabulary_where_its_lm_head_is_the_targets(made, whole, tmp_path):
    other = vocab.build(np.arange(64), 24, [0])
    head = fit(made | {"vocab": other}, tmp_path, changed(start=str(whole / "head"), epochs=1, learning_rate=1e-7))
    before, after = (load_file(folder / "model.safetensors") for folder in (whole / "head", head))
    assert torch.equal(after["d2t"], other.d2t)
    assert torch.allclose(before["fc.weight"].float(), after["fc.weight"].float(), atol=1e-2)
    own = shutil.copytree(whole / "head", tmp_path / "own")
    save_file(before | {"lm_head.weight": before["lm_head.weight"] + 1}, own / "model.safetensors")
    with pytest.raises(train.BadStart, match="its own lm_head"):
        fit(made | {"vocab": other}, tmp_path / "no", changed(start=str(own)))


def test_twice_the_same_training_is_the_same_to_the_bit(made, whole, tmp_path):
    fit(made, tmp_path)
    assert_same(whole, tmp_path)
