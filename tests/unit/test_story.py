"""What notebook 02 advises on a head: on the model that was measured, whatever the plan's example is."""

import pandas as pd
import pytest

from labkit.planner import story
from labkit.settings import NgramBaseline


def told(served, **given):
    chosen = NgramBaseline(**given)
    return story.advice(chosen, story.of_run(chosen), pd.DataFrame({"model": [served, served]}, dtype="string"))


@pytest.mark.parametrize(
    ("served", "name"),
    [
        ("smollm2", "smollm2"),
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("/models/own", "own"),
        ("kimi-k2.5-turbo", "kimi-k2.5-turbo"),
    ],
)
def test_another_models_plan_is_an_example_alone(served, name):
    found = told(served)
    assert f"pays for {name}, which was measured here" in found
    assert f"for kimi-k2.5 on 8x RTX PRO 6000, PCIe, an example and no advice on {name}" in found
    assert not any(word in found for word in ("**rent**", "**train here**", "days on"))
    assert "(../next-steps-eagle.md)" in found


@pytest.mark.parametrize("served", ["kimi-k2.5", "moonshotai/Kimi-K2.5", "/models/Kimi-K2.5"])
def test_the_measured_models_own_plan_is_advice(served):
    found = told(served)
    assert found.startswith("A head of its own for kimi-k2.5 on ")
    assert "example" not in found


def test_a_plan_that_was_asked_for_is_advice_whatever_the_server_calls_its_model():
    found = told("prod", plan_for="smollm2", plan_hardware="nvidia-h200")
    assert found.startswith("A head of its own for smollm2 on ")


def test_a_server_that_names_no_model_has_the_targets_name():
    assert "pays for own, which" in told(None, target="/models/own")
