"""What verifying costs a MoE on one H200 (outputs/published/h200-moe), against vLLM's rule and the cost model."""

from __future__ import annotations

import pandas as pd
import pytest

from benchmarks.verify_cost import config
from labkit import costmodel, files, settings, targets

ROWS = files.read_parquet(settings.root() / "outputs" / "published" / "h200-moe" / "verify_cost.parquet")


def steps(model: str, weights: str) -> pd.DataFrame:
    """Median step by n and kind of routing."""
    mine = ROWS[(ROWS["model"] == model) & (ROWS["weights"] == weights)]
    return mine.pivot_table(index="n", columns="kind", values="step_ms", aggfunc="median")


def test_up_to_twelve_tokens_of_kimi_sharing_experts_saves_nothing() -> None:
    """384 experts, top 8, bf16: 12 x 8 x 4 = 384 is the last size that is read pair by pair."""
    table = steps("kimi-k2.5", "bf16")
    for n in (2, 3, 4, 5, 6, 8, 10, 12):
        assert table.loc[n, "shared"] == pytest.approx(table.loc[n, "varied"], rel=0.03)
    assert table.loc[13, "shared"] < 0.35 * table.loc[13, "varied"]
    assert table.loc[16, "shared"] < table.loc[4, "shared"], "16 tokens cheaper than 4"
    assert costmodel.pairwise_limit(targets.geometry(config("kimi-k2.5", "bf16"))) == 12


def test_grouped_int4_reads_each_expert_once_at_any_size() -> None:
    """Marlin: 12 tokens that share 8 experts cost what 1 token does within 20%; on 86 experts a quarter more."""
    table = steps("kimi-k2.5", "int4")
    assert table.loc[12, "shared"] == pytest.approx(table.loc[1, "shared"], rel=0.2)
    assert table.loc[12, "varied"] > 1.2 * table.loc[12, "shared"]
    assert costmodel.pairwise_limit(targets.geometry(config("kimi-k2.5", "int4"))) == 0


def test_varied_routing_is_uniform_routing() -> None:
    """Returned routing against N (1 - (1 - k/N)^n): 384 and 8 give 30.9 at 4 and 109.8 at 16 tokens."""
    varied = (
        ROWS[(ROWS["kind"] == "varied") & (ROWS["model"] == "kimi-k2.5")].groupby("n")["unique_experts"].mean()
    )
    for n in (2, 4, 8, 16, 32):
        assert varied[n] == pytest.approx(384 * (1 - (1 - 8 / 384) ** n), rel=0.01)


@pytest.mark.parametrize(
    ("model", "weights", "at", "most"),
    [
        ("kimi-k2.5", "bf16", (1, 12), 0.17),
        ("qwen3-30b-a3b", "bf16", (1, 16), 0.1),
        ("kimi-k2.5", "int4", (1, 12), 0.18),
    ],
)
def test_two_points_predict_the_others(model: str, weights: str, at: tuple[int, int], most: float) -> None:
    """After calibration at two n, steps of varied routing: none off by more than `most`, half within 6%."""
    mine = ROWS[(ROWS["model"] == model) & (ROWS["weights"] == weights) & (ROWS["kind"] == "varied")]
    table = costmodel.beside(mine, targets.geometry(config(model, weights)), "nvidia-h200", at)
    others = table[~table["fitted"]]["error"].abs()
    assert others.max() < most
    assert others.median() < 0.06


def test_a_calibration_point_has_to_be_measured() -> None:
    mine = ROWS[(ROWS["model"] == "qwen3-30b-a3b")]
    with pytest.raises(costmodel.BadEstimate, match="no step of 7 tokens"):
        costmodel.beside(mine, targets.geometry(config("qwen3-30b-a3b", "bf16")), "nvidia-h200", (1, 7))
