"""Each way in which states go wrong, built, and what verification says of it."""

from __future__ import annotations

import itertools
import json
import shutil

import pandas as pd
import pytest
import tiny_target
import torch
from safetensors.torch import load_file, save_file
from tiny_target import AUX, LAYERS, WIDTH

from labkit import extract, files
from labkit.extract import checks

IDS = [*AUX, LAYERS]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A target, its greedy answers, and their states as they should be."""
    folder = tmp_path_factory.mktemp("sound")
    target = tiny_target.build(folder / "model")
    rows = tiny_target.answers(target, folder / "data")
    options = {"target": target, "layers": AUX, "backend": "transformers"}
    extract.run(folder / "data", None, folder / "states", **options)
    return folder, target, rows


@pytest.fixture
def faulty(sound, tmp_path):
    """A copy to spoil: the folder of model, data and states."""
    shutil.copytree(sound[0], tmp_path / "copy")
    folder = tmp_path / "copy"
    record = files.read_json(folder / "states" / "extraction.json")
    files.write_json(folder / "states" / "extraction.json", record | {"target": str(folder / "model")})
    return folder


def spoil(folder, change, rows=None) -> None:
    """Rewrite each file's tensors by `change(tensors, row)`."""
    for path in sorted((folder / "states").glob("hs_*.safetensors")):
        row = int(path.stem.removeprefix("hs_"))
        if rows is None or row in rows:
            tensors = {name: tensor.contiguous() for name, tensor in change(load_file(path), row).items()}
            save_file(tensors, path)


def states_of(change):
    """A change of the states alone."""
    return lambda tensors, _row: tensors | {"hidden_states": change(tensors["hidden_states"])}


def test_the_answers_do_not_repeat_a_token(sound):
    """Else states that are shifted would agree as well."""
    for ids in sound[2].input_ids:
        answer = ids[-tiny_target.ANSWER :]
        assert sum(a == b for a, b in itertools.pairwise(answer)) < 4


def test_sound_states_have_no_problem(sound):
    problems = extract.verify(sound[0] / "states", layers=IDS, compare=True)
    assert problems.empty
    assert problems.attrs == {"agreement": 1.0, "compared": ""}


def layer_before(folder, target, place, off):
    """The states of the layer `off` from the right one in a place."""
    reference = extract.Reference(target)

    def change(tensors, _row):
        ids = tensors["token_ids"].numpy()
        tensors["hidden_states"][:, place] = reference.states([ids], [IDS[place] + off])[0][:, 0]
        return tensors

    spoil(folder, change)


@pytest.mark.parametrize(("place", "off"), [(0, 1), (1, -1), (2, 1), (3, -1), (3, -2)])
def test_a_layer_off_by_one_is_named_in_every_place(faulty, sound, place, off):
    layer_before(faulty, sound[1], place, off)
    problems = extract.verify(faulty / "states", compare=True)
    named = problems[problems.check == f"place {place}"]
    assert len(named) == 2  # each row that was compared
    assert set(named.value) == {f"layer {IDS[place] + off}'s states"}
    assert named.remedy.str.contains("off by one layer" if abs(off) == 1 else "2 layers early").all()
    assert set(problems.check) - {"agreement"} == {f"place {place}"}


def test_the_last_layer_too_early_is_suspected_without_a_comparison(faulty, sound):
    layer_before(faulty, sound[1], 3, -1)
    problems = extract.verify(faulty / "states", compare=False)
    assert set(problems.check) == {"agreement"}
    assert problems.remedy.str.contains("none of the usual mistakes fits").all()
    assert problems.attrs["compared"] == "not asked for"


def test_a_norm_that_was_applied_already_is_named(faulty, sound):
    head = extract.final_head(sound[1].path)

    def change(states):
        states[:, -1] = head.norm(states[:, -1])
        return states

    spoil(faulty, states_of(change))
    problems = extract.verify(faulty / "states", compare=False)
    assert set(problems.check) == {"final_norm"}
    assert len(problems) == 6
    assert problems.remedy.str.contains("final norm applied already").all()


