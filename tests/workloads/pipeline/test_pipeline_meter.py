"""Rates and ETAs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.testing.clock import VirtualClock
from penstock.workloads.pipeline.run_log import RateMeter

WINDOW = 10.0


def steadily(
    meter: RateMeter, clock: VirtualClock, rate: float, seconds: float, done: int = 0
) -> int:
    for _ in range(round(rate * seconds)):
        clock.advance(1 / rate)
        done += 1
        meter.mark(done)
    return done


def test_before_anything_is_done_nothing_can_be_told() -> None:
    clock = VirtualClock()
    meter = RateMeter(clock)
    assert (meter.rate(), meter.eta(10)) == (None, None)
    meter.mark(0)
    clock.advance(5)
    assert (meter.rate(), meter.eta(10)) == (None, None)


def test_what_is_done_in_no_time_has_no_rate() -> None:
    meter = RateMeter(VirtualClock())
    meter.mark(5)
    assert meter.rate() is None


def test_the_rest_takes_as_long_as_the_rate_says() -> None:
    clock = VirtualClock()
    meter = RateMeter(clock)
    done = steadily(meter, clock, rate=50, seconds=4)
    assert meter.rate() == pytest.approx(50)
    assert meter.eta(done + 100) == pytest.approx(2)


def test_a_stage_that_is_done_has_no_time_left() -> None:
    meter = RateMeter(VirtualClock(), done=3)
    assert meter.eta(3) == 0
    assert meter.eta(2) == 0


def test_a_change_of_speed_shows_within_the_window() -> None:
    clock = VirtualClock()
    meter = RateMeter(clock)
    done = steadily(meter, clock, rate=100, seconds=60)
    steadily(meter, clock, rate=10, seconds=WINDOW + 1, done=done)
    assert meter.rate() == pytest.approx(10, rel=0.05)


def test_a_stage_slower_than_the_window_still_has_a_rate() -> None:
    clock = VirtualClock()
    meter = RateMeter(clock)
    for done in (1, 2, 3):
        clock.advance(60)
        meter.mark(done)
    assert meter.rate() == pytest.approx(1 / 60)
    clock.advance(30)
    assert meter.rate() == pytest.approx(1 / 90)
    assert meter.eta(4) == pytest.approx(90)


def test_a_stall_lowers_the_rate_without_end() -> None:
    clock = VirtualClock()
    meter = RateMeter(clock)
    steadily(meter, clock, rate=10, seconds=20)
    rates = []
    for _ in range(6):
        clock.advance(30)
        rates.append(meter.rate() or 0.0)
    assert all(rate > 0 for rate in rates)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.1


def test_what_a_run_before_has_done_says_nothing_of_the_speed_now() -> None:
    clock = VirtualClock()
    meter = RateMeter(clock, done=1_000)
    clock.advance(2)
    meter.mark(1_004)
    assert meter.rate() == pytest.approx(2)
    assert meter.eta(1_010) == pytest.approx(3)


def test_a_wall_clock_that_is_set_changes_nothing() -> None:
    clock = VirtualClock()
    meter = RateMeter(clock)
    clock.advance(1)
    meter.mark(10)
    clock.jump(-7_200)
    assert meter.rate() == pytest.approx(10)


def test_a_fast_stage_keeps_few_marks() -> None:
    clock = VirtualClock()
    meter = RateMeter(clock)
    steadily(meter, clock, rate=2_000, seconds=15)
    assert len(meter._marks) < 60


@given(st.floats(0.01, 1_000), st.integers(2, 400), st.integers(1, 10_000))
def test_a_steady_stage_has_a_steady_rate_and_an_exact_eta(
    rate: float, count: int, rest: int
) -> None:
    clock = VirtualClock()
    meter = RateMeter(clock)
    done = steadily(meter, clock, rate, count / rate)
    assert meter.rate() == pytest.approx(rate, rel=1e-3)
    assert meter.eta(done + rest) == pytest.approx(rest / rate, rel=1e-3)


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(0, 1_000)), max_size=60))
def test_rate_and_eta_are_never_negative(steps: list[tuple[float, int]]) -> None:
    clock = VirtualClock()
    meter = RateMeter(clock)
    done = 0
    for pause, more in steps:
        clock.advance(pause)
        done += more
        meter.mark(done)
        assert (meter.rate() or 0) >= 0
        assert (meter.eta(done + 5) or 0) >= 0
