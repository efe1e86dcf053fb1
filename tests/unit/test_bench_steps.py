"""Step times: from a server whose steps take a known time, from counts of steps, and as a cost model."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from sse_server import Reply, serving, usage

from labkit import bench, costmodel
from labkit.bench import rows as bench_rows
from labkit.bench import steptimes
from labkit.bench.steptimes import inner_gaps, quartiles
from labkit.settings import NgramBaseline

TEXT = list(range(100, 200))  # the one greedy answer that the toy model knows
PROMPT = [7, 8]


def toy(path: str, body: dict) -> Reply:
    """A step takes 10 ms and 5 more for each further request; the answer goes on where the prompt ends."""
    given = body["prompt"] if path.endswith("/completions") and "prompt" in body else PROMPT
    told = TEXT[len(given) - len(PROMPT) :][: body["max_tokens"]]
    events: list = []
    for i, token in enumerate(told):
        choice = {"index": 0, "text": "x", "token_ids": [token], "finish_reason": None}
        choice |= {"prompt_token_ids": given} if i == 0 else {}
        choice |= {"finish_reason": "length"} if i == len(told) - 1 else {}
        events += [lambda requests: 0.01 + 0.005 * (requests - 1), {"choices": [choice]}]
    return Reply([*events, usage(len(told))])


def test_neighbouring_tokens_of_one_text_decode_side_by_side() -> None:
    with serving(toy) as server:
        times = bench.step_times(server.url, [1, 4], tokens=60, repeats=2)
        sent = [body["prompt"] for body in server.requests if "prompt" in body]
    assert times["n"].tolist() == [1, 4]
    assert times["streams"].tolist() == [1, 1]
    assert times["tokens_are"].unique().tolist() == ["neighbours"]
    assert times["step_ms"].tolist() == pytest.approx([10, 25], rel=0.25)
    assert times["samples"].iloc[0] == 2 * (60 - 1 - 8)
    assert times["samples"].iloc[1] > 2 * 4 * 10
    begins = [PROMPT + TEXT[:i] for i in range(4)]
    assert all(prompt in begins for prompt in sent)
    assert all(begin in sent for begin in begins), "request i begins i tokens further on"


def test_several_texts_of_several_tokens() -> None:
    with serving(toy) as server:
        times = bench.step_times(server.url, [2], streams=[1, 3], tokens=24, repeats=1)
    assert times[["n", "streams"]].to_numpy().tolist() == [[2, 1], [2, 3]]
    assert times["step_ms"].tolist() == pytest.approx([15, 35], rel=0.25)


def test_only_the_time_in_which_all_decode_counts() -> None:
    """Two streams, one starts 55 ms later, the other ends first: gaps outside of the common time do not count."""
    rows = pd.DataFrame(
        {
            "started_s": [0.0, 0.05],
            "ttft_ms": [5.0, 10.0],  # first tokens at 5 and 60 ms
            "e2e_ms": [205.0, 250.0],  # last ones at 205 and 300 ms
            "gaps_ms": [[5.0] * 10 + [10.0] * 15, [10.0] * 14 + [20.0] * 5],
            "chunk_tokens": [None, [1] * 20],
        }
    )
    # first: 5 to 55 at 5 ms, then 65, 75, ...; inside 60..205: 14 gaps from 65 on, less 4 at the end
    # second: 60, 70, ..., 200 at 10 ms: 14 inside, less 4 at the start (the ones at its end lie outside anyway)
    assert inner_gaps(rows).tolist() == [10.0] * (14 - 4) + [10.0] * (14 - 4)


def test_a_chunk_of_two_steps_counts_as_two() -> None:
    """A busy API server puts two steps' tokens into one chunk."""
    rows = pd.DataFrame(
        {
            "started_s": [0.0],
            "ttft_ms": [10.0],
            "e2e_ms": [1000.0],
            "gaps_ms": [[10.0] * 4 + [20.0] + [10.0] * 4],
            "chunk_tokens": [[1] * 5 + [2] + [1] * 4],
        }
    )
    assert inner_gaps(rows).tolist() == [10.0, 10.0]


def test_a_speculating_server_is_refused() -> None:
    page = 'vllm:spec_decode_num_drafts_total{engine="0"} 5\n'
    with serving(toy, lambda: page) as server, pytest.raises(bench.BadRun, match="speculates"):
        bench.step_times(server.url, [1, 2])


def made(plain: int, drafting: int, *, noise: float = 0.0) -> dict:
    """A request whose plain steps took 10 ms and whose steps with 4 drafted tokens took 25."""
    return {
        "drafts": drafting,
        "drafted": 4 * drafting,
        "accepted": 0,
        "accepted_at": [0] * 4,
        "chunks": 1 + plain + drafting,
        "tokens_total": 1 + plain + drafting,
        "decode_ms": 10.0 * plain + 25.0 * drafting + noise,
    }


