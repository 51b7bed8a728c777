"""The order of job ids is total, numeric and chronological across both forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workloads.spool.disk.workspace import is_job_id, order_of

_ids = st.from_regex(r"[0-9]{1,20}(_[0-9]{1,10}){0,4}", fullmatch=True)
_micros = st.integers(10**14, 10**16)
_pids = st.integers(1, 4_194_304)
_counters = st.integers(0, 999_999)


def _seconds_form(micros: int, pid: int, counter: int) -> str:
    return f"{micros // 1_000_000}_{pid}_{counter}"


def _padded_form(micros: int, pid: int, counter: int) -> str:
    return f"{micros:020}_{pid}_{counter:06}"


@given(_ids, _ids)
def test_two_ids_are_never_equal_in_order(one: str, other: str) -> None:
    assert (order_of(one) == order_of(other)) == (one == other)


@pytest.mark.seed("004", "9.3")
@given(_micros, _micros, _pids, _pids, _counters, _counters)
def test_of_two_seconds_the_earlier_is_first_whatever_the_form(
    a: int, b: int, pid: int, other: int, counter: int, another: int
) -> None:
    first, second = sorted((a, b))
    if first // 1_000_000 == second // 1_000_000:
        second += 1_000_000
    for early in (_seconds_form, _padded_form):
        for late in (_seconds_form, _padded_form):
            assert order_of(early(first, pid, counter)) < order_of(late(second, other, another))


@given(_micros, _pids, st.lists(_counters, unique=True, min_size=2))
def test_a_process_s_jobs_sort_by_its_counter(micros: int, pid: int, counters: list[int]) -> None:
    ids = [_seconds_form(micros, pid, counter) for counter in counters]
    ordered = [int(one.rsplit("_", 1)[1]) for one in sorted(ids, key=order_of)]
    assert ordered == sorted(counters)


@given(st.text(max_size=140))
def test_every_text_is_an_id_or_not_and_no_id_leaves_its_folder(text: str) -> None:
    if is_job_id(text):
        assert text.isascii()
        assert not set(text) & set("/.\0\n")
        order_of(text)
