"""The reader of metrics pages against damage by chance: counters or a LabError, and an end."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import acceptance
from labkit.errors import LabError
from tests.faults import figures
from tests.faults.fuzzing import LIMIT_S, STRUCTURED, parts, share
from tests.faults.mutations import Mutator, ends_within

PAGE = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 17.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 51.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 8.0
vllm:generation_tokens_total{engine="0",model_name="a\\"b\\\\c\\n"} 40.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 3.0
process_start_time_seconds 1.7e+09
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3"} 0.0
"""
SGLANG = "sglang:spec_verify_calls_total 4.0\nsglang:generation_tokens_total 9\nsglang:spec_accept_length 1.9\n"


def read_page(text: str, before: acceptance.Counters) -> None:
    """A page to counters, and to what happened since an earlier one."""
    try:
        found = acceptance.parse(text)
        assert found.generated >= 0
        made = acceptance.between(before, found)
        assert math.isnan(made.mean_length) or made.mean_length >= 0
    except LabError:
        return


@parts
def test_pages_of_metrics(part: int) -> None:
    mutator = Mutator([PAGE.encode(), SGLANG.encode()], part)
    before = acceptance.parse(PAGE.replace("17.0", "10.0").replace("51.0", "30.0"))
    for _ in range(share("pages of metrics")):
        data = mutator.draw()
        with ends_within(LIMIT_S, data):
            read_page(data.decode("utf-8", "replace"), before)


@pytest.mark.parametrize("digits", [25, 400, 5000])
def test_a_count_of_many_digits_is_none(digits: int) -> None:
    """What the soak found: whole numbers come as such from the parser, and a float cannot show them."""
    with pytest.raises(acceptance.Unreadable):
        acceptance.parse("vllm:request_success_total " + "9" * digits)


NAMES = st.sampled_from(
    ["vllm:spec_decode_num_drafts_total", "sglang:spec_verify_calls", "vllm:request_success", "x"]
)
LINE = st.tuples(NAMES, st.text(max_size=12), st.floats().map(str) | st.text(max_size=8)).map(
    lambda drawn: f"{drawn[0]}{{{drawn[1]}}} {drawn[2]}"
)


@given(st.lists(LINE | st.text(max_size=20), max_size=6))
@STRUCTURED
def test_pages_of_any_lines(lines: list[str]) -> None:
    figures.DONE["fuzzed pages of metrics"] += 1
    read_page(PAGE + "\n".join(lines), acceptance.parse(PAGE))


def test_the_whole_page_is_read() -> None:
    """What the damage is done to is sound."""
    assert acceptance.parse(PAGE).drafts == 17
