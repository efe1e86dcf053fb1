"""How every command of the lab ends: the text and the exit code of whatever stopped it."""

import ast
from pathlib import Path

import pytest
import typer

from labkit import cli, command, runs, settings
from labkit.errors import LabError
from labkit.extract import ShardDone
from labkit.train import Stopped

LAB = Path(command.__file__).parent


def ending(error, monkeypatch, capsys):
    """Exit code, standard output and error output of a command in which this is raised (None: nothing)."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command()
    def work() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr("sys.argv", ["work"])
    with pytest.raises(SystemExit) as stop:
        command.run(app)
    said = capsys.readouterr()
    return stop.value.code, said.out, said.err


@pytest.mark.parametrize(
    ("error", "code"),
    [(LabError, 1), (settings.BadParameter, 1), (Stopped, 75), (ShardDone, 0), (runs.PartDone, 0)],
)
def test_what_the_lab_explains_is_said_with_its_code(error, code, monkeypatch, capsys):
    found, out, err = ending(error("it was 5", "make it 4"), monkeypatch, capsys)
    assert found == code
    told, silent = (err, out) if code else (out, err)
    assert told == f"labkit: {error.__name__ + ': ' if code else ''}it was 5\n  what to do: make it 4\n"
    assert not silent


def test_no_memory_is_said_and_success_is_silent(monkeypatch, capsys):
    code, out, err = ending(MemoryError(), monkeypatch, capsys)
    assert (code, out) == (1, "")
    assert "no memory left" in err
    assert ending(None, monkeypatch, capsys) == (0, "", "")


def test_an_interrupt_says_what_is_kept(monkeypatch, capsys):
    code, out, err = ending(KeyboardInterrupt(), monkeypatch, capsys)
    assert (code, out) == (130, "")
    assert err.strip() == "labkit: interrupted; finished steps are kept: the same command goes on from there"


def test_a_word_that_is_no_option_is_said_by_the_parser(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["labkit", "run", "02", "--no-such"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "--no-such" in said
    assert "interrupted" not in said


def test_every_command_ends_that_way():
    """Each `python -m` of the lab that parses words, and `labkit` itself."""
    mains = [LAB / "cli.py", *(path for path in LAB.rglob("__main__.py") if "typer" in path.read_text())]
    assert len(mains) >= 4
    for path in mains:
        names = {
            ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        }
        assert "command.run" in names, path
        assert not names & {"sys.exit", "typer.run", "app"}, path
