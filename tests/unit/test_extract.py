"""Extraction against a server in memory, and verification against states whose answer is known."""

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from labkit import conversations, extract, files, targets
from labkit.conversations import asking
from labkit.extract import checks, served

H, N, VOCAB = 16, 6, 16  # as many dimensions as tokens: any next token can be said exactly
IDS = [[1, 2, 3, 4], [5, 6, 7, 8, 9], [3, 1, 4]]
CLIENT = httpx.Client


@pytest.mark.parametrize(
    ("layers", "default"), [(30, (2, 15, 27)), (61, (2, 30, 58)), (32, (2, 16, 29)), (36, (2, 18, 33))]
)
def test_default_layers_are_eagle3s(layers, default):
    # 61: Kimi-K2.5 as served; 32 and 36: published Llama-8B and Qwen3-8B heads
    assert extract.default_layers(layers) == default
    assert extract.layers_of("", layers) == default


@pytest.mark.parametrize("layers", range(3, 40))
def test_default_layers_are_three_that_the_target_has(layers):
    assert len(extract.layers_of("", layers)) == 3


def test_layers_are_read_and_refused():
    assert extract.layers_of("1, 5,9", 30) == (1, 5, 9)
    for bad in ("5,2,9", "2,2,9", "2,9,30", "-1,2,3", "2,x"):
        with pytest.raises(extract.BadLayers):
            extract.layers_of(bad, 30)


def test_disk_need_of_a_published_set():
    # eagle3.md: Kimi-K2.5, 4 layers x 7168 x 2 B = 57,344 B a token; 100k samples of 2k tokens about 11.7 TB
    assert extract.bytes_needed([1], 4, 7168) - 8 == 57_344
    assert extract.bytes_needed([2048] * 100_000, 4, 7168) == pytest.approx(11.7e12, rel=0.01)


@pytest.fixture
def target(tmp_path):
    """A model directory with a config and the two tensors that verification reads."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": H,
        "num_hidden_layers": N,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB,
        "intermediate_size": 16,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    files.write_json(folder / "config.json", config)
    generator = torch.Generator().manual_seed(0)
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB, H, generator=generator),
        "model.norm.weight": torch.rand(H, generator=generator) + 0.5,
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return targets.Target("tiny", folder, "made for a test")


@pytest.fixture
def dataset(tmp_path):
    folder = tmp_path / "data"
    frame = pd.DataFrame({"input_ids": IDS, "seq_len": [len(ids) for ids in IDS], "prompt_tokens": 1})
    files.write_parquet(folder / "dataset.parquet", frame.assign(split="train"))
    return folder


def speaking_states(target, ids):
    """States whose last layer predicts exactly the next token: the pre-norm direction of its embedding row."""
    weights = load_file(target.path / "model.safetensors")
    table, gain = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
    following = torch.tensor([*ids[1:], 0])
    wanted = torch.linalg.pinv(table).T[following]  # logits = table @ wanted: 1 at the token, the rest small
    last = wanted / gain
    noise = torch.randn(len(ids), H, generator=torch.Generator().manual_seed(sum(ids)))
    return torch.stack([noise] * 3 + [last], dim=1)


class FakeServer:
    """A completions endpoint that writes hidden states as vLLM's connector does, lock file included."""

    base_url, model = "http://fake/v1", "m"

    def __init__(self, monkeypatch, target, storage, fail_after=None, spoil=None):
        storage.mkdir(exist_ok=True)
        self.target, self.storage, self.fail_after, self.spoil, self.asked = target, storage, fail_after, spoil, []
        monkeypatch.setattr(asking.time, "sleep", lambda _: None)
        monkeypatch.setattr(served.httpx, "Client", lambda **_: CLIENT(transport=httpx.MockTransport(self.reply)))

    def check(self):
        """An attached server that the lab cannot look into."""

    def reply(self, request):
        body = json.loads(request.content)
        ids = body["prompt"]
        if self.fail_after is not None and len(self.asked) >= self.fail_after:
            raise httpx.ConnectError("gone")
        self.asked.append(ids)
        path = self.storage / f"cmpl-{body['request_id']}-0.safetensors"
        tensors = {"hidden_states": speaking_states(self.target, ids), "token_ids": torch.tensor(ids)}
        if self.spoil:
            tensors = self.spoil(tensors)
        Path(f"{path}.lock").touch()
        save_file(tensors, path)
        return httpx.Response(200, json={"kv_transfer_params": {"hidden_states_path": str(path)}})


