"""One set of hidden states, two trainings: the lab's, and one in speculators' own form. Three servers: soak only.

Both heads are served; what the engine accepts of them is what the simulation said, within 0.1 of a token.
"""

from __future__ import annotations

import os

import pandas as pd
import pytest
import torch

from labkit import acceptance, bench, conversations, draft, engine, files, pipeline, train
from labkit.settings import Eagle3Pipeline
from labkit.train import batches, optimizer, order, start

SOAK = os.environ.get("LABKIT_SOAK") == "1"
CHOSEN = Eagle3Pipeline(
    run_id="two-trainings", num_prompts=120, held_out=20, max_tokens=80, epochs=2, draft_vocab_size=2048
)
CLOSE = 0.1
pytestmark = pytest.mark.skipif(not SOAK, reason="three servers and two trainings, ten minutes: make soak")


@pytest.fixture(scope="module")
def made(target, tmp_path_factory):
    """Data set, states and vocabulary by the lab's pipeline, and the head that it trains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_OUTPUTS", str(tmp_path_factory.mktemp("outputs")))
        chosen = conversations.split(pipeline.prompts(CHOSEN, target), CHOSEN.num_prompts, CHOSEN.held_out, 0)
        data = pipeline.answers(CHOSEN, target, chosen)
        pipeline.checked(CHOSEN, target, pipeline.states(CHOSEN, target))
        mapping, _ = pipeline.vocabulary(CHOSEN, data, target)
        head = pipeline.head(CHOSEN, target, mapping)
        yield {"folder": CHOSEN.folder, "vocab": mapping, "head": head, "prompts": data[data.split == "held_out"]}


@pytest.fixture(scope="module")
def peers_head(made, target, tmp_path_factory):
    """As many steps over speculators' data set, collation, alignment, model and loss; and each one's loss."""
    from hs_connectors import FileTransfer
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import ArrowDataset, CollateFn

    folder, layers = made["folder"], pipeline.layers(CHOSEN, target)
    data = train.for_speculators(folder / "data", tmp_path_factory.mktemp("peer") / "data", made["vocab"])
    transfer = FileTransfer(folder / "hidden_states")
    rows = ArrowDataset(
        CHOSEN.max_model_len, data, transfer, on_missing="raise", hidden_states_dtype=torch.float32
    )
    width = target.geometry.hidden_size
    collate = CollateFn(512, width, num_target_layers=3, dtype=torch.float32, preprocess=shift_batch)
    model = start.head(CHOSEN, target, made["vocab"], layers).train()
    adamw, losses = optimizer.adamw(model, CHOSEN.learning_rate), []
    samples = batches.load_samples(folder / "data", folder / "hidden_states", "train")
    plans = [order.plan(samples, CHOSEN.batch_tokens, seed=epoch) for epoch in range(CHOSEN.epochs)]
    groups = [group for groups in plans for group in groups]
    for step, group in enumerate(groups):
        batch = collate([rows[int(one.path.stem.removeprefix("hs_"))] for one in group])
        assert not batch.pop("error_records")
        loss = model(**batch, ttt_steps=CHOSEN.ttt_steps, loss_config=resolve_loss_config("kl_div", "eager"))[1]
        for parameters in adamw.param_groups:
            parameters["lr"] = CHOSEN.learning_rate * optimizer.schedule(step / len(groups))
        adamw.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        losses.append(loss.item())
    head = draft.export(model, data.parent / "head", verifier_name=target.name)
    return {"head": head, "losses": losses}


def simulated(made, head, target) -> float:
    folder = made["folder"]
    samples = train.load_samples(folder / "data", folder / "hidden_states", "held_out")
    return train.simulate(draft.load(head, target), samples, CHOSEN.ttt_steps).mean_length


def served(made, head, target, log_dir) -> float:
    """The engine's own acceptance length on the held-out prompts."""
    asked = made["prompts"][["prompt_id", "category", "messages"]]
    rows = asked.assign(messages=[[dict(turn) for turn in turns] for turns in asked["messages"]])
    options = {"num_speculative_tokens": CHOSEN.ttt_steps, "max_model_len": CHOSEN.max_model_len}
    with engine.serve(target, "eagle3", head=head, log_dir=log_dir, **options) as server:
        before = acceptance.snapshot(server)
        answers = bench.run(server, rows, max_tokens=CHOSEN.max_tokens, repeats=1, warmup=0)
        counted = acceptance.between(before, acceptance.snapshot(server))
    assert answers["error"].isna().all()
    return counted.mean_length


def test_both_trainings_begin_with_the_same_loss(made, peers_head):
    """In bf16 autocast against fp32; to 1e-4 in fp32: tests/unit/test_train_peer.py."""
    own = pd.read_parquet(made["folder"] / "metrics.parquet").loss
    assert len(own) == len(peers_head["losses"])
    assert own[0] == pytest.approx(peers_head["losses"][0], rel=0.02)
    assert own.iloc[-1] < 0.9 * own[0]


@pytest.mark.parametrize("whose", ["lab", "speculators"])
def test_the_engine_accepts_what_the_simulation_said(made, peers_head, target, log_dir, whose):
    head = made["head"] if whose == "lab" else peers_head["head"]
    expected = simulated(made, head, target)
    assert draft.preflight(head, target, vocab=made["vocab"] if whose == "lab" else None) == []
    counted = served(made, head, target, log_dir)
    files.write_json(log_dir / f"{whose}.json", {"simulated": expected, "engine": counted})
    print(whose, "simulated", round(expected, 3), "engine", round(counted, 3))
    assert expected > 1.15, "a head that foresees nothing shows nothing"
    assert counted == pytest.approx(expected, abs=CLOSE)
