"""Acceptance: definitions by hand, counters of real page shapes, rates that cannot be mixed."""

from __future__ import annotations

import math
import operator

import numpy as np
import pandas as pd
import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import acceptance
from labkit.bench import rows as bench_rows

# Three steps of k=3: (drafted, accepted) = (3, 2), no draft, (1, 1), (3, 0).
STEPS = {"drafted": [3, 0, 1, 3], "accepted": [2, 0, 1, 0]}


def test_definitions_by_hand() -> None:
    a = acceptance.from_steps(**STEPS, k=3)
    assert (a.drafts, a.drafted, a.accepted, a.steps, a.tokens) == (3, 7, 3, 4, 7)
    assert a.mean_length == 1 + 3 / 3  # bonus included; the step without a draft is no draft
    assert a.rate == 3 / 7  # no bonus
    assert tuple(a.per_position) == (2 / 3, 1 / 3, 0)
    assert tuple(a.conditional) == (2 / 3, 1 / 1, 0 / 1)  # the draft of one token had no second one
    assert a.tokens_per_step == 7 / 4


def test_conditional_from_counters_divides_neighbours() -> None:
    a = acceptance.from_positions([616, 255, 144], drafts=1566)  # facts/engine.md: acceptance length 1.65
    assert a.mean_length == pytest.approx(1.648, abs=5e-4)
    assert tuple(a.conditional) == pytest.approx((616 / 1566, 255 / 616, 144 / 255))
    assert a.drafted == 3 * 1566


def test_no_drafts_is_nan_and_no_crash() -> None:
    a = acceptance.from_steps([0, 0], [0, 0], k=2)
    assert math.isnan(a.mean_length)
    assert math.isnan(a.rate)
    assert all(math.isnan(x) for x in (*a.per_position, *a.conditional))
    assert a.tokens_per_step == 1.0
    assert math.isnan(acceptance.pool([]).mean_length)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted), min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted), min_size=1, max_size=30),
)
def test_pooling_is_concatenating(first: list, second: list) -> None:
    def of(steps: list) -> acceptance.Acceptance:
        return acceptance.from_steps([d for _, d in steps], [a for a, _ in steps], k=4)

    assert acceptance.pool([of(first), of(second)]) == of(first + second)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted), min_size=1, max_size=50))
def test_rates_agree_with_a_count_over_steps(steps: list) -> None:
    a = acceptance.from_steps([d for _, d in steps], [a for a, _ in steps], k=4)
    drafting = [(taken, d) for taken, d in steps if d]
    for i in range(4):
        reach = [taken for taken, d in drafting if d > i and taken >= i]
        if reach:
            assert a.conditional[i] == pytest.approx(sum(t > i for t in reach) / len(reach))
    if drafting:
        assert a.mean_length == pytest.approx(sum(t + 1 for t, _ in drafting) / len(drafting))
        assert a.per_position.mean_length == pytest.approx(a.mean_length)


def test_the_two_kinds_of_rate_do_not_mix() -> None:
    a = acceptance.from_positions([8, 4], drafts=10)
    assert isinstance(a.per_position, acceptance.Unconditional)
    assert isinstance(a.conditional, acceptance.Conditional)
    assert a.per_position != acceptance.Conditional(a.per_position.values)
    for add in (operator.add, np.add, np.multiply):
        with pytest.raises(TypeError):
            add(a.per_position, a.conditional)
    for mixing in (lambda: a.per_position + a.conditional, lambda: a.per_position < a.conditional):
        with pytest.raises(TypeError):
            mixing()
    assert not hasattr(a.conditional, "mean_length")  # 1 + sum of c_i is the usual mistake
    assert tuple(a.conditional.unconditional()) == pytest.approx(tuple(a.per_position))


@pytest.mark.parametrize(
    "make",
    [
        lambda: acceptance.from_positions([0.8, 0.5], drafts=1),  # rates for counts
        lambda: acceptance.from_positions([5, 6], drafts=10),  # conditional counts rise
        lambda: acceptance.from_positions([11], drafts=10),
        lambda: acceptance.from_positions([5, 5], drafts=5, drafted=9),
        lambda: acceptance.from_steps([2], [3], k=5),
        lambda: acceptance.from_steps([6], [0], k=5),
    ],
)
def test_impossible_counts_are_refused(make) -> None:
    with pytest.raises(acceptance.Impossible):
        make()