def run(dataset, server, out, target, **more):
    return extract.run(dataset, server, out, target=target, layers="1,2,3", concurrency=1, **more)


def test_every_row_gets_its_file_and_nothing_is_left_behind(tmp_path, monkeypatch, target, dataset):
    storage = tmp_path / "storage"
    out = run(dataset, FakeServer(monkeypatch, target, storage), tmp_path / "hs", target)
    for row, ids in enumerate(IDS):
        tensors = load_file(extract.states_path(out, row))
        assert tensors["token_ids"].tolist() == ids
        assert tensors["hidden_states"].shape == (len(ids), 4, H)
    assert list(storage.iterdir()) == []
    assert extract.verify(out).empty


def test_finished_files_are_kept_and_broken_ones_made_anew(tmp_path, monkeypatch, target, dataset):
    out = tmp_path / "hs"
    with pytest.raises(conversations.ServerLost, match="after 1 of 3"):
        run(dataset, FakeServer(monkeypatch, target, tmp_path / "s", fail_after=1), out, target)
    server = FakeServer(monkeypatch, target, tmp_path / "s")
    run(dataset, server, out, target)
    assert server.asked == IDS[1:]
    cut = extract.states_path(out, 2)
    cut.write_bytes(cut.read_bytes()[:-10])
    assert list(extract.verify(out)["check"]) == ["readable"]
    server = FakeServer(monkeypatch, target, tmp_path / "s")
    run(dataset, server, out, target)
    assert server.asked == [IDS[2]]


def test_a_complete_set_starts_no_server_but_other_layers_do(tmp_path, monkeypatch, target, dataset):
    started = []

    @contextmanager
    def start():
        started.append(1)
        yield FakeServer(monkeypatch, target, tmp_path / "s")

    run(dataset, start, tmp_path / "hs", target)
    run(dataset, start, tmp_path / "hs", target)
    assert len(started) == 1
    extract.run(dataset, start, tmp_path / "hs", target=target, layers="1,2,4", concurrency=1)
    assert len(started) == 2


