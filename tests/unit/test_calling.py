"""Printed commands can be copied: into a shell whose PATH has no labkit, too."""

import pytest

from labkit.calling import copyable
from labkit.cli import app
from labkit.errors import LabError


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A lab with its environment, and a PATH without labkit; returns its folder of programs."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "labkit").write_text("#!/bin/sh\n")
    (programs / "labkit").chmod(0o755)
    monkeypatch.setenv("LABKIT_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    return programs


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("labkit run 02 --run-id r", ".venv/bin/labkit run 02 --run-id r"),
        (
            "run `labkit doctor`, then `labkit run 04`",
            "run `.venv/bin/labkit doctor`, then `.venv/bin/labkit run 04`",
        ),
        ("labkit: no memory left; the labkit command", "labkit: no memory left; the labkit command"),
        ("see tools/labkit run", "see tools/labkit run"),
        (".venv/bin/labkit run 02", ".venv/bin/labkit run 02"),
        ("python -m labkit.cli run 02", "python -m labkit.cli run 02"),
    ],
)
def test_commands_are_found_where_they_stand_and_nothing_else(lab, text, want):
    assert copyable(text) == want
    assert copyable(want) == want


def test_every_command_is_known(lab):
    names = [c.name or c.callback.__name__.replace("_", "-") for c in app.registered_commands]
    assert len(names) > 5
    assert [copyable(f"labkit {name}") for name in names] == [f".venv/bin/labkit {name}" for name in names]


def test_a_path_with_labkit_leaves_commands_as_they_are(lab, monkeypatch):
    monkeypatch.setenv("PATH", str(lab))
    assert copyable("labkit run 02") == "labkit run 02"


def test_without_the_labs_environment_there_is_nothing_better_to_say(lab):
    (lab / "labkit").unlink()
    assert copyable("labkit run 02") == "labkit run 02"


def test_remedies_can_be_copied(lab):
    error = LabError("labkit run 02 failed", "see `labkit doctor --probe`")
    assert str(error) == "labkit run 02 failed\n  what to do: see `.venv/bin/labkit doctor --probe`"
    assert error.remedy == "see `labkit doctor --probe`", "one rewriting, where it is shown"
