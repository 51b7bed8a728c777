"""What a function can be held to, and what it is refused for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from penstock.core.job import Job, JobRequest, JobResult, RetryPolicy, may_retry
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Task
from penstock.testing.aio import run_async
from penstock.testing.context import RecordingContext
from penstock.workloads.function.definition import make_function
from penstock.workloads.function.executor import FunctionExecutor
from penstock.workloads.function.options import Mode
from penstock.workloads.function.outcomes import is_offline, memory_within, refusal

ASYNC, THREAD, PROCESS = Mode
SEEN_TO_BY_OTHERS = Constraints(max_runtime=1, max_retries=0, max_concurrent=1, max_output=1)


@pytest.mark.parametrize(
    ("constraints", "mode", "platform"),
    [
        (Constraints(), ASYNC, "linux"),
        (Constraints(), THREAD, "darwin"),
        (SEEN_TO_BY_OTHERS, ASYNC, "darwin"),
        (SEEN_TO_BY_OTHERS, THREAD, "linux"),
        (Constraints(max_memory=1, network=()), PROCESS, "linux"),
    ],
)
def test_what_can_be_enforced_is_not_refused(
    constraints: Constraints, mode: Mode, platform: str
) -> None:
    assert refusal(constraints, mode, platform) is None


@pytest.mark.parametrize(
    ("constraints", "mode", "platform", "said"),
    [
        (Constraints(max_memory=1), ASYNC, "linux", ("max_memory", "async mode", "process mode")),
        (Constraints(max_memory=1), THREAD, "linux", ("max_memory", "thread mode", "'process'")),
        (Constraints(network=()), ASYNC, "linux", ("network = []", "async mode", "'process'")),
        (Constraints(network=()), THREAD, "linux", ("network = []", "thread mode", "'process'")),
        (Constraints(max_memory=1), PROCESS, "darwin", ("max_memory", "process mode", "Linux")),
        (Constraints(network=()), PROCESS, "darwin", ("network = []", "process mode", "Linux")),
        (Constraints(network=("a.b",)), PROCESS, "linux", ("network = ['a.b']", "empty list")),
        (Constraints(network=("a.b",)), THREAD, "linux", ("network = ['a.b']", "empty list")),
        (Constraints(read_only=True), PROCESS, "linux", ("read_only", "process mode", "approval")),
        (Constraints(read_only=True), ASYNC, "linux", ("read_only", "async mode", "approval")),
    ],
)
def test_a_refusal_names_the_constraint_and_the_mode_and_what_would_help(
    constraints: Constraints, mode: Mode, platform: str, said: tuple[str, ...]
) -> None:
    outcome = refusal(constraints, mode, platform)
    assert outcome is not None
    assert (outcome.status, outcome.error_code) == (JobState.FAILED, "CONSTRAINT_NOT_ENFORCED")
    assert [word for word in said if word not in (outcome.error_message or "")] == []


@pytest.mark.parametrize(
    ("own", "rules", "least"),
    [(None, None, None), (5, None, 5), (None, 5, 5), (5, 7, 5), (7, 5, 5), (None, 0, 0)],
)
def test_the_lower_limit_of_memory_counts(
    own: int | None, rules: int | None, least: int | None
) -> None:
    assert memory_within(own, Constraints(max_memory=rules)) == least


def test_only_an_empty_list_of_hosts_means_no_network() -> None:
    demands = (None, Constraints(), Constraints(network=("a.b",)), Constraints(network=()))
    assert [is_offline(each) for each in demands] == [False, False, False, True]


def _functions(called: list[str]) -> dict[str, Callable[[], Any]]:
    async def in_the_loop() -> None:
        called.append("async")

    def in_a_thread() -> None:
        called.append("thread")

    return {"job.async": in_the_loop, "job.thread": in_a_thread}


@pytest.mark.parametrize("topic", ["job.async", "job.thread"])
@pytest.mark.parametrize(
    "constraints",
    [
        Constraints(network=()),
        Constraints(network=("a.b",)),
        Constraints(max_memory=1 << 40),
        Constraints(read_only=True),
    ],
)
@run_async
async def test_a_function_that_can_t_be_held_to_its_constraints_is_never_called(
    topic: str, constraints: Constraints
) -> None:
    called: list[str] = []
    made = {name: make_function(fn, name, _nobody) for name, fn in _functions(called).items()}
    executor = FunctionExecutor(made)
    request = JobRequest(job_id="j", topic=topic)
    try:
        task = Task(request, 1, b"{}", math.inf, constraints)
        outcome = await executor.run(task, RecordingContext(request))
        assert outcome.error_code == "CONSTRAINT_NOT_ENFORCED"
        assert called == []
        await executor.run(Task(request, 1, b"{}", math.inf, Constraints()), RecordingContext())
        assert called == [topic.removeprefix("job.")]
    finally:
        await executor.close()


def _nobody() -> Any:
    raise AssertionError


@pytest.mark.parametrize("code", ["CONSTRAINT_NOT_ENFORCED", "OUTPUT_LIMIT"])
def test_what_would_only_be_refused_again_is_not_retried(code: str) -> None:
    request = JobRequest(job_id="j", topic="job.test", retry=RetryPolicy(retries=3))
    times = {"version": 1, "accepted_at": 0.0, "updated_at": 0.0}
    job = Job(seq=1, request=request, state=JobState.RUNNING, **times)
    result = JobResult(job_id="j", status=JobState.FAILED, error_code=code)
    other = JobResult(job_id="j", status=JobState.FAILED, error_code="ValueError")
    assert (may_retry(job, result), may_retry(job, other)) == (False, True)