def spoil_at(value):
    def spoil(tensors):
        tensors["hidden_states"][1, 2] = value
        return tensors

    return spoil


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_at(0.0), "non_zero: 1 states"),
        (spoil_at(float("nan")), "finite: 1 states"),
        (spoil_at(float("inf")), "finite: 1 states"),
        (lambda t: t | {"hidden_states": t["hidden_states"][:-1].clone()}, "length"),  # prefix caching
        (lambda t: t | {"hidden_states": t["hidden_states"][:, :-1].clone()}, "layers"),  # a layer short
        (lambda t: t | {"token_ids": t["token_ids"] + 1}, "token_ids"),
        (lambda t: {"token_ids": t["token_ids"]}, "tensors"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_as_it_comes(tmp_path, monkeypatch, target, dataset, spoil, said):
    server = FakeServer(monkeypatch, target, tmp_path / "s", spoil=spoil)
    with pytest.raises(extract.BrokenStates, match=said):
        run(dataset, server, tmp_path / "hs", target)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_verify_names_a_wrong_last_layer(tmp_path, monkeypatch, target, dataset, layer):
    def swap(tensors):
        states_ = tensors["hidden_states"]
        states_[:, 3] = torch.roll(states_[:, layer], 1, 0)
        return tensors

    out = run(dataset, FakeServer(monkeypatch, target, tmp_path / "s", spoil=swap), tmp_path / "hs", target)
    problems = extract.verify(out)
    assert set(problems["check"]) == {"agreement"}
    assert problems.attrs["agreement"] < 0.5
    assert "none of the usual mistakes fits" in problems.remedy.iloc[0]


def test_near_ties_of_a_short_answer_are_no_problem_and_many_misses_are():
    some = {row: np.ones(40, dtype=bool) for row in range(5)}
    short, bad = np.ones(8, dtype=bool), np.ones(40, dtype=bool)
    short[:2] = False  # 75%, two misses
    bad[:12] = False  # 70%
    assert checks.too_low(some | {7: short}, 0.9) == {}
    assert list(checks.too_low(some | {7: short, 8: bad}, 0.9)) == [8]
    assert list(checks.too_low({7: short, 8: bad}, 0.9)) == [7, 8]


def test_verify_applies_the_final_norm(tmp_path, monkeypatch, target, dataset):
    out = run(dataset, FakeServer(monkeypatch, target, tmp_path / "s"), tmp_path / "hs", target)
    weights = load_file(target.path / "model.safetensors")
    weights["model.norm.weight"] = -weights["model.norm.weight"]
    save_file(weights, target.path / "model.safetensors", metadata={"format": "pt"})
    assert set(extract.verify(out)["check"]) == {"agreement"}


def test_a_server_without_states_is_told_apart(tmp_path, monkeypatch, target, dataset):
    server = FakeServer(monkeypatch, target, tmp_path / "s")
    server.reply = lambda request: httpx.Response(200, json={"choices": [{}]})
    monkeypatch.setattr(served.httpx, "Client", lambda **_: CLIENT(transport=httpx.MockTransport(server.reply)))
    with pytest.raises(extract.NoStates, match="no hidden_states_path"):
        run(dataset, server, tmp_path / "hs", target)


@pytest.mark.parametrize(
    ("entries", "refused"),
    [
        ([{"id": "m", "max_model_len": 4}], [2]),
        ([{"id": "m", "max_model_len": 3}], [1, 2]),
        ([{"id": "m", "max_model_len": 5}], []),
        ([{"id": "other", "max_model_len": 1}], []),
        ([{"id": "m"}], []),
        ([{"id": "m", "max_model_len": None}], []),
        (None, []),
    ],
)
def test_rows_beyond_the_server_s_context_are_refused_before_the_first(
    tmp_path, monkeypatch, target, entries, refused
):
    """Rows of 2, 3 and 4 tokens; one more is asked for."""
    dataset = tmp_path / "lengths"
    rows = [{"input_ids": [1] * n, "loss_mask": [True] * n, "split": "train"} for n in (2, 3, 4)]
    files.write_parquet(dataset / "dataset.parquet", pd.DataFrame(rows))
    server = FakeServer(monkeypatch, target, tmp_path / "s")
    states = server.reply

    def reply(request):
        return (
            httpx.Response(200, json={"data": entries})
            if request.url.path.endswith("/models")
            else states(request)
        )

    monkeypatch.setattr(served.httpx, "Client", lambda **_: CLIENT(transport=httpx.MockTransport(reply)))
    if not refused:
        run(dataset, server, tmp_path / "hs", target)
        assert len(server.asked) == 3
        return
    with pytest.raises(extract.NoStates, match=f"{len(refused)} of 3 rows, row {refused[0]}") as error:
        run(dataset, server, tmp_path / "hs", target)
    assert "max_model_len=5" in error.value.remedy
    assert server.asked == []


def test_a_full_disk_is_refused_before_the_server_starts(tmp_path, monkeypatch, target, dataset):
    usage = SimpleNamespace(total=1, used=1, free=1000)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(files.DiskFull):
        run(dataset, lambda: pytest.fail("started a server"), tmp_path / "hs", target)