def test_a_speculating_server_s_two_kinds_of_step() -> None:
    rows = bench_rows.frame([made(30, 5), made(10, 20), made(0, 40), made(25, 0)])
    times = bench.speculating_step_times(rows)
    assert times["n"].tolist() == [1.0, 5.0]
    assert times["step_ms"].tolist() == pytest.approx([10.0, 25.0])
    assert times["samples"].tolist() == [65, 65]
    noisy = bench_rows.frame(
        [made(p, 40 - p, noise=n) for p, n in zip(range(41), np.tile([-20, 20], 21), strict=False)]
    )
    times = bench.speculating_step_times(noisy)
    assert (times["low_ms"] < times["step_ms"]).all()
    assert times["low_ms"].iloc[1] < 25 < times["high_ms"].iloc[1]


def test_a_server_that_always_drafts_has_one_kind_of_step() -> None:
    times = bench.speculating_step_times(bench_rows.frame([made(0, 10), made(0, 20)]))
    assert times[["n", "step_ms"]].to_numpy().tolist() == [[5.0, 25.0]]


TIMES = pd.DataFrame(
    {
        "n": [1, 2, 4, 1, 2],
        "streams": [1, 1, 1, 8, 8],
        "step_ms": [10.0, 12.0, 20.0, 30.0, 60.0],
        "low_ms": [9.0, 11.0, 19.0, 30.0, 60.0],
        "high_ms": [11.0, 13.0, 21.0, 30.0, 60.0],
    }
)


def test_measured_steps_answer_as_a_model_does() -> None:
    model = costmodel.calibrate(TIMES, draft_ms=1.0, host_ms=0.5)
    assert model.step_ms(3) == 16.0  # half way between 12 and 20
    assert model.verify_ratio(4).mid == 2.0
    assert tuple(model.verify_ratio(4)) == pytest.approx((19 / 11, 2.0, 21 / 9))
    assert tuple(model.verify_ratio(1)) == (1, 1, 1)
    assert model.verify_ratio(2, streams=8).mid == 2.0
    assert model.break_even(3).mid == pytest.approx((20 + 3 * 1.0 + 0.5) / 10)
    assert model.speedup(2.35, 3)[1] == pytest.approx(1.0)
    low, mid, high = model.speedup((2.0, 2.35, 3.0), 3)
    assert low < mid < high


def test_what_was_not_measured_is_not_made_up() -> None:
    model = costmodel.calibrate(TIMES)
    for n, streams in ((5, 1), (3, 8), (1, 2)):
        with pytest.raises(costmodel.BadEstimate, match="was not measured"):
            model.step_ms(n, streams)
    with pytest.raises(costmodel.BadEstimate, match="k=1"):
        model.speedup(2.5, 1)
    with pytest.raises(costmodel.BadEstimate, match=r"no t\(1\)"):
        costmodel.calibrate(TIMES[TIMES["n"] > 1])


@pytest.mark.parametrize(
    ("gaps", "median"),
    [
        ([2.0, 2.1, 1.9, 2.0], 2.0),
        ([1.1] * 4 + [1.5] * 5 + [2.4] * 4, 1.5),  # an H200's plain steps, seen by a client
        ([2.0] * 60 + [30.0], 2.0),  # a pause now and then
        ([20.0] * 29 + [700.0], 20.0),  # a stall among few
        ([0.03] * 3 + [8.0], None),  # four tokens a step of 2 ms that were delivered together
        ([0.03] * 12 + [26.0], None),
        ([0.03, 4.0] * 20, None),  # pairs
        ([0.03] * 10 + [3.3] * 15, None),  # most, but not all, one by one
    ],
)
def test_tokens_that_come_in_bunches_time_no_step(gaps, median):
    found = quartiles(np.array(gaps))
    assert found["samples"] == len(gaps)
    if median is None:
        assert np.isnan([found["step_ms"], found["low_ms"], found["high_ms"]]).all()
    else:
        assert found["step_ms"] == median


@pytest.mark.parametrize(("bunched", "left"), [({2}, [1, 3]), ({1}, []), (set(), [1, 2, 3])])
def test_what_came_in_bunches_has_no_row_and_is_timed_again(monkeypatch, tmp_path, bunched, left):
    """Without t(1) no row is of use. Only a whole table is kept on disk."""
    asked = []

    def told(server, prompts, *, variant, **options):
        asked.append(variant)
        n = 0 if variant == "text" else int(variant.split()[0])
        ids = {"prompt_token_ids": PROMPT, "output_token_ids": TEXT[:4], "repeat": 0, "error": None}
        return pd.DataFrame([ids | {"n": n}])

    def gaps(group):
        return np.array([0.01, 5.0] * 20 if int(group["n"].iloc[0]) in bunched else [10.0] * 20)

    monkeypatch.setattr(steptimes, "run", told)
    monkeypatch.setattr(steptimes, "inner_gaps", gaps)
    monkeypatch.setattr(steptimes, "refuse_speculation", lambda server: None)
    chosen = NgramBaseline(run_id="r", scale="smoke")
    monkeypatch.setattr(NgramBaseline, "folder", tmp_path)
    for repeat in range(2):
        times = steptimes.kept(chosen, SimpleNamespace(get=lambda: None), 3)
        assert times["n"].tolist() == left, repeat
    assert len(asked) == (4 if not bunched else 8)
