"""Controls bind pure functions: drawings are checked by hand, nothing is computed twice, headless is silent."""

import importlib
import itertools
from pathlib import Path

import ipywidgets
import numpy as np
import pandas as pd
import pytest

from labkit import prediction, trace, widgets
from labkit.widgets.profile import parts_between

controls = importlib.import_module("labkit.widgets.controls")

TRACE = Path(__file__).parents[1] / "data/trace_tp2_cpu"


def test_parts_of_all_steps_are_the_traces_own():
    traces = trace.load(TRACE)
    every = traces.breakdown()
    every = every[every["phase"] == traces.decode_phase()]
    steps = sorted(every["step"].unique())
    found = parts_between(every, "all", steps[0], steps[-1]).set_index(["rank", "category"])["ms_per_step"]
    own = traces.parts().set_index(["rank", "category"])["ms_per_step"]
    pd.testing.assert_series_equal(found.sort_index(), own.sort_index())
    one = parts_between(every, 1, steps[1], steps[1])
    mine = every[(every["rank"] == 1) & (every["step"] == steps[1])]
    assert one["ms_per_step"].sum() == pytest.approx(mine["dur_us"].sum() / 1e3)
    assert set(one["rank"]) == {1}


def test_breakdown_draws_the_bars_of_the_chosen_rank_and_steps():
    traces = trace.load(TRACE)
    control = widgets.breakdown(traces)
    first, last = control.first["steps"]
    assert [label.get_text() for label in control.drawn().axes[0].get_yticklabels()] == ["rank 0", "rank 1"]
    axes = control.drawn(rank=1, steps=(first, first)).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 1"]
    step = traces.steps().query("rank == 1 and step == @first")["dur_us"].iloc[0] / 1e3
    assert max(bar.get_x() + bar.get_width() for bar in axes.patches) == pytest.approx(step)
    assert first < last


def test_every_control_says_what_it_shows_and_in_which_unit():
    grid = prediction.grid(rows(), TIMES, TIMES, k=3, lookup_max=4)
    made = [
        widgets.breakdown(trace.load(TRACE)),
        widgets.lookup(grid, rows(), TIMES, TIMES, k=3, lookup_max=4, lookup_min=1),
        widgets.sweep(sweep_table()),
    ]
    for control in made:
        axes = control.drawn().axes[0]
        assert all((axes.get_title(), axes.get_xlabel(), axes.get_ylabel()))
        assert "(" in axes.get_xlabel()


def rows() -> pd.DataFrame:
    """A copying and a random category."""
    rng = np.random.default_rng(0)
    copied, drawn = list(range(40)), rng.integers(0, 9999, 40).tolist()
    columns = {"category": ["copy", "random"], "prompt_token_ids": [copied, drawn]}
    return pd.DataFrame(columns | {"output_token_ids": [copied[:20], rng.integers(0, 9999, 20).tolist()]})


TIMES = pd.DataFrame({"n": [1, 6], "step_ms": [20.0, 25.0]})


def test_lookup_simulates_a_category_once_and_frames_the_choice(monkeypatch):
    calls = []
    grid = prediction.grid(rows(), TIMES, TIMES, k=3, lookup_max=4)
    control = widgets.lookup(grid, rows(), TIMES, TIMES, k=3, lookup_max=4, lookup_min=1)
    own = prediction.grid
    monkeypatch.setattr(
        prediction, "grid", lambda table, *rest, **more: calls.append(1) or own(table, *rest, **more)
    )
    control.drawn()
    assert calls == [], "all prompts were simulated before"
    for k, category in itertools.product((1, 3), ("copy", "random")):
        axes = control.drawn(category=category, k=k, lookup_max=2, lookup_min=2).axes[0]
        alone = own(rows().query("category == @category"), TIMES, TIMES, k=3, lookup_max=4)
        value = alone.query("k == @k and lookup_max == 2 and lookup_min == 2")["tokens_per_step"].iloc[0]
        assert f"k={k}, lookup 2..2: {value:.2f}\n{category}" in axes.get_title()
        frame = axes.patches[0]
        assert (frame.get_x() + 0.5, frame.get_y() + 0.5) == (1, 1)  # second column and row: lengths 1, 2, ...
    assert len(calls) == 2
    axes = control.drawn(lookup_max=2, lookup_min=4).axes[0]
    assert "lookup 2..2" in axes.get_title(), "no lookup_min above lookup_max"


def test_activation_shows_the_chosen_layer_and_n():
    columns = {"low": 1.0, "high": 9.0, "uniform": 5.0, "popularity": 4.0, "model": "tiny"}
    by_layer = pd.DataFrame({"n": [1, 2, 1, 2], "layer": [3, 3, 7, 7], "unique_mean": [1.0, 1.5, 1.0, 1.75]})
    by_window = by_layer.groupby("n", as_index=False)["unique_mean"].mean()
    control = widgets.activation(by_window.assign(**columns), by_layer.assign(**columns), 2)
    for layer, value in (("mean", 1.625), (3, 1.5), (7, 1.75)):
        axes = control.drawn(layer=layer).axes[0]
        assert f"measured, n=2: {value:.2f}" in [text.get_text() for text in axes.get_legend().get_texts()]
        (line,) = [line for line in axes.get_lines() if str(line.get_label()).startswith("measured")]
        assert line.get_ydata()[-1] == value


