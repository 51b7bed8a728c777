"""How a result becomes a move."""

from __future__ import annotations

import pytest

from penstock.control.intake import ending
from penstock.core.job import IdSource, JobResult, RetryPolicy
from penstock.core.ledger import ChangeOutcome, advance
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.testing.samples import T0, a_job, failed, move, succeeded

RETRY = RetryPolicy(retries=1, delay=4, jitter=0)


@pytest.mark.parametrize(
    ("status", "event"),
    [
        (JobState.SUCCEEDED, JobEvent.SUCCEED),
        (JobState.FAILED, JobEvent.FAIL),
        (JobState.TIMEOUT, JobEvent.EXPIRE),
        (JobState.CANCELLED, JobEvent.CANCEL),
    ],
)
def test_each_status_ends_a_running_job_in_its_state(status: JobState, event: JobEvent) -> None:
    job = a_job(state=JobState.RUNNING)
    result = JobResult(job_id="a", status=status, attempt=1, worker_id="w1")
    made = ending(job, result, T0, IdSource(), 0.0)
    assert made.events == (event,)
    answer = advance(job, made)
    assert answer.verdict is ChangeOutcome.MOVED
    assert answer.job is not None
    assert (answer.job.state, answer.job.result) == (status, result)


def test_the_attempt_of_the_result_is_the_fence() -> None:
    job = a_job(state=JobState.DISPATCHED)
    second = advance(job, move("a", JobEvent.REDISPATCH)).job
    assert second is not None
    stale = ending(second, succeeded("a", attempt=1), T0, IdSource(), 0.0)
    assert advance(second, stale).verdict is ChangeOutcome.REFUSED


def test_a_failure_brings_its_retry_in_the_same_move() -> None:
    job = a_job(state=JobState.RUNNING, retry=RETRY)
    made = ending(job, failed("a", attempt=1), T0, IdSource(), 0.0)
    (again,) = made.then
    assert again.request.parent_job_id == "a"
    assert again.request.run_at == T0 + 4
    assert again.fresh
    answer = advance(job, made)
    assert answer.job is not None
    assert answer.job.successor == again.request.job_id
    assert again.request.job_id in answer.transitions[-1].reason


@pytest.mark.parametrize(
    "result",
    [
        succeeded("a", attempt=1),
        JobResult(job_id="a", status=JobState.CANCELLED, attempt=1),
    ],
)
def test_a_success_or_a_cancel_brings_none(result: JobResult) -> None:
    job = a_job(state=JobState.RUNNING, retry=RETRY)
    assert ending(job, result, T0, IdSource(), 0.0).then == ()


def test_a_job_that_was_asked_to_end_is_not_retried() -> None:
    job = advance(a_job(state=JobState.RUNNING, retry=RETRY), move("a", JobEvent.REQUEST_CANCEL))
    assert ending(job.job, failed("a", attempt=1), T0, IdSource(), 0.0).then == ()


def test_a_job_that_is_asked_to_end_while_its_retry_is_on_the_way_is_not_retried() -> None:
    """The cancel may be committed between this decision and its own commit."""
    running = a_job(state=JobState.RUNNING, retry=RETRY)
    made = ending(running, failed("a", attempt=1), T0, IdSource(), 0.0)
    asked = advance(running, move("a", JobEvent.REQUEST_CANCEL)).job
    assert asked is not None
    answer = advance(asked, made)
    assert answer.job is not None
    assert answer.job.state is JobState.FAILED
    assert answer.job.successor is None


def test_a_result_for_a_job_nobody_holds_is_a_move_without_retry() -> None:
    made = ending(None, failed("gone", attempt=3), T0, IdSource(), 0.0)
    assert (made.job_id, made.attempt, made.then) == ("gone", 3, ())


def test_the_reason_tells_the_error_in_short() -> None:
    job = a_job(state=JobState.RUNNING)
    made = ending(job, failed("a", error_message="x" * 1000, attempt=1), T0, IdSource(), 0.0)
    assert made.reason.startswith("BOOM: xxx")
    assert len(made.reason) < 250