@pytest.mark.parametrize(("late", "said"), [(1, "one token too late"), (-1, "one token too early")])
def test_shifted_states_are_named(faulty, late, said):
    spoil(faulty, states_of(lambda states: torch.roll(states, late, 0)))
    problems = extract.verify(faulty / "states", compare=False)
    assert set(problems.check) == {"agreement"}
    assert problems.remedy.str.contains(said).all()


def test_the_last_layer_in_another_place_is_named(faulty):
    spoil(faulty, states_of(lambda states: states[:, [3, 0, 1, 2]]))
    assert extract.verify(faulty / "states", compare=False).remedy.str.contains("stands in place 0").all()


def weights(folder, change) -> None:
    """Rewrite the model's weights."""
    path = folder / "model" / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_norm_of_the_other_form_is_named(faulty, kind):
    """1 + w where the architecture's name says w, and the other way round: speculators#1090."""
    step = -1.0 if kind == "llama" else 0.0
    weights(faulty, lambda w: w | {"model.norm.weight": w["model.norm.weight"] + step})
    config = files.read_json(faulty / "model" / "config.json")
    files.write_json(faulty / "model" / "config.json", config | {"model_type": kind})
    problems = extract.verify(faulty / "states", compare=False)
    said = "gain is 1 + w, as Gemma's" if kind == "llama" else "gain is w, as Llama's"
    assert set(problems.check) == {"agreement"}
    assert problems.remedy.str.contains(said, regex=False).all()


def test_gemmas_norm_is_read_as_gemmas(faulty):
    weights(faulty, lambda w: w | {"model.norm.weight": w["model.norm.weight"] - 1.0})
    config = files.read_json(faulty / "model" / "config.json")
    files.write_json(faulty / "model" / "config.json", config | {"model_type": "gemma2"})
    assert extract.verify(faulty / "states", compare=False).empty


