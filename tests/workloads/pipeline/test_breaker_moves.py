"""How a circuit breaker moves, by itself."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.core.errors import Misconfigured
from penstock.workloads.pipeline.breakers import (
    BreakerSettings,
    Passage,
    failed,
    given_back,
    let_pass,
    reset,
    succeeded,
)
from penstock.workloads.pipeline.records import Breaker, BreakerState

T = 1_000.0
CLOSED = Breaker(name="b", threshold=3, cooldown=10.0)


def open_at(now: float, **settings: float) -> Breaker:
    breaker = replace(CLOSED, **settings)
    for _ in range(breaker.threshold):
        breaker = failed(breaker, now)
    assert breaker.state is BreakerState.OPEN
    return breaker


# -- closed -------------------------------------------------------------------------------


def test_it_opens_at_the_threshold_and_not_before() -> None:
    breaker = CLOSED
    for count in (1, 2):
        breaker = failed(breaker, T)
        assert (breaker.state, breaker.failures) == (BreakerState.CLOSED, count)
        assert let_pass(breaker, T).passage is Passage.PASS
    breaker = failed(breaker, T + 1)
    assert (breaker.state, breaker.opened_at) == (BreakerState.OPEN, T + 1)


def test_a_success_between_failures_starts_the_count_again() -> None:
    breaker = succeeded(failed(failed(CLOSED, T), T), T)
    assert breaker.failures == 0
    assert failed(failed(breaker, T), T).state is BreakerState.CLOSED


def test_a_success_of_a_quiet_breaker_is_no_move() -> None:
    assert succeeded(CLOSED, T) is CLOSED


# -- open ---------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [0.0, 5.0, 9.999])
def test_an_open_breaker_lets_nobody_pass_until_it_has_cooled(later: float) -> None:
    breaker = open_at(T)
    decision = let_pass(breaker, T + later)
    assert (decision.passage, decision.until) == (Passage.NOT, T + 10)
    assert decision.breaker is breaker


def test_the_cool_down_is_measured_from_the_last_failure() -> None:
    breaker = failed(open_at(T), T + 8)
    assert let_pass(breaker, T + 10).until == T + 18
    assert let_pass(breaker, T + 18).passage is Passage.TRIAL


def test_a_late_success_of_a_call_from_before_does_not_close_it() -> None:
    breaker = open_at(T)
    assert succeeded(breaker, T + 1) is breaker


def test_a_clock_set_far_back_does_not_keep_it_open() -> None:
    breaker = open_at(T)
    assert let_pass(breaker, T - 5_000).passage is Passage.TRIAL
    assert let_pass(breaker, T - 3).until == T + 10


# -- half open ----------------------------------------------------------------------------


def test_a_cooled_breaker_lets_one_trial_pass_and_the_rest_wait_for_it() -> None:
    first = let_pass(open_at(T), T + 10)
    assert (first.passage, first.breaker.state) == (Passage.TRIAL, BreakerState.HALF_OPEN)
    second = let_pass(first.breaker, T + 11)
    assert (second.passage, second.until) == (Passage.NOT, first.until)


def test_as_many_trials_as_it_is_set_to_pass_at_once() -> None:
    breaker = open_at(T, trials=3)
    for _ in range(3):
        decision = let_pass(breaker, T + 10)
        assert decision.passage is Passage.TRIAL
        breaker = decision.breaker
    assert let_pass(breaker, T + 10).passage is Passage.NOT


def test_who_is_kept_out_is_told_when_the_first_trial_lapses() -> None:
    one = let_pass(open_at(T, trials=2), T + 10)
    two = let_pass(one.breaker, T + 13)
    assert let_pass(two.breaker, T + 14).until == one.until == T + 20


def test_a_trial_that_succeeds_closes_it_and_zeroes_its_failures() -> None:
    trial = let_pass(open_at(T), T + 10)
    breaker = succeeded(trial.breaker, T + 11, trial.until)
    assert breaker == replace(CLOSED, version=breaker.version)


@pytest.mark.seed("002", "8.19")
def test_a_trial_that_fails_opens_it_again_for_a_whole_cool_down_and_then_it_is_tried_again() -> (
    None
):
    trial = let_pass(open_at(T), T + 10)
    breaker = failed(trial.breaker, T + 12, trial.until)
    assert (breaker.state, breaker.trial_until) == (BreakerState.OPEN, ())
    assert let_pass(breaker, T + 21.9).until == T + 22
    again = let_pass(breaker, T + 22)
    assert again.passage is Passage.TRIAL
    assert succeeded(again.breaker, T + 23, again.until).state is BreakerState.CLOSED


def test_a_trial_that_says_nothing_gives_its_slot_to_the_next() -> None:
    trial = let_pass(open_at(T), T + 10)
    breaker = given_back(trial.breaker, T + 11, trial.until)
    assert breaker.state is BreakerState.HALF_OPEN
    assert let_pass(breaker, T + 11).passage is Passage.TRIAL


@pytest.mark.parametrize(("timeout", "lapse"), [(None, 10.0), (4.0, 10.0), (60.0, 60.0)])
def test_a_trial_whose_process_died_lapses_after_cool_down_or_call_timeout(
    timeout: float | None, lapse: float
) -> None:
    trial = let_pass(open_at(T), T + 10, timeout)
    assert trial.until == T + 10 + lapse
    assert let_pass(trial.breaker, T + 10 + lapse - 0.1).passage is Passage.NOT
    assert let_pass(trial.breaker, T + 10 + lapse).passage is Passage.TRIAL


def test_a_trial_slower_than_its_lapse_still_closes_the_breaker() -> None:
    slow = let_pass(open_at(T), T + 10)
    other = let_pass(slow.breaker, T + 20)
    assert other.passage is Passage.TRIAL
    assert slow.until not in other.breaker.trial_until
    assert succeeded(other.breaker, T + 25, slow.until).state is BreakerState.CLOSED


def test_a_call_from_before_the_opening_decides_nothing_while_a_trial_is_under_way() -> None:
    trial = let_pass(open_at(T), T + 10)
    assert failed(trial.breaker, T + 11) is trial.breaker
    assert succeeded(trial.breaker, T + 11) is trial.breaker


def test_of_two_trials_a_failure_first_keeps_it_open_and_the_other_keeps_its_slot() -> None:
    one = let_pass(open_at(T, trials=2), T + 10)
    two = let_pass(one.breaker, T + 10.5)
    breaker = failed(two.breaker, T + 11, one.until)
    assert breaker.trial_until == (two.until,)
    breaker = succeeded(breaker, T + 12, two.until)
    assert (breaker.state, breaker.trial_until) == (BreakerState.OPEN, ())


def test_of_two_trials_a_success_first_closes_it_and_a_failure_then_counts_as_one() -> None:
    one = let_pass(open_at(T, trials=2), T + 10)
    two = let_pass(one.breaker, T + 10.5)
    breaker = failed(succeeded(two.breaker, T + 11, one.until), T + 12, two.until)
    assert (breaker.state, breaker.failures) == (BreakerState.CLOSED, 1)


def test_without_a_cool_down_a_trial_still_holds_its_slot() -> None:
    trial = let_pass(open_at(T, cooldown=0.0), T)
    assert trial.passage is Passage.TRIAL
    assert let_pass(trial.breaker, T).passage is Passage.NOT


# -- by hand ------------------------------------------------------------------------------


def test_a_reset_closes_it_from_any_state_and_is_always_a_move() -> None:
    half = let_pass(open_at(T), T + 10).breaker
    for breaker in (CLOSED, failed(CLOSED, T), open_at(T), half):
        closed = reset(breaker)
        assert closed == replace(CLOSED, version=breaker.version + 1)


def test_settings_are_taken_over_without_a_move() -> None:
    settings = BreakerSettings(threshold=9, cooldown=1.0, trials=2)
    breaker = settings.apply(CLOSED)
    assert (breaker.threshold, breaker.cooldown, breaker.trials) == (9, 1.0, 2)
    assert breaker.version == CLOSED.version
    assert settings.apply(breaker) is breaker


@pytest.mark.parametrize(
    "given",
    [
        {"threshold": 0},
        {"trials": 0},
        {"cooldown": -1},
        {"cooldown": math.nan},
        {"cool_down": 3},
        {"threshold": "5"},
    ],
)
def test_settings_that_make_no_sense_are_refused_by_the_breakers_name(
    given: dict[str, float],
) -> None:
    with pytest.raises(Misconfigured, match="breaker feeds"):
        BreakerSettings.of("feeds", given)


def test_settings_come_from_what_a_pipeline_says() -> None:
    assert BreakerSettings.of("feeds", {"threshold": 2, "cooldown": 5}) == BreakerSettings(
        threshold=2, cooldown=5.0
    )


# -- whatever happens ---------------------------------------------------------------------


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.floats(0, 30),
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "succeed", "fail", "give back", "die"]),
            st.floats(0, 15),
            st.integers(0, 5),
        ),
        max_size=60,
    ),
)
def test_whatever_happens_slots_come_back_and_versions_grow_by_one(
    threshold: int, trials: int, cooldown: float, steps: list[tuple[str, float, int]]
) -> None:
    breaker = Breaker(name="b", threshold=threshold, trials=trials, cooldown=cooldown)
    now, under_way = T, list[float | None]()
    ends = {"succeed": succeeded, "fail": failed, "give back": given_back}
    for what, pause, which in steps:
        now += pause
        before = breaker
        if what == "ask":
            decision = let_pass(breaker, now)
            breaker = decision.breaker
            if decision.passage is Passage.NOT:
                assert decision.until is not None
                assert decision.until > now
                assert breaker is before
            else:
                under_way.append(decision.until)
        elif under_way:
            trial = under_way.pop(which % len(under_way))
            if what != "die":
                breaker = ends[what](breaker, now, trial)
        assert breaker.version == before.version + (breaker is not before)
        assert len([until for until in breaker.trial_until if until > now]) <= trials
        assert (breaker.state is BreakerState.CLOSED) == (breaker.failures < threshold)
        assert (breaker.state is BreakerState.CLOSED) == (breaker.opened_at is None)
    # Everybody is gone: it is always tried again, and a success then closes it.
    later = now + 1_000
    decision = let_pass(breaker, later)
    assert decision.passage is not Passage.NOT
    if decision.passage is Passage.TRIAL:
        closed = succeeded(decision.breaker, later, decision.until)
        assert (closed.state, closed.trial_until) == (BreakerState.CLOSED, ())