def page(*, drafts: int, accepted: tuple[int, int], generated: int, requests: int, **shape) -> str:
    """A metrics page; shape: engines (the counts are split), total (suffix), created (a time)."""
    suffix = "_total" if shape.get("total", True) else ""
    engines = shape.get("engines", 1)
    lines = ["# HELP vllm:num_requests_running x", "# TYPE vllm:num_requests_running gauge"]
    lines.append('vllm:num_requests_running{engine="0"} 0')
    counts = {
        "vllm:spec_decode_num_drafts": drafts,
        "vllm:spec_decode_num_draft_tokens": 2 * drafts,
        "vllm:spec_decode_num_accepted_tokens": sum(accepted),
        "vllm:generation_tokens": generated,
    }
    for name, value in counts.items():
        lines += [f"# TYPE {name}{suffix} counter"] if suffix else []
        for engine in range(engines):
            share = value // engines + (value % engines if engine == 0 else 0)
            lines.append(f'{name}{suffix}{{engine="{engine}",model_name="m"}} {share}.0')
            if "created" in shape:
                lines.append(f'{name}_created{{engine="{engine}",model_name="m"}} {shape["created"]}')
    for position, value in enumerate(accepted):
        name = f"vllm:spec_decode_num_accepted_tokens_per_pos{suffix}"
        lines.append(f'{name}{{engine="0",model_name="m",position="{position}"}} {value}.0')
    for reason, value in {"stop": requests, "length": 0}.items():
        lines.append(f'vllm:request_success{suffix}{{engine="0",finished_reason="{reason}"}} {value}.0')
    return "\n".join(lines) + "\n"


BEFORE = {"drafts": 10, "accepted": (8, 4), "generated": 100, "requests": 5}
AFTER = {"drafts": 110, "accepted": (68, 34), "generated": 422, "requests": 7}


@pytest.mark.parametrize("shape", [{}, {"total": False}, {"engines": 3}, {"created": 1.7e9}])
def test_counters_of_every_shape(shape: dict) -> None:
    """With and without _total, several engines summed, _created left out (vllm#18053)."""
    a = acceptance.between(
        acceptance.snapshot(page(**BEFORE, **shape)),
        acceptance.snapshot(page(**AFTER, **shape)),
        expect_tokens=322,
    )
    assert (a.drafts, a.drafted, a.accepted_at) == (100, 200, (60, 30))
    assert a.mean_length == 1.9
    assert a.rate == 0.45
    # 322 tokens, 2 of them first tokens; 90 were accepted drafts, so 230 steps, 100 of them with a draft
    assert (a.tokens, a.steps) == (320, 230)
    assert a.tokens_per_step == pytest.approx(320 / 230)


def test_a_restart_in_between_is_an_error() -> None:
    old, new = acceptance.snapshot(page(**AFTER)), acceptance.snapshot(page(**BEFORE))
    with pytest.raises(acceptance.CountersReset):
        acceptance.between(old, new)
    began = [acceptance.snapshot(page(**counts, created=t)) for counts, t in ((BEFORE, 1.0), (AFTER, 2.0))]
    with pytest.raises(acceptance.CountersReset):
        acceptance.between(*began)


def test_foreign_traffic_is_an_error() -> None:
    with pytest.raises(acceptance.ForeignTraffic, match="322 tokens where this client was sent 300"):
        acceptance.between(*[acceptance.snapshot(page(**c)) for c in (BEFORE, AFTER)], expect_tokens=300)


def test_a_server_without_speculation() -> None:
    text = 'vllm:generation_tokens_total{engine="0"} 5\n'
    assert not acceptance.snapshot(text).speculates
    with pytest.raises(acceptance.NoCounters):
        acceptance.between(acceptance.snapshot(text), acceptance.snapshot(text))
    sglang = 'sglang:generation_tokens_total{model_name="m"} 7.0\nsglang:spec_accept_length{model_name="m"} 2.5\n'
    assert acceptance.snapshot(sglang).generated == 7
    with pytest.raises(acceptance.NoCounters, match="gauges"):
        acceptance.between(acceptance.snapshot(sglang), acceptance.snapshot(sglang))


