"""Settings: what a parameters cell may hold, and what is refused."""

import dataclasses

import nbformat
import papermill
import pytest

from labkit import settings
from labkit.settings import NOTEBOOKS, BadParameter, Eagle3Pipeline, Evaluation, NgramBaseline, Profiling

NOTEBOOK_FILES = {name: settings.root() / "notebooks" / f"{name}.ipynb" for name in NOTEBOOKS}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_parameters_cell_equals_settings_class(name):
    inspected = papermill.inspect_notebook(str(NOTEBOOK_FILES[name]))
    fields = NOTEBOOKS[name].parameters()
    assert set(inspected) == set(fields)
    for parameter, seen in inspected.items():
        assert eval(seen["default"]) == fields[parameter].default, parameter
        assert seen["help"].strip(), f"{parameter} has no trailing comment"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_shape(name):
    notebook = nbformat.read(NOTEBOOK_FILES[name], as_version=4)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    assert len(notebook.cells) <= 25
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.cells[0].source.startswith("# ")
    for source in code:
        assert not any(line.startswith(("def ", "class ", "!", "%")) for line in source.splitlines()), source
        calls = [line for line in source.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        assert len(calls) <= 8 or "parameters" in source or "import" in source or source is code[0], source


@pytest.mark.parametrize(("value", "expected"), [("64", 64), (64, 64)])
def test_text_from_the_command_line_becomes_the_type(value, expected):
    assert NgramBaseline.of({"max_tokens": value}).max_tokens == expected


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("max_tokens", "many"),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("max_tokens", None),
        ("max_tokens", [1]),
        ("max_tokens", -3),
        ("temperature", "warm"),
        ("concurrency", 0),
        ("scale", "huge"),
        ("run_id", "../elsewhere"),
        ("no_such", 1),
    ],
)
def test_bad_parameters_are_refused_by_name(parameter, value):
    with pytest.raises(BadParameter, match=parameter):
        NgramBaseline.of({parameter: value})


def test_lookup_that_no_server_takes_is_refused_before_anything_runs():
    with pytest.raises(BadParameter, match="prompt_lookup_min=5 is above prompt_lookup_max=4"):
        NgramBaseline.of({"prompt_lookup_min": 5})


@pytest.mark.parametrize("cls", [NgramBaseline, Evaluation])
@pytest.mark.parametrize("same", ["http://host:8000", "http://host:8000/", "http://host:8000/v1"])
def test_one_server_is_not_compared_with_itself(cls, same):
    with pytest.raises(BadParameter, match="variant_server"):
        cls.of({"server": "http://host:8000", "variant_server": same})
    assert cls.of({"server": same}).variant_server == ""


def test_whole_number_for_a_float_and_number_for_a_text():
    assert Eagle3Pipeline.of({"learning_rate": 1}).learning_rate == 1.0
    assert isinstance(Eagle3Pipeline.of({"learning_rate": 1}).learning_rate, float)
    assert Profiling.of({"run_id": 7}).run_id == "7"


@pytest.mark.parametrize("cls", NOTEBOOKS.values())
def test_every_scale_leaves_no_open_value(cls):
    for index, scale in enumerate(settings.SCALES):
        made = cls.of({"scale": scale})
        for name, values in cls.by_scale.items():
            assert getattr(made, name) == values[index]
        assert made.run_id.endswith(scale)


def test_given_value_beats_the_scale():
    assert NgramBaseline.of({"scale": "smoke", "max_tokens": 77}).max_tokens == 77


@pytest.mark.parametrize("cls", [NgramBaseline, Evaluation])
def test_all_prompts_of_a_file_of_ones_own_are_taken(cls, tmp_path, monkeypatch):
    """0 stands for all of them then; the scale chooses among the lab's own, a number that was given stays."""
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own.jsonl"
    own.touch()
    (tmp_path / "maths").mkdir()  # a folder of one's own goes before a category, as for bench.prompts

    def per_category(**values):
        return cls.of(values).prompts_per_category

    for prompts in (str(own), "own.jsonl", "maths"):
        assert [per_category(prompts=prompts, scale=scale) for scale in settings.SCALES] == [1, 0, 0]
        assert per_category(prompts=prompts, prompts_per_category="0") == 0  # as text, from a command line
        assert per_category(prompts=prompts, prompts_per_category=2, scale="full") == 2
    for prompts in ("benchmark", "story"):
        assert [per_category(prompts=prompts, scale=scale) for scale in settings.SCALES] == [1, 2, 10]
    with pytest.raises(BadParameter, match="prompts_per_category"):
        per_category(prompts=str(own), prompts_per_category=-1)


def test_unknown_parameter_that_papermill_injected_is_refused():
    namespace = {
        "target": "smollm2",
        "no_such": 1,
        "other": 2,
        "In": ["target = 'smollm2'", "# Parameters\nno_such = 1\n"],
    }
    with pytest.raises(BadParameter, match="no_such"):
        NgramBaseline.from_notebook(namespace)


def test_own_variables_of_a_notebook_are_no_parameters():
    namespace = {"target": "smollm2", "note": "mine", "In": ["note = 'mine'"]}
    assert NgramBaseline.from_notebook(namespace).target == "smollm2"


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        NgramBaseline().max_tokens = 3
