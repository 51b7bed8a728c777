"""Jobs that submit jobs: what a parent that runs again finds, and how children end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import eventually

import penstock
from penstock import App, Client, Conflict, InvalidRequest, JobFailed, JobState, RetryPolicy
from penstock.workloads.function.context import ChildKeys

app = App()
runs: Counter[Any] = Counter()
"""How often each child ran."""
_AGAIN = RetryPolicy(retries=2, delay=0.01)


@app.job("job.kids.child")
async def child(n: int) -> int:
    """Fails for a negative number, the first time."""
    runs[n] += 1
    if n < 0 and runs[n] == 1:
        raise ValueError(f"{n} failed")
    return n * 10


@app.job("job.kids.endless")
async def endless(name: str = "") -> None:
    runs[f"begun {name}"] += 1
    try:
        await asyncio.sleep(3600)
    finally:
        runs[f"ended {name}"] += 1


@app.job("job.kids.retried", retries=_AGAIN)
async def retried(numbers: list[int]) -> list[int]:
    order = numbers if penstock.current().request.retry_number == 0 else numbers[::-1]
    handles = [await child.asubmit(n) for n in order]
    return [await handle for handle in handles]


@app.job("job.kids.retried_thread", retries=_AGAIN)
def retried_thread(numbers: list[int]) -> list[int]:
    return [handle.result() for handle in child.submit_many([(n,) for n in numbers])]


@app.job("job.kids.retried_process", retries=_AGAIN, mode="process")
def retried_process(numbers: list[int]) -> list[int]:
    with penstock.connect(data=penstock.current().request.env["data"]) as ps:
        given = [{"n": n} for n in numbers]
        return [handle.result() for handle in ps.submit_many("job.kids.child", given)]


@app.job("job.kids.otherwise", retries=_AGAIN)
async def otherwise(how: str) -> None:
    known: dict[str, Any] = {
        "key": {"key": "mine"},
        "fresh": {"fresh": True},
        "id": {"job_id": "my-child"},
    }
    options = known[how]
    assert await (await child.options(**options).asubmit(7)) == 70
    if penstock.current().request.retry_number < 2:
        raise ValueError("once more")


@app.job("job.kids.failing")
async def failing(ctx: penstock.Context, grandchild: bool = False) -> None:
    """Fails, or whatever else is done to it, when its children have begun."""
    if grandchild:
        await failing_below.asubmit()
    await endless.asubmit("running")
    await endless.options(delay=3600).asubmit("waiting")
    await endless.options(detached=True).asubmit("detached")
    while not runs["begun running"] or (grandchild and not runs["begun below"]):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    if ctx.request.labels.get("end") == "fail":
        raise ValueError("the parent failed")
    await asyncio.sleep(3600)


@app.job("job.kids.below")
async def failing_below() -> None:
    await endless.asubmit("below")
    await asyncio.sleep(3600)


@app.job("job.kids.leaving")
async def leaving() -> str:
    return str((await endless.asubmit("left")).job_id)


@pytest.fixture
def ps(tmp_path: Path) -> Iterator[Client]:
    runs.clear()
    with app.run(tmp_path / "data", concurrency=16) as client:
        yield client
        client.cancel_many()


# -- a parent that runs again -----------------------------------------------------


@pytest.mark.parametrize("mode", ["retried", "retried_thread", "retried_process"])
def test_a_retry_of_a_parent_reuses_what_succeeded_and_runs_again_what_failed(
    ps: Client, tmp_path: Path, mode: str
) -> None:
    env = {"data": str(tmp_path / "data")}
    job = ps.submit(f"job.kids.{mode}", {"numbers": [1, -2, 3, 3]}, env=env)
    assert sorted(job.result(timeout=30)) == [-20, 10, 30, 30]
    assert runs == {1: 1, -2: 2, 3: 2}
    children = ps.jobs(child_of=job.job_id)
    assert len(children) == 5
    assert sorted(str(one.record.state) for one in children) == ["FAILED"] + ["SUCCEEDED"] * 4


def test_children_that_failed_in_the_same_try_are_given_back_as_they_ended(ps: Client) -> None:
    """A second attempt of the same try asks with the same keys."""
    job = ps.submit("job.kids.failing", labels={"end": "later"})
    conditions: dict[str, Any] = {"child_of": job.job_id, "states": (JobState.RUNNING,)}
    first = eventually(lambda: ps.jobs(**conditions), "a child runs")[0]
    key = first.record.request.idempotency_key
    assert key is not None
    first.cancel()
    request = penstock.JobRequest(
        job_id="",
        topic="job.kids.endless",
        context_ptr=first.record.request.context_ptr,
        idempotency_key=key,
        child_of=job.job_id,
        parent_job_id=job.job_id,
    )
    (again,) = ps._engine.run(lambda api: api.submit([request]))
    assert (again.job_id, again.state) == (first.job_id, JobState.CANCELLED)


@pytest.mark.parametrize(("how", "times"), [("key", 1), ("fresh", 3), ("id", 1)])
def test_a_key_an_id_or_fresh_say_otherwise(ps: Client, how: str, times: int) -> None:
    otherwise.submit(how).result(timeout=30)
    assert runs[7] == times


def test_a_number_whose_submission_failed_is_used_again() -> None:
    keys = ChildKeys()
    one, two = keys.take("p", "job.a", b"x"), keys.take("p", "job.a", b"x")
    assert one != two
    assert keys.take("p", "job.b", b"x") not in (one, two)
    keys.give_back(two)
    keys.give_back(one)
    assert [keys.take("p", "job.a", b"x") for _ in range(2)] == [one, two]
    assert keys.take("p", "job.a", b"x") not in (one, two)


def test_many_jobs_can_be_given_keys(ps: Client) -> None:
    first = ps.submit_many("job.kids.child", [{"n": 1}, {"n": 2}], keys=["a", "b"])
    again = child.submit_many([(2,), (1,)], keys=["b", "a"])
    assert [job.job_id for job in again] == [job.job_id for job in reversed(first)]
    for wrong in (["a"], "ab", [1, 2]):
        with pytest.raises(InvalidRequest, match="keys"):
            child.submit_many([(1,), (2,)], keys=wrong)  # type: ignore[arg-type]
    assert len(ps.jobs()) == 2


# -- children end with their parent -----------------------------------------------


@pytest.mark.parametrize("end", ["fail", "cancel", "timeout"])
def test_children_end_with_their_parent_at_any_depth_unless_they_are_detached(
    ps: Client, end: str
) -> None:
    timeout = 3.0 if end == "timeout" else 60.0
    options: dict[str, Any] = {"labels": {"end": end}, "timeout": timeout}
    job = ps.submit("job.kids.failing", {"grandchild": True}, **options)
    names = ("running", "below", "detached")
    eventually(lambda: all(runs[f"begun {name}"] for name in names), "children run")
    if end == "cancel":
        job.cancel()
    assert job.wait(timeout=30).state is not JobState.SUCCEEDED
    eventually(lambda: runs["ended running"] and runs["ended below"], "children ended")
    ended = (JobState.CANCELLED,)
    eventually(
        lambda: len(ps.jobs(topic="job.kids.endless", states=ended)) == 3, "all are cancelled"
    )
    results = [one.record.result for one in ps.jobs(states=ended)]
    (waited,) = [one for one in results if one and one.error_code == "PARENT_ENDED"]
    assert job.job_id in (waited.error_message or "")
    assert not runs["ended detached"]
    running: dict[str, Any] = {"topic": "job.kids.endless", "states": (JobState.RUNNING,)}
    (detached,) = eventually(lambda: ps.jobs(**running), "the detached one runs")
    assert detached.record.request.detached


def test_children_go_on_while_their_parent_is_retried(ps: Client) -> None:
    job = ps.submit(
        "job.kids.failing", labels={"end": "fail"}, retry=RetryPolicy(retries=1, delay=1)
    )
    eventually(lambda: job.refresh().successor, "the first try failed")
    assert runs["begun running"] == 1
    with pytest.raises(JobFailed):
        job.result(timeout=30)
    eventually(lambda: runs["ended running"], "its child ended")
    assert runs["begun running"] == 1


def test_a_child_of_a_parent_that_succeeded_lives_on(ps: Client) -> None:
    left = ps.get(leaving.submit().result(timeout=30))
    eventually(lambda: runs["begun left"], "it began")
    eventually(lambda: left.refresh().state is JobState.RUNNING, "it runs")


def test_a_parent_that_failed_can_have_no_more_children(ps: Client) -> None:
    job = ps.submit("job.kids.failing", labels={"end": "fail"})
    with pytest.raises(JobFailed):
        job.result(timeout=30)
    count = len(ps.jobs())
    with pytest.raises(Conflict, match="can have no more children"):
        ps.submit("job.kids.child", {"n": 1}, parent=job)
    assert len(ps.jobs()) == count
    assert ps.submit("job.kids.child", {"n": 1}, parent=job, detached=True).result(timeout=30) == 10
