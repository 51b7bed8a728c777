"""Whose turn it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.job import HEAD_START, Priority
from penstock.workloads.spool.disk.workspace import order_of, turn_of

NOW = 1_736_700_000.0
numbers = st.integers(0, 1_000_000)
ids = st.builds(
    lambda seconds, pid, counter: f"{seconds}_{pid}_{counter}",
    st.integers(int(NOW) - 10_000_000, int(NOW)),
    numbers,
    numbers,
)


@pytest.mark.seed("004", "3.10")
@given(ids, ids, st.sampled_from(Priority))
def test_within_a_priority_the_order_is_that_of_the_ids(
    one: str, other: str, priority: Priority
) -> None:
    before = turn_of(one, priority, NOW) < turn_of(other, priority, NOW)
    assert before == (order_of(one) < order_of(other))


@pytest.mark.seed("004", "13.11")
@given(ids, ids)
def test_an_urgent_job_overtakes_only_those_that_came_within_its_head_start(
    batch: str, urgent: str
) -> None:
    first = turn_of(urgent, Priority.INTERACTIVE, NOW) < turn_of(batch, Priority.BATCH, NOW)
    gap = (order_of(urgent)[0] - order_of(batch)[0]) / 1e6
    if gap != HEAD_START[Priority.INTERACTIVE]:
        assert first == (gap < HEAD_START[Priority.INTERACTIVE])


def test_an_id_from_the_far_future_is_not_put_off_for_ever() -> None:
    odd = turn_of("9" * 20, Priority.BATCH, NOW)
    assert odd < turn_of(f"{int(NOW) + 3 * 86_400}_1_0", Priority.BATCH, NOW + 3 * 86_400)
    assert odd > turn_of(f"{int(NOW)}_1_0", Priority.BATCH, NOW)
