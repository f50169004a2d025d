"""Host time stays a small part of a step: plan, pack and commit under 10 us of CPU a row at 256 rows; the prefix cache
under 0.5 us a prompt token where nothing hits. Best of 5."""

import pytest
from benchmarks.step_cost import measure, measure_prefix

from tests.witness import witness

pytestmark = pytest.mark.alone


def test_host_time_a_row() -> None:
    parts = measure(num_rows=256, num_steps=60, repeats=5)
    total = sum(parts.values())
    assert total < 10.0, parts
    witness("host-time", microseconds_a_row=round(total, 2), **{name: round(value, 2) for name, value in parts.items()})


def test_prefix_cache_a_prompt_token() -> None:
    cost = measure_prefix()
    assert cost < 0.5, cost
    witness("prefix-cost", microseconds_a_token=round(cost, 3))
