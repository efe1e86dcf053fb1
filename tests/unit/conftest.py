"""What unit tests share: a tiny training, undisturbed, and one thread for tests that compare to the bit."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tiny target with data set, states and vocabulary (train_data.make)."""
    import train_data

    return train_data.make(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def whole(made: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training on `made` that nothing interrupted."""
    import train_data

    folder = tmp_path_factory.mktemp("whole")
    train_data.fit(made, folder)
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch on one thread: sums over other numbers of threads round differently, and tiny ones are slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_figures() -> None:
    """A test sees no figure that another one left open."""
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Somebody watches the widgets; what is displayed."""
    monkeypatch.setenv("JPY_SESSION_NAME", "notebook.ipynb")
    monkeypatch.delenv("LABKIT_HEADLESS", raising=False)
    seen: list[Any] = []
    for name in ("controls", "live"):
        module = importlib.import_module(f"labkit.widgets.{name}")
        monkeypatch.setattr(module, "display", lambda thing, **_: seen.append(thing))
    return seen


@pytest.fixture
def headless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody watches."""
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