def sweep_table() -> pd.DataFrame:
    knobs = {"variant": ["eagle3", "ngram"], "k": [1, 3], "streams": [1, 8], "temperature": [0.0]}
    table = pd.DataFrame(itertools.product(*knobs.values(), ["chat", "code"]), columns=[*knobs, "category"])
    table["speedup"] = 1 + np.arange(len(table)) / 10
    table = table.assign(acceptance_length=2 * table["speedup"], predicted_speedup=table["speedup"] + 0.5)
    return table.assign(speedup_low=table["speedup"] - 0.1, speedup_high=table["speedup"] + 0.1)


def test_sweep_draws_the_chosen_load_and_category_with_the_prediction_beside():
    table = sweep_table()
    control = widgets.sweep(table, k=3)
    assert "temperature" not in control.choices, "there is nothing to choose"
    axes = control.drawn(streams=8, category="code").axes[0]
    mine = table.query("streams == 8 and category == 'code' and variant == 'ngram'")
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert lines[f"ngram (k=3: {mine['speedup'].iloc[-1]:.2f})"] == mine["speedup"].tolist()
    assert lines["ngram, predicted"] == mine["predicted_speedup"].tolist()
    axes = control.drawn(show="acceptance length", streams=8, category="code").axes[0]
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert lines[f"ngram (k=3: {mine['acceptance_length'].iloc[-1]:.2f})"] == mine["acceptance_length"].tolist()
    assert "ngram, predicted" not in lines


def test_a_sweep_of_points_and_categories_leaves_out_the_baseline_and_says_what_was_not_measured():
    """As notebook 05 has it: only the best k by streams, a prediction for the head alone."""
    one = {"temperature": 0.0, "acceptance_length": 2.0, "speedup": 1.5, "speedup_low": 1.0, "speedup_high": 2.0}
    head = pd.DataFrame([{"variant": "eagle3", "k": k, "streams": s, **one} for k, s in ((1, 1), (3, 1), (3, 4))])
    ngram = pd.DataFrame([{"variant": "ngram", "k": 5, "streams": 1, **one}])
    bare = pd.DataFrame([{"variant": "baseline", "k": 0, "streams": s, "temperature": 0.0} for s in (1, 4)])
    points = pd.concat([bare, head.assign(predicted=1.4), ngram], ignore_index=True)
    control = widgets.sweep(points, points[points["streams"] == 1].assign(category="code"), k=3)
    assert control.choices["k"] == [3, 1, 3, 5]
    assert control.choices["category"] == ["all prompts", "code"]
    lines = {line.get_label(): line for line in control.drawn().axes[0].get_lines()}
    assert {"eagle3 (k=3: 1.50)", "eagle3, predicted", "ngram"} <= set(lines)
    assert lines["eagle3, predicted"].get_ydata().tolist() == [1.4, 1.4]
    assert not {"baseline", "ngram, predicted"} & set(lines)
    nothing = control.drawn(category="code", streams=4).axes[0]
    assert [text.get_text() for text in nothing.texts] == ["not measured"]


def test_a_sweep_without_prediction_or_without_anything():
    bare = widgets.sweep(sweep_table().drop(columns="predicted_speedup"))
    labels = [line.get_label() for line in bare.drawn().axes[0].get_lines()]
    assert labels[0].startswith("eagle3")
    assert not [label for label in labels if "predicted" in label]
    nothing = sweep_table().assign(speedup=np.nan, acceptance_length=np.nan)
    assert widgets.sweep(nothing).drawn() == "Nothing was measured."


@pytest.mark.parametrize("column", ["speedup", "predicted_speedup", "acceptance_length"])
def test_a_sweep_with_gaps_is_drawn(column):
    table = sweep_table()
    table.loc[::3, column] = np.nan
    for k in (1, 3, None):
        widgets.sweep(table, k=k).drawn()
    widgets.sweep(table[table["variant"] == "eagle3"]).drawn()


def test_a_redraw_makes_no_widgets(monkeypatch):
    """Each would be sent to the page, and kept there."""
    monkeypatch.setattr(controls, "control", lambda *_: pytest.fail("made one"))
    own = ipywidgets.IntSlider(value=4)
    control = widgets.Control(lambda **chosen: chosen, {"k": [3, 1], "word": ["b", "a"], "own": own})
    assert control.drawn(k=1) == {"k": 1, "word": "b", "own": 4}


def test_a_slider_ascends_and_starts_at_the_first_given():
    slider = widgets.control("k", [3, 1, 2, 3])
    assert (slider.options, slider.value) == ((1, 2, 3), 3)
    assert widgets.control("kind", ["b", "a", "b"]).options == ("b", "a")
    own = ipywidgets.IntSlider(value=4)
    assert widgets.control("x", own) is own


def test_controls_show_nothing_where_nobody_watches(headless):
    widgets.controls(lambda k: pytest.fail("drawn"), k=[1, 2])


def test_controls_draw_with_what_is_chosen(watched):
    drawn = []
    widgets.controls(lambda k, word: drawn.append((k, word)) or "text", k=[2, 1], word=["a", "b"])
    assert watched[0] == "text"
    box = watched[1]
    knobs = box.children[0].children
    assert [knob.description for knob in knobs] == ["drafted tokens k", "word"]
    assert drawn == [(2, "a")]
    knobs[0].value = 1
    assert drawn == [(2, "a"), (1, "a")]
