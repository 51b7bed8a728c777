"""Retries, backoff and order."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.core.check import MAX_RETRIES, MAX_TIMEOUT
from penstock.core.job import (
    HEAD_START,
    RETRY_REQUESTED,
    Job,
    JobRequest,
    JobResult,
    Priority,
    RetryPolicy,
    backoff,
    may_retry,
    rank,
    ready_at,
    retry_of,
    run_limit,
)
from penstock.core.verdict import Constraints, Decision, SafetyVerdict
from penstock.lifecycles.canonical import JobState
from penstock.testing.samples import T0, a_job, a_request, failed

policies = st.builds(
    RetryPolicy,
    retries=st.integers(0, MAX_RETRIES),
    delay=st.floats(0, MAX_TIMEOUT),
    factor=st.floats(1, 1000),
    max_delay=st.floats(0, MAX_TIMEOUT),
    jitter=st.floats(0, 1),
)


def job_with(request: JobRequest) -> Job:
    return replace(a_job(state=JobState.RUNNING), request=request)


chances = st.floats(0, 1, exclude_max=True)
numbers = st.integers(1, MAX_RETRIES)


@given(policies, numbers, chances)
def test_a_backoff_is_finite_and_within_its_bounds(
    retry: RetryPolicy, number: int, chance: float
) -> None:
    delay = backoff(retry, number, chance)
    assert math.isfinite(delay)
    assert 0 <= delay <= retry.max_delay


@given(policies, numbers, chances)
def test_a_backoff_never_shrinks_from_one_retry_to_the_next(
    retry: RetryPolicy, number: int, chance: float
) -> None:
    assert backoff(retry, number, chance) <= backoff(retry, number + 1, chance)


@given(policies, numbers, chances)
def test_chance_takes_off_at_most_the_share_left_to_it(
    retry: RetryPolicy, number: int, chance: float
) -> None:
    full = backoff(retry, number, 0.0)
    assert backoff(retry, number, chance) >= full * (1 - retry.jitter) * (1 - 1e-9)


def test_a_backoff_doubles_by_default() -> None:
    retry = RetryPolicy(retries=5, delay=1.0, jitter=0.0)
    assert [backoff(retry, n, 0.5) for n in (1, 2, 3, 4)] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("status", "code", "kinds", "on", "never", "expected"),
    [
        (JobState.FAILED, "BOOM", (), (), (), True),
        (JobState.TIMEOUT, "TIMEOUT", (), (), (), True),
        (JobState.CANCELLED, "CANCELLED", (), (), (), False),
        (JobState.SUCCEEDED, None, (), (), (), False),
        (JobState.DENIED, "DENIED", (), (), (), False),
        (JobState.FAILED, "BOOM", (), ("BOOM",), (), True),
        (JobState.FAILED, "BOOM", (), ("OTHER",), (), False),
        (JobState.FAILED, "E", ("KeyError", "LookupError"), ("LookupError",), (), True),
        (JobState.FAILED, "E", ("KeyError", "LookupError"), (), ("LookupError",), False),
        (JobState.FAILED, "E", ("KeyError",), ("KeyError",), ("E",), False),
        (JobState.FAILED, RETRY_REQUESTED, (), ("OTHER",), (RETRY_REQUESTED,), True),
    ],
)
def test_which_endings_are_tried_again(
    status: JobState,
    code: str | None,
    kinds: tuple[str, ...],
    on: tuple[str, ...],
    never: tuple[str, ...],
    expected: bool,
) -> None:
    request = a_request(retry=RetryPolicy(retries=1, on=on, never=never))
    result = JobResult(job_id="a", status=status, error_code=code, error_kinds=kinds)
    assert may_retry(job_with(request), result) is expected


@pytest.mark.seed("001", "6.2")
@given(st.integers(0, 20), st.integers(0, 20))
def test_a_job_is_retried_as_often_as_its_policy_says(retries: int, number: int) -> None:
    request = a_request(retry=RetryPolicy(retries=retries), retry_number=number)
    assert may_retry(job_with(request), failed("a")) is (number < retries)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_safety_rules_may_allow_fewer_retries_and_never_more(
    retries: int, most: int, number: int
) -> None:
    request = a_request(retry=RetryPolicy(retries=retries), retry_number=number)
    verdict = SafetyVerdict(
        Decision.ALLOW_WITH_CONSTRAINTS, "r", "s", constraints=Constraints(max_retries=most)
    )
    job = replace(job_with(request), verdict=verdict)
    assert may_retry(job, failed("a")) is (number < min(retries, most))


def test_safety_rules_may_allow_a_shorter_run_and_never_a_longer_one() -> None:
    verdict = SafetyVerdict(
        Decision.ALLOW_WITH_CONSTRAINTS, "r", "s", constraints=Constraints(max_runtime=10.0)
    )
    for timeout, expected in ((7.0, 7.0), (30.0, 10.0), (None, 10.0)):
        job = replace(a_job(state=JobState.RUNNING, timeout=timeout), verdict=verdict)
        assert run_limit(job, 3600.0) == expected


@pytest.mark.seed("001", "6.7")
def test_a_retry_keeps_everything_but_its_id_its_link_and_its_time() -> None:
    job = a_job(
        state=JobState.RUNNING,
        labels={"k": "v"},
        tenant="t",
        idempotency_key="key",
        deadline=T0 + 50,
        retry=RetryPolicy(retries=3, delay=10, jitter=0),
        child_of="parent",
    )
    again = retry_of(job, failed("a"), "b", T0, 0.5)
    assert (again.job_id, again.parent_job_id, again.retry_number) == ("b", "a", 1)
    assert again.first_try == "a"
    assert again.run_at == T0 + 10
    assert again.idempotency_key is None
    assert (again.labels, again.tenant, again.deadline) == ({"k": "v"}, "t", T0 + 50)
    assert again.child_of == "parent"
    assert retry_of(replace(job, request=again), failed("b"), "c", T0, 0.5).first_try == "a"


def test_a_job_may_name_the_time_of_its_retry() -> None:
    job = a_job(state=JobState.RUNNING, retry=RetryPolicy(retries=1, delay=10))
    assert retry_of(job, failed("a", retry_after=0.0), "b", T0, 0.0).run_at == T0
    assert retry_of(job, failed("a", retry_after=7.0), "b", T0, 0.0).run_at == T0 + 7


def test_a_job_is_ready_when_it_was_accepted_or_at_its_time() -> None:
    assert ready_at(a_request(), T0) == T0
    assert ready_at(a_request(run_at=T0 - 5), T0) == T0
    assert ready_at(a_request(run_at=T0 + 5), T0) == T0 + 5


@given(st.sampled_from(Priority), st.sampled_from(Priority), st.floats(0, 1e5), st.floats(0, 1e5))
def test_an_older_job_is_overtaken_only_within_the_others_head_start(
    old: Priority, new: Priority, age: float, later: float
) -> None:
    first = rank(a_request(priority=old), T0 + age)
    second = rank(a_request(priority=new), T0 + age + later)
    if later > HEAD_START[new]:
        assert first <= second


@pytest.mark.seed("001", "1.3")
def test_priorities_go_before_each_other_in_order() -> None:
    order = [Priority.CRITICAL, Priority.INTERACTIVE, Priority.BATCH]
    ranks = [rank(a_request(priority=priority), T0) for priority in order]
    assert ranks == sorted(ranks)
