"""A lost job whose work goes on without its worker waits for one that can reattach to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.control.test_scheduler import SchedulerBench, Starts, hello, kinds

from penstock.core.job import JobResult, TopicDefaults
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.bus import (
    AnyMessage,
    Dispatch,
    Finished,
    JobCancel,
    Returned,
    Started,
    WorkerFacts,
)
from penstock.ports.executor import PAUSED, REATTACHABLE
from penstock.testing.aio import run_async
from penstock.testing.samples import accept, move, succeeded

_E, _S = JobEvent, JobState
TOPIC = "job.test.echo"


async def greet(site: SchedulerBench, worker_id: str, **fields: Any) -> None:
    defaults = {TOPIC: TopicDefaults(reattach_timeout=60)}
    await site.turn(hello(worker_id, topic_defaults=defaults, **fields))


async def tell(site: SchedulerBench, worker_id: str, found: Mapping[str, int]) -> list[AnyMessage]:
    """The worker can reattach to these."""
    await site.scheduler.beat([WorkerFacts(worker_id, "", {REATTACHABLE: found})])
    return await site.turn()


async def lost(site: SchedulerBench, **fields: Any) -> None:
    """w1 runs a job and falls silent until it is given up."""
    await greet(site, "w1")
    await site.apply(accept("a", topic=TOPIC, **fields))
    await site.turn()
    await site.turn(Started("a", 1, "w1"))
    await site.pass_time(16)
    assert "a" in site.open_jobs.reattaching


def dispatched(sent: list[AnyMessage]) -> list[tuple[str, int]]:
    return [(one.request.job_id, one.attempt) for one in sent if isinstance(one, Dispatch)]


@run_async
async def test_a_lost_job_waits_for_a_worker_that_can_reattach_to_it() -> None:
    site = SchedulerBench()
    await lost(site)
    await greet(site, "w2")
    assert dispatched(await site.turn()) == []
    assert (await site.job()).state is _S.RUNNING
    await greet(site, "w3")
    assert dispatched(await tell(site, "w3", {"a": 1})) == [("a", 2)]
    job = await site.job()
    assert (job.state, job.attempt, job.worker_id, job.uncharged) == (_S.RUNNING, 2, "w3", 1)
    await site.turn(Finished(succeeded("a", worker_id="w3", attempt=2)))
    assert (await site.job()).state is _S.SUCCEEDED


@run_async
async def test_a_worker_that_found_another_attempt_does_not_get_the_job() -> None:
    site = SchedulerBench()
    await lost(site)
    await greet(site, "w2")
    assert dispatched(await tell(site, "w2", {"a": 2, "b": 1})) == []


@run_async
async def test_a_job_that_began_without_a_word_waits_for_such_a_worker_as_well() -> None:
    site = SchedulerBench()
    site.scheduler.intake._losses._starts = Starts({("a", 1)})
    await greet(site, "w1", session="s")
    await site.apply(accept("a", topic=TOPIC))
    await site.turn()
    site.open_jobs.roster.set_missing(site.open_jobs.roster.workers["w1"], 0.0)
    await greet(site, "w1", session="another")
    assert (await site.job()).state is _S.DISPATCHED
    await greet(site, "w2")
    assert dispatched(await tell(site, "w2", {"a": 1})) == [("a", 2)]


@run_async
async def test_a_job_to_which_nobody_reattaches_in_time_ends() -> None:
    site = SchedulerBench()
    await lost(site)
    await site.pass_time(59)
    assert (await site.job()).state is _S.RUNNING
    await site.pass_time(2)
    job = await site.job()
    assert job.result is not None
    assert (job.state, job.result.error_code) == (_S.TIMEOUT, "WORKER_LOST")
    assert "no worker could reattach to it within 60 s" in (job.result.error_message or "")


@run_async
async def test_an_idempotent_one_is_then_repeated_anywhere() -> None:
    site = SchedulerBench()
    await lost(site, idempotent=True)
    await greet(site, "w2")
    assert dispatched(await site.turn()) == []
    await site.pass_time(58)
    await greet(site, "w2")
    await site.pass_time(3)
    assert dispatched(await site.turn()) == [("a", 2)]
    assert (await site.job()).state is _S.RUNNING


@run_async
async def test_the_worker_that_was_only_silent_keeps_its_job() -> None:
    site = SchedulerBench()
    await lost(site)
    await greet(site, "w1", held=(("a", 1),))
    assert not site.open_jobs.reattaching
    await site.turn(Finished(succeeded("a", worker_id="w1", attempt=1)))
    assert (await site.job()).state is _S.SUCCEEDED


@run_async
async def test_a_cancelled_job_ends_when_the_worker_that_reattached_has_ended_its_work() -> None:
    site = SchedulerBench()
    await lost(site)
    await site.apply(move("a", _E.REQUEST_CANCEL))
    await greet(site, "w2")
    await site.pass_time(1)
    assert (await site.job()).state is _S.RUNNING
    sent = await tell(site, "w2", {"a": 1})
    assert dispatched(sent) == [("a", 2)]
    assert JobCancel in kinds(sent)
    ended = JobResult(job_id="a", status=_S.CANCELLED, worker_id="w2", attempt=2)
    await site.turn(Finished(ended))
    assert (await site.job()).state is _S.CANCELLED


@run_async
async def test_a_job_that_was_cancelled_before_its_worker_was_lost_waits_for_it_as_well() -> None:
    site = SchedulerBench()
    await greet(site, "w1", slots=2)
    await site.apply(accept("a", topic=TOPIC))
    await site.turn()
    await site.turn(Started("a", 1, "w1"))
    await site.apply(move("a", _E.REQUEST_CANCEL))
    await site.pass_time(16)
    assert (await site.job()).state is _S.RUNNING
    await greet(site, "w2")
    assert JobCancel in kinds(await tell(site, "w2", {"a": 1}))


@run_async
async def test_a_cancelled_job_to_which_nobody_reattaches_in_time_ends_cancelled() -> None:
    site = SchedulerBench()
    await lost(site)
    await site.apply(move("a", _E.REQUEST_CANCEL))
    await site.pass_time(61)
    job = await site.job()
    assert job.result is not None
    assert job.state is _S.CANCELLED
    assert "no worker could reattach to it within 60 s" in (job.result.error_message or "")


@run_async
async def test_new_rules_do_not_send_it_to_another_worker() -> None:
    site = SchedulerBench()
    await lost(site)
    await greet(site, "w2")
    site.scheduler.rejudge()
    assert dispatched(await site.turn()) == []
    assert "a" in site.open_jobs.reattaching


@run_async
async def test_a_worker_that_stops_hands_the_job_back_to_whoever_can_reattach() -> None:
    site = SchedulerBench()
    await greet(site, "w1", slots=2)
    await site.apply(accept("a", topic=TOPIC))
    await site.turn()
    await site.turn(Started("a", 1, "w1"))
    await greet(site, "w2")
    assert dispatched(await site.turn(Returned("a", 1, "w1", "it stops"))) == []
    assert dispatched(await tell(site, "w2", {"a": 1})) == [("a", 2)]


@run_async
async def test_what_was_handed_back_and_did_nothing_goes_to_anybody() -> None:
    """Also a job that is neither idempotent nor of a topic that can be reattached to."""
    site = SchedulerBench()
    await site.greet("w1")
    await site.apply(accept("a", topic=TOPIC))
    await site.turn()
    await site.turn(Started("a", 1, "w1"))
    await site.scheduler.beat([WorkerFacts("w1", "", {PAUSED: {TOPIC: "no memory"}})])
    await site.greet("w2")
    sent = await site.turn(Returned("a", 1, "w1", "no memory", charged=False))
    assert JobCancel not in kinds(sent)
    assert dispatched(sent) == [("a", 2)]
    job = await site.job()
    assert (job.state, job.worker_id, job.uncharged) == (_S.RUNNING, "w2", 1)
