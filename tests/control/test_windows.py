"""A rate is kept exactly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.control.limits import Window
from penstock.core.verdict import Rate

steps = st.lists(st.sampled_from([0.0, 0.001, 0.3, 1.0, 4.99, 5.0, 12.0]), max_size=200)


@given(st.integers(1, 6), st.sampled_from([1.0, 5.0]), steps)
def test_in_no_stretch_of_time_do_more_go_than_the_rate_says(
    count: int, per: float, pauses: list[float]
) -> None:
    window, rate, at, went = Window(), Rate(count, per), 100.0, []
    for pause in pauses:
        at += pause
        if window.room(rate, at) > 0:
            window.spend(rate, at)
            went.append(at)
    for start in went:
        assert sum(start <= other < start + per for other in went) <= count


@given(st.integers(1, 6), steps)
def test_whoever_waits_until_it_opens_may_go_then(count: int, pauses: list[float]) -> None:
    window, rate, at = Window(), Rate(count, 5.0), 0.0
    for pause in pauses:
        at = max(at + pause, window.opens(rate, at))
        assert window.room(rate, at) > 0
        window.spend(rate, at)


def test_all_of_them_may_come_at_once() -> None:
    window, rate = Window(), Rate(1000, 60.0)
    for left in range(1000, 0, -1):
        assert window.room(rate, 7.0) == left
        window.spend(rate, 7.0)
    assert window.room(rate, 66.9) == 0
    assert window.opens(rate, 7.0) == 67.0
    assert window.room(rate, 67.0) == 1000


def test_a_window_that_much_goes_through_stays_small() -> None:
    window, rate = Window(), Rate(100_000, 3600.0)
    for n in range(100_000):
        window.spend(rate, n * 0.036)
    assert window.room(rate, 3599.0) == 0
    assert len(window._went) <= 1100


def test_a_slower_rate_holds_for_what_went_before_it_was_set() -> None:
    window = Window()
    for _ in range(5):
        window.spend(Rate(10, 60.0), 0.0)
    assert window.room(Rate(2, 60.0), 1.0) == -3
    assert window.opens(Rate(2, 60.0), 1.0) == 60.0