def test_a_page_as_the_library_of_the_servers_writes_it() -> None:
    """prometheus_client's own output, _created series and the process's start included."""
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    labels = ["model_name", "engine"]
    drafts = prometheus_client.Counter("vllm:spec_decode_num_drafts", "x", labels, registry=registry)
    at = prometheus_client.Counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "x", [*labels, "position"], registry=registry
    )
    tokens = prometheus_client.Counter("vllm:generation_tokens", "x", labels, registry=registry)
    finished = prometheus_client.Counter("vllm:request_success", "x", labels, registry=registry)

    def now() -> acceptance.Counters:
        return acceptance.snapshot(prometheus_client.generate_latest(registry).decode())

    for engine in "01":
        for counter in (drafts, tokens, finished):
            counter.labels("m", engine)
        for position in "01":
            at.labels("m", engine, position)
    before = now()
    for engine in "01":
        drafts.labels("m", engine).inc(5)
        at.labels("m", engine, "0").inc(4)
        at.labels("m", engine, "1").inc(1)
        tokens.labels("m", engine).inc(12)
        finished.labels("m", engine).inc()
    found = acceptance.between(before, now(), expect_tokens=24)
    assert (found.drafts, found.accepted_at, found.mean_length) == (10, (8, 2), 2.0)
    assert (found.tokens, found.steps) == (22, 12)
    assert math.isnan(found.rate)  # this page counts no drafted tokens


def test_unreadable_pages() -> None:
    with pytest.raises(acceptance.Unreadable, match="no Prometheus text"):
        acceptance.snapshot("<html>not found</html>\n")
    with pytest.raises(acceptance.Unreadable, match=r"no metrics at http://127\.0\.0\.1:9/metrics"):
        acceptance.snapshot("http://127.0.0.1:9/v1")


def test_from_rows() -> None:
    rows = [
        {"drafts": 2, "drafted": 6, "accepted": 3, "accepted_at": [2, 1, 0], "chunks": 5, "tokens_total": 8},
        {"drafts": 0, "drafted": 0, "accepted": 0, "accepted_at": [0, 0, 0], "chunks": 3, "tokens_total": 3},
        {"error": "HTTP 500"},
    ]
    a = acceptance.from_rows(bench_rows.frame(rows))
    assert (a.drafts, a.drafted, a.accepted_at, a.steps, a.tokens) == (2, 6, (2, 1, 0), 6, 9)
    with pytest.raises(acceptance.NoCounters, match="--per-request-spec-decode-metrics"):
        acceptance.from_rows(bench_rows.frame(rows[2:]))


def test_table_names_its_sources() -> None:
    table = acceptance.table({"engine": acceptance.from_steps(**STEPS, k=3)})
    assert isinstance(table, pd.DataFrame)
    assert table.loc[0, ["source", "acceptance_length", "drafts", "steps"]].tolist() == ["engine", 2.0, 3, 4]


def engines(*drafts: int) -> str:
    """A page of several engines without any clock, as vLLM's API servers write it together."""
    return "".join(f'vllm:spec_decode_num_drafts_total{{engine="{i}"}} {n}\n' for i, n in enumerate(drafts))


@pytest.mark.parametrize("after", [(90, 1), (90,)])
def test_one_engine_of_several_that_began_anew_is_seen(after: tuple[int, ...]) -> None:
    """Their sum rose."""
    with pytest.raises(acceptance.CountersReset, match="engine': '1'"):
        acceptance.between(acceptance.parse(engines(5, 2)), acceptance.parse(engines(*after)))


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1"])
def test_a_counter_that_counts_nothing_is_unreadable(value: str) -> None:
    with pytest.raises(acceptance.Unreadable, match="no count"):
        acceptance.parse(f"vllm:spec_decode_num_drafts_total {value}\n")


@pytest.mark.parametrize(
    "make",
    [
        lambda: acceptance.from_positions([5, 4], drafts=10, eligible_at=[10, 3]),
        lambda: acceptance.from_positions([5, 4], drafts=10, eligible_at=[10]),
        lambda: acceptance.from_positions([math.nan], drafts=10),
        lambda: acceptance.from_steps([1, 2], [1], k=2),
    ],
)
def test_counts_that_do_not_fit_each_other_are_refused(make) -> None:
    with pytest.raises(acceptance.Impossible):
        make()
