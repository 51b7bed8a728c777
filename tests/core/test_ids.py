"""Generated ids are unique, sort by time, and are acceptable as job ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.check import check_id
from penstock.core.job import IdSource
from penstock.testing.samples import T0

MOMENTS = st.lists(st.floats(0, 2**40, allow_nan=False), min_size=2, max_size=50)


@given(MOMENTS)
def test_ids_sort_as_they_were_made_even_if_the_clock_jumps(moments: list[float]) -> None:
    source = IdSource()
    ids = [source.next(now) for now in moments]
    assert ids == sorted(set(ids))


def test_ids_of_one_moment_are_unique_and_sorted() -> None:
    source = IdSource()
    ids = [source.next(T0) for _ in range(10_000)]
    assert ids == sorted(set(ids))


def test_a_millisecond_that_began_at_its_end_still_has_room() -> None:
    source = IdSource(entropy=lambda: (1 << 79) - 1)
    first, second = source.next(T0), source.next(T0)
    assert first < second


def test_two_sources_do_not_meet() -> None:
    one, two = IdSource(), IdSource()
    assert not {one.next(T0) for _ in range(1000)} & {two.next(T0) for _ in range(1000)}


@given(st.floats(0, 2**40, allow_nan=False))
def test_an_id_is_a_valid_job_id_of_26_characters(now: float) -> None:
    made = IdSource().next(now)
    check_id("job_id", made)
    assert len(made) == 26
    assert made == made.lower()


def test_an_id_tells_its_millisecond() -> None:
    earlier, later = IdSource().next(T0), IdSource().next(T0 + 0.001)
    assert earlier[:10] < later[:10]
    assert IdSource().next(T0)[:10] == earlier[:10]
