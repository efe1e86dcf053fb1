"""States computed while training equal those that Transformers gives one conversation at a time."""

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from test_draft import CONFIG, VOCAB
from train_data import changed

from labkit import extract, files, targets, train, vocab
from labkit.train import batches, onthefly

LAYERS = (0, 2, 4)


@pytest.fixture(scope="module")
def whole_target(tmp_path_factory):
    """A whole tiny Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("target") / "model"
    torch.manual_seed(0)
    values = {name: value for name, value in CONFIG.items() if name != "architectures"}
    model = LlamaForCausalLM(LlamaConfig(**values)).float()
    model.save_pretrained(folder)
    return targets.Target("whole", folder, "made for a test"), model.eval()


@pytest.fixture(scope="module")
def made(whole_target, tmp_path_factory):
    """Conversations and, from Transformers' own output_hidden_states, their states."""
    target, model = whole_target
    folder = tmp_path_factory.mktemp("made")
    (folder / "hs").mkdir()
    before_norm = []
    model.model.layers[-1].register_forward_hook(lambda _m, _a, out: before_norm.append(out))
    rows = []
    for number in range(8):
        ids = torch.randint(1, VOCAB, (1, 8 + 3 * number), generator=torch.Generator().manual_seed(number))
        with torch.no_grad():
            found = model(ids, output_hidden_states=True).hidden_states  # embeddings, then each layer's output
        assert torch.allclose(model.model.norm(before_norm[-1]), found[-1])
        states = torch.stack([*(found[layer][0] for layer in LAYERS), before_norm[-1][0]], dim=1)
        save_file({"hidden_states": states, "token_ids": ids[0]}, extract.states_path(folder / "hs", number))
        mask = [i >= 4 for i in range(ids.shape[1])]
        rows.append({"input_ids": ids[0].tolist(), "loss_mask": mask, "prompt_tokens": 4, "seq_len": ids.shape[1]})
        rows[-1]["split"] = "held_out" if number > 5 else "train"
    files.write_parquet(folder / "data" / "dataset.parquet", pd.DataFrame(rows))
    chosen = vocab.build(torch.arange(VOCAB).numpy(), VOCAB // 2)
    return {"target": target, "dataset_dir": folder / "data", "hidden_dir": folder / "hs", "vocab": chosen}


def test_states_of_packed_conversations_equal_each_ones_own(made, monkeypatch):
    monkeypatch.setattr(batches, "ROW_TOKENS", 40)
    samples = train.load_samples(made["dataset_dir"], made["hidden_dir"], "train")
    source = onthefly.OnTheFly(made["target"], LAYERS, torch.device("cpu"), torch.float32)
    batch = batches.pack(samples, 2)
    assert batch["token_ids"].shape[0] > 1
    fly = source(batch)
    inside = batch["document_ids"] >= 0
    assert fly.shape == batch["states"].shape
    assert torch.allclose(fly[inside], batch["states"][inside], atol=1e-4)


def test_a_training_without_files_has_the_losses_of_one_with_them(made, tmp_path):
    losses = []
    for states in ("files", "on-the-fly"):
        out = tmp_path / states
        train.run(changed(states_from=states, epochs=2), **made, out_dir=out, layers=LAYERS)
        losses.append(pd.read_parquet(out / "metrics.parquet").loss)
    assert losses[1].to_numpy() == pytest.approx(losses[0].to_numpy(), rel=0.03)  # bf16 states there


def test_a_target_that_transformers_cannot_load_is_refused(made, tmp_path):
    folder = tmp_path / "model"
    files.write_json(folder / "config.json", CONFIG | {"model_type": "unheard-of"})
    broken = targets.Target("broken", folder, "test")
    object.__setattr__(broken, "geometry", made["target"].geometry)
    with pytest.raises(train.NoTransformersTarget, match="broken"):
        onthefly.OnTheFly(broken, LAYERS, torch.device("cpu"))
