"""The forms that states are stored in: to the bit where they promise it, and readable by speculators."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_target
import torch
from hs_connectors.transfer import FileTransfer, FP8Transfer
from safetensors.torch import load_file, save_file
from tiny_target import AUX, LAYERS, WIDTH

from labkit import extract, files, train
from labkit.extract import forms, record


def tensors(dtype=torch.bfloat16, tokens=37, width=64):
    generator = torch.Generator().manual_seed(0)
    states = (
        torch.randn(tokens, 4, width, generator=generator) * torch.tensor([0.1, 1.0, 30.0, 300.0])[None, :, None]
    )
    return {"hidden_states": states.to(dtype), "token_ids": torch.arange(tokens)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", ["bf16", "zstd"])
def test_lossless_forms_keep_every_bit(tmp_path, form, dtype):
    wanted = tensors(dtype)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 6e-8, -1e-40, 65000.0])
    wanted["hidden_states"][0, 0, :8] = odd.to(dtype)
    extract.save_states(tmp_path / "a.safetensors", wanted, form)
    found = extract.load_states(tmp_path / "a.safetensors")
    width = {2: torch.int16, 4: torch.int32}[wanted["hidden_states"].element_size()]
    assert found["hidden_states"].dtype == dtype
    assert torch.equal(found["hidden_states"].view(width), wanted["hidden_states"].view(width))
    assert torch.equal(found["token_ids"], wanted["token_ids"])
    assert forms.form_and_shape(tmp_path / "a.safetensors") == (form, [37, 4, 64], list(range(37)))


def test_every_bit_pattern_of_bf16_survives(tmp_path):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    wanted = {"hidden_states": every.reshape(256, 4, 64), "token_ids": torch.arange(256)}
    extract.save_states(tmp_path / "a.safetensors", wanted, "zstd")
    found = extract.load_states(tmp_path / "a.safetensors")["hidden_states"]
    assert torch.equal(found.view(torch.int16), wanted["hidden_states"].view(torch.int16))


def test_planes_put_the_exponent_into_the_top_byte():
    """1.5 is 0 01111111 1000000: exponent 127, mantissa 64; its negative differs in the low plane alone."""
    low, high = forms.to_planes(torch.tensor([1.5, -1.5], dtype=torch.bfloat16))
    assert high.tolist() == [127, 127]
    assert low.tolist() == [128, 129]


def test_what_cannot_be_packed_is_kept_as_it_is(tmp_path):
    noise = torch.randint(-(2**15), 2**15, (40, 4, 64), generator=torch.Generator().manual_seed(0))
    wanted = {"hidden_states": noise.to(torch.int16).view(torch.bfloat16), "token_ids": torch.arange(40)}
    for form in ("bf16", "zstd"):
        extract.save_states(tmp_path / f"{form}.safetensors", wanted, form)
    sizes = [(tmp_path / f"{form}.safetensors").stat().st_size for form in ("bf16", "zstd")]
    assert sizes[1] < sizes[0] + 300


def test_fp8_is_within_half_a_step_of_each_number(tmp_path):
    """e4m3 has 3 bits of mantissa: at most 1/16 off, and bfloat16 rounds once more."""
    wanted = tensors()
    wanted["hidden_states"][5, 1, 7] = 3000.0  # a massive activation must not cost the others
    extract.save_states(tmp_path / "a.safetensors", wanted, "fp8")
    found = extract.load_states(tmp_path / "a.safetensors")
    assert found["hidden_states"].dtype == torch.bfloat16
    exact, got = wanted["hidden_states"].double(), found["hidden_states"].double()
    largest = exact.abs().amax(-1, keepdim=True)
    normal = exact.abs() > largest / 448 * 2**-6  # below, e4m3 has only its subnormal steps
    off = (got - exact).abs()
    assert (off[normal] <= exact.abs()[normal] * (2**-4 + 2**-7)).all()
    assert (off <= largest / 448 * 2**-9)[~normal].all()
    assert forms.form_and_shape(tmp_path / "a.safetensors")[0] == "fp8"


def test_a_zero_state_stays_zero_and_is_seen():
    wanted = tensors()
    wanted["hidden_states"][3, 2] = 0
    assert (forms.to_fp8(wanted)["hidden_states"][3, 2].float() == 0).all()


@pytest.mark.parametrize(("form", "reader"), [("bf16", FileTransfer), ("fp8", FP8Transfer)])
def test_speculators_own_transfer_reads_the_files(tmp_path, form, reader):
    wanted = tensors()
    extract.save_states(tmp_path / "hs_7.safetensors", wanted, form)
    theirs = reader(tmp_path).get_cached(7)
    ours = extract.load_states(tmp_path / "hs_7.safetensors")
    assert torch.equal(theirs["token_ids"], wanted["token_ids"])
    assert theirs["hidden_states"].shape == wanted["hidden_states"].shape
    # speculators rounds its scale to bfloat16, too
    assert torch.allclose(theirs["hidden_states"].float(), ours["hidden_states"].float(), rtol=2**-7)


def test_speculators_trainer_never_takes_packed_states_for_plain_ones(tmp_path):
    extract.save_states(tmp_path / "hs_0.safetensors", tensors(), "zstd")
    assert "hidden_states" not in FileTransfer(tmp_path).get_cached(0)


@pytest.mark.parametrize("form", extract.FORMS)
def test_sizes_are_as_estimated(tmp_path, form):
    wanted = tensors(tokens=400, width=256)
    extract.save_states(tmp_path / "a.safetensors", wanted, form)
    size = (tmp_path / "a.safetensors").stat().st_size
    assert size == pytest.approx(record.bytes_needed([400], 4, 256, form=form), rel=0.05)


@pytest.mark.parametrize("content", [b"", b"no safetensors", None])
def test_a_broken_file_says_so(tmp_path, content):
    path = tmp_path / "hs_0.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(files.BrokenFile, match="hs_0"):
        extract.load_states(path)
    save_file({"other": torch.zeros(1)}, path)
    with pytest.raises(files.BrokenFile, match="KeyError"):
        extract.load_states(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    target = tiny_target.build(folder / "model")
    rows = tiny_target.answers(target, folder / "data")
    for form in extract.FORMS:
        options = {"target": target, "layers": AUX, "backend": "transformers", "form": form}
        extract.run(folder / "data", None, folder / form, **options)
    return folder, rows


def test_speculators_data_set_reads_the_plain_folder(made, tmp_path):
    """Its own class for training data, from token ids, masks and our folder."""
    from datasets import Dataset
    from speculators.train.data import ArrowDataset

    folder, rows = made
    columns = ["input_ids", "loss_mask", "seq_len"]
    table = Dataset.from_dict({name: list(rows[name]) for name in columns}).with_format("torch")
    table.save_to_disk(tmp_path / "arrow")
    theirs = ArrowDataset(
        max_len=64,
        datapath=tmp_path / "arrow",
        transfer=FileTransfer(folder / "bf16"),
        on_missing="raise",
        hidden_states_dtype=torch.float32,
    )
    assert len(theirs) == len(rows)
    for row in range(len(rows)):
        item = theirs[row]
        states = load_file(folder / "bf16" / f"hs_{row}.safetensors")["hidden_states"]
        assert item["input_ids"].tolist() == rows.input_ids[row]
        assert torch.equal(item["hidden_states"], states[:, :3].flatten(1))
        assert torch.equal(item["verifier_last_hidden_states"], states[:, 3])
        assert item["hidden_states"].shape == (len(rows.input_ids[row]), 3 * WIDTH)


@pytest.mark.parametrize("form", ["zstd", "fp8"])
def test_training_reads_every_form(made, form):
    """The batches of a compressed folder are the plain folder's: to the bit, or to FP8's step."""
    folder, _ = made
    plain, other = (train.load_samples(folder / "data", folder / name, "train") for name in ("bf16", form))
    for exact, sample in zip(plain, other, strict=True):
        wanted = extract.load_states(exact.path)["hidden_states"]
        found = extract.load_states(sample.path)["hidden_states"]
        assert (
            torch.equal(found, wanted)
            if form == "zstd"
            else torch.allclose(found.float(), wanted, rtol=0.1, atol=0.05)
        )


def test_another_form_is_made_anew_and_the_same_one_kept(made):
    folder, rows = made
    data = folder / "fp8"
    wanted = files.read_json(data / "extraction.json")
    assert all(record.finished(data, row, ids, wanted, "fp8") for row, ids in enumerate(rows.input_ids))
    assert not any(record.finished(data, row, ids, wanted, "bf16") for row, ids in enumerate(rows.input_ids))
    assert wanted["layers"] == [*AUX, LAYERS]


@pytest.mark.parametrize("form", extract.FORMS)
def test_every_form_passes_verification(made, form):
    found = extract.verify(made[0] / form, compare=True)
    assert found.empty, found.to_dict("records")
    assert found.attrs["agreement"] >= (0.95 if form == "fp8" else 1.0)


def test_an_unknown_form_is_refused(made, tmp_path):
    with pytest.raises(extract.UnknownForm, match="int4"):
        extract.run(made[0] / "data", None, tmp_path, target=None, form="int4")
    assert np.isclose(forms.SIZE["fp8"], 0.5)
