"""What a finished stage left: noticed when it is gone or changed, and nothing else is."""

import inspect
import os
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from labkit import files, runs
from labkit.runs.execute import finished
from labkit.settings import Eagle3Pipeline

GIVEN = {"run_id": "r", "scale": "smoke"}
PRODUCTS = ["rows.parquet", "lengths.png", "data/dataset.parquet", "head/model.safetensors", "head/config.json"]
OTHERS = ["hidden_states/hs_0.safetensors", "server-baseline.log", "data/answers.jsonl", "checkpoint.safetensors"]
DAMAGE = {
    "gone": lambda path: path.unlink(),
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "emptied": lambda path: os.truncate(path, 0),
    "a folder in its place": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Stands for papermill: leaves what notebook 04 leaves, by the stage's own means; the times that it ran."""
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setenv("LABKIT_HEADLESS", "1")
    times = []

    def run(chosen, parameters, output, *, force):
        times.append(force)
        shutil.rmtree(chosen.folder)
        chosen.folder.mkdir()
        stage = runs.Stage(chosen)
        stage.save("rows", pd.DataFrame({"path": [f"{Path.home()}/somewhere/{n}" for n in range(50)]}))
        axes = plt.figure().subplots()
        stage.figure("lengths", axes)
        plt.close(axes.figure)
        for name in (*PRODUCTS[2:], *OTHERS):
            (chosen.folder / name).parent.mkdir(exist_ok=True)
            (chosen.folder / name).write_text(f"{name} as it was made")
        stage.finish({"acceptance_length": 1.5})
        output.write_text("{}")

    module = inspect.getmodule(runs.execute)
    monkeypatch.setattr(module, "run_papermill", run)
    monkeypatch.setattr("labkit.runs.stage.provenance", dict)  # asks git and the driver: slow, and not the matter
    runs.execute("04", GIVEN)
    return times


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_product_that_is_gone_or_changed_is_named_and_made_again(ran, capsys, damage, name):
    folder = Eagle3Pipeline.of(GIVEN).folder
    DAMAGE[damage](folder / name)
    assert not finished(Eagle3Pipeline.of(GIVEN))
    runs.execute("04", GIVEN)
    said = capsys.readouterr().out
    assert f"gone or changed since it was finished: {name}\n" in said
    assert len(ran) == 2
    runs.execute("04", GIVEN)
    assert "up to date" in capsys.readouterr().out
    assert len(ran) == 2


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_may_go_or_change_costs_no_second_run(ran, damage, name):
    """States may be deleted to free their disk; logs and stores are read by nobody once the stage is done."""
    folder = Eagle3Pipeline.of(GIVEN).folder
    DAMAGE[damage](folder / name)
    (folder / "another.png").write_text("drawn by hand")
    runs.execute("04", GIVEN)
    assert len(ran) == 1


@pytest.mark.parametrize("products", [None, 5, [], "rows.parquet", {}])
def test_a_record_that_names_no_products_asks_for_none(ran, products):
    path = Eagle3Pipeline.of(GIVEN).folder / "run.json"
    record = files.read_json(path)
    assert set(record["executed"]["products"]) == set(PRODUCTS)
    record["executed"]["products"] = products
    files.write_json(path, record)
    (path.parent / "rows.parquet").unlink()
    runs.execute("04", GIVEN)
    assert len(ran) == 1