def wrapped(folder, prefix, tower) -> None:
    """The same model inside a multimodal checkpoint that has a tower with a norm of the same width."""
    config = files.read_json(folder / "model" / "config.json")
    outer = {"architectures": ["SomeForConditionalGeneration"], "model_type": "some", "text_config": config}
    files.write_json(folder / "model" / "config.json", outer)

    def change(tensors):
        moved = {f"{prefix}.{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()}
        moved[f"{prefix}.lm_head.weight"] = moved.pop(f"{prefix}.lm_head.weight")
        return moved | tower

    weights(folder, change)


def test_a_wrappers_norm_is_found_by_its_exact_name(faulty):
    """A search by suffix takes the shortest name, which is the tower's: speculators#1038."""
    tower = {"vision.model.norm.weight": torch.rand(WIDTH), "model.norm.weight": torch.rand(WIDTH)}
    wrapped(faulty, "language_model.model", tower)
    assert extract.final_head(faulty / "model").norm_name == "language_model.model.norm.weight"
    assert extract.verify(faulty / "states", compare=False).empty


def test_a_wrong_norm_tensor_of_a_wrapper_is_named(faulty):
    """A tower with a text model of its own that comes first in the checkpoint."""
    tower = {
        "audio.embed_tokens.weight": torch.randn(tiny_target.VOCAB, WIDTH),
        "audio.norm.weight": torch.rand(WIDTH),
    }
    wrapped(faulty, "language_model.model", tower)
    problems = extract.verify(faulty / "states", compare=False)
    assert problems.remedy.str.contains("wrong norm tensor: language_model.model.norm.weight fits").all()
    assert problems.remedy.str.contains("audio.norm.weight was read").all()


def test_another_models_states_are_named(faulty):
    spoil(faulty, states_of(torch.randn_like))
    problems = extract.verify(faulty / "states", compare=True)
    assert problems[problems.check == "agreement"].remedy.str.contains("another model's").all()
    assert set(problems.check) == {"agreement", *(f"place {place}" for place in range(4))}


def set_at(value):
    def change(states):
        states[1, 2] = value
        return states

    return change


@pytest.mark.parametrize(
    ("change", "check", "said"),
    [
        (states_of(lambda s: s[:-16]), "length", "prefix caching"),
        (states_of(lambda s: s[:, :-1]), "layers", "other layers"),
        (states_of(lambda s: s[..., :-1]), "hidden_size", "another target"),
        (states_of(set_at(0.0)), "non_zero", "unwritten memory"),
        (states_of(set_at(float("nan"))), "finite", "overflowed"),
        (states_of(set_at(float("inf"))), "finite", "overflowed"),
        (states_of(lambda s: s.half()), "dtype", "--dtype"),
        (lambda t, _row: t | {"token_ids": t["token_ids"] + 1}, "token_ids", "other tokens"),
    ],
)
def test_one_bad_file_among_good_ones_is_named(faulty, change, check, said):
    spoil(faulty, change, rows=[3])
    problems = extract.verify(faulty / "states", compare=False)
    assert problems[["row", "check"]].to_numpy().tolist() == [[3, check]]
    assert said in problems.remedy.iloc[0]


def test_a_file_that_is_missing_or_cut_short_is_named(faulty):
    (faulty / "states" / "hs_1.safetensors").unlink()
    cut = faulty / "states" / "hs_4.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10])
    problems = extract.verify(faulty / "states", compare=False)
    assert problems[["row", "check"]].to_numpy().tolist() == [[1, "readable"], [4, "readable"]]


def test_other_layers_than_asked_for_are_refused(sound):
    with pytest.raises(extract.BadLayers, match=r"holds layers \[1, 2, 3, 5\]"):
        extract.verify(sound[0] / "states", layers=[0, 2, 3, 5])


def test_weights_that_are_not_there_are_not_made_up(faulty):
    weights(faulty, lambda w: {name: tensor for name, tensor in w.items() if "layers.3." not in name})
    problems = extract.verify(faulty / "states")
    assert problems.empty
    assert "lacks weights" in problems.attrs["compared"]
    with pytest.raises(extract.NoReference, match=r"layers\.3"):
        extract.verify(faulty / "states", compare=True)


@pytest.mark.parametrize(
    ("columns", "limit"),
    [
        ({}, 0.95),
        ({"temperature": [0.0, 0.0]}, 0.95),
        ({"temperature": [0.0, 0.7]}, 0.3),
        ({"temperature": [0.0, float("nan")]}, 0.3),
        ({"temperature": [0.0, 0.0], "origin": ["target", "dataset"]}, 0.3),
    ],
)
def test_the_limit_is_that_of_the_answers(columns, limit):
    assert checks.limit_of(pd.DataFrame({"seq_len": [1, 2]} | columns)) == limit


def test_only_what_the_target_said_has_to_agree(faulty):
    """A second user turn within the answer: its tokens are nobody's prediction."""
    path = faulty / "data" / "dataset.parquet"
    frame = files.read_parquet(path)
    ids, mask = ([list(row) for row in frame[name]] for name in ("input_ids", "loss_mask"))
    for tokens, trained in zip(ids, mask, strict=True):
        tokens[-6:] = [(token + 11) % tiny_target.VOCAB for token in tokens[-6:]]
        trained[-6:] = [False] * 6
    for row, tokens in enumerate(ids):
        states = extract.states_path(faulty / "states", row)
        save_file(load_file(states) | {"token_ids": torch.tensor([int(token) for token in tokens])}, states)
    files.write_parquet(path, frame.assign(input_ids=ids, loss_mask=mask))
    assert extract.verify(faulty / "states", compare=False).attrs["agreement"] == 1.0
    files.write_parquet(path, frame.assign(input_ids=ids))
    found = extract.verify(faulty / "states", compare=False)
    assert set(found.check) == {"agreement"}


def test_sampled_answers_may_agree_less(faulty):
    path = faulty / "data" / "dataset.parquet"
    frame = files.read_parquet(path)
    ids = [list(map(int, row)) for row in frame.input_ids]
    for row in ids:
        row[-3] = (row[-3] + 7) % tiny_target.VOCAB
    files.write_parquet(path, frame.assign(input_ids=ids, temperature=1.0))
    for row, tokens in enumerate(ids):
        states = extract.states_path(faulty / "states", row)
        save_file(load_file(states) | {"token_ids": torch.tensor(tokens)}, states)
    problems = extract.verify(faulty / "states", compare=False)
    assert problems.empty
    assert problems.attrs["agreement"] < 1
    assert json.dumps(problems.attrs)
