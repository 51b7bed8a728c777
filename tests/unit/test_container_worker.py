"""A container worker takes jobs, runs them in order, and tells what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace
from tests.unit.container_workers import (
    ENDLESS,
    QUICK,
    SLOW,
    Rig,
    a_job,
    code_of,
    ended,
    refused,
    virtually,
    with_rig,
)

from penstock.core.errors import StoreFailed
from penstock.lifecycles.container import ContainerJobState
from penstock.testing.containers import Fault, Say, Script
from penstock.workloads.container.config import Pull
from penstock.workloads.container.engine import EngineUnavailable
from penstock.workloads.container.files.sandbox import Sandboxes
from penstock.workloads.container.job import Code, Rejected
from penstock.workloads.container.standing import upkeep
from penstock.workloads.container.standing.machine import Disk
from penstock.workloads.container.store import Receipt, RecordQuery

QUEUED, RUNNING = ContainerJobState.QUEUED, ContainerJobState.RUNNING
FINISHED, FAILED = ContainerJobState.FINISHED, ContainerJobState.FAILED


# -- taken and run ----------------------------------------------------------------------------


@with_rig
async def test_a_job_runs_to_its_end_and_leaves_nothing_but_its_record(rig: Rig) -> None:
    rig.engine.scripts["tool:1"] = Script(says=(Say(b"hello\n"),), exit_code=0)
    worker = await rig.start()
    receipt = await worker.submit(a_job("a", "tool:1"))
    assert receipt == Receipt("a", QUEUED)
    record = await ended(worker, "a")
    assert (record.state, record.exit_code, record.error) == (FINISHED, 0, None)
    assert record.engine == "fake"
    assert record.container.startswith("penstock-")
    assert record.created_at <= (record.started_at or 0) <= (record.finished_at or 0)
    assert await worker.text(record) == ("hello\n", "")
    assert rig.store.moves == [("a", "running"), ("a", "finished")]
    await rig.stop(worker)
    assert rig.engine.leftovers() == []


@with_rig
async def test_a_job_is_durable_when_it_is_acknowledged(rig: Rig) -> None:
    worker = await rig.start(max_concurrent_jobs=1)
    await worker.submit(a_job("a", ENDLESS))
    await worker.submit(a_job("b", SLOW, labels={"team": "x"}, priority="low"))
    record = await rig.record("b")
    assert record.state is QUEUED
    assert (record.image, record.labels, record.priority) == (SLOW, {"team": "x"}, "low")
    assert (record.memory_mb, record.cpus) == (256, 1)
    assert b'"job_id":"b"' in record.body


@with_rig
async def test_a_job_starts_without_anybody_looking_at_a_clock(rig: Rig) -> None:
    worker = await rig.start()
    await rig.passes(3.21)
    before = rig.clock.monotonic()
    await worker.submit(a_job("a", ENDLESS))
    changes = worker.changes()
    assert await anext(changes) == "a"
    assert await rig.state("a") is RUNNING
    assert rig.clock.monotonic() == before
    assert (await rig.record("a")).started_at == rig.clock.now()


@with_rig
async def test_the_next_job_starts_when_one_has_ended(rig: Rig) -> None:
    worker = await rig.start(max_concurrent_jobs=1)
    for name in ("a", "b", "c"):
        await worker.submit(a_job(name, SLOW, limits={"max_runtime_seconds": 60}))
    records = [await ended(worker, name) for name in ("a", "b", "c")]
    waits = [(record.started_at or 0) - record.created_at for record in records]
    assert waits == pytest.approx([0, 10, 20], abs=0.1)


@with_rig
async def test_no_more_jobs_run_than_may_whatever_comes(rig: Rig) -> None:
    worker = await rig.start(max_concurrent_jobs=3, memory_mb=700)
    most = 0

    def count(method: str) -> None:
        nonlocal most
        most = max(most, len(rig.engine.containers))

    rig.engine.heard = count
    await asyncio.gather(*(worker.submit(a_job(f"j{n}", SLOW)) for n in range(20)))
    for n in range(20):
        assert (await ended(worker, f"j{n}")).started_at is not None
    assert most == 2, "two of 256 MB fit into 700, and three do not"


@with_rig
async def test_jobs_start_by_priority_and_then_as_they_came(rig: Rig) -> None:
    worker = await rig.start(max_concurrent_jobs=1)
    await worker.submit(a_job("first", SLOW, limits={"max_runtime_seconds": 60}))
    for name, priority in [("l", "low"), ("n1", "normal"), ("h", "high"), ("n2", "normal")]:
        await worker.submit(a_job(name, priority=priority))
    for name in ("l", "n1", "h", "n2"):
        await ended(worker, name)
    started = [job_id for job_id, state in rig.store.moves if state == "running"]
    assert started == ["first", "h", "n1", "n2", "l"]


@with_rig
async def test_a_queued_job_says_its_place_and_why_it_waits(rig: Rig) -> None:
    worker = await rig.start()
    for name in ("a", "b", "c", "d"):
        await worker.submit(a_job(name, SLOW))
    await rig.passes(1)
    records = [await rig.record(name) for name in ("a", "c", "d")]
    assert [worker.position(record) for record in records] == [None, 0, 1]
    assert worker.waits_for(records[0]) == ""
    assert worker.waits_for(records[1]) == "2 of 2 jobs are running"
    assert worker.waits_for(records[2]).startswith("1 job is before it; ")


@with_rig
async def test_a_failure_is_told_with_its_code(rig: Rig) -> None:
    rig.engine.scripts["bad:1"] = Script(exit_code=3)
    worker = await rig.start(images=replace(rig.config.images, pull=Pull.NEVER))
    await worker.submit(a_job("a", "bad:1"))
    await worker.submit(a_job("b", "absent:1"))
    await worker.submit(a_job("c", ENDLESS, limits={"max_runtime_seconds": 5}))
    first, second, third = [await ended(worker, name) for name in ("a", "b", "c")]
    assert (first.state, first.exit_code, code_of(first)) == (FAILED, 3, Code.NON_ZERO_EXIT)
    assert (second.exit_code, code_of(second)) == (125, Code.IMAGE_NOT_FOUND)
    assert (third.exit_code, code_of(third)) == (None, Code.TIMEOUT)


@with_rig
async def test_a_job_goes_on_though_its_caller_went_away(rig: Rig) -> None:
    worker = await rig.start()
    submitting = asyncio.ensure_future(worker.submit(a_job("a")))
    await asyncio.sleep(0)
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    await rig.passes(1)
    assert await rig.state("a") is FINISHED


# -- refused ------------------------------------------------------------------------------------


@with_rig
async def test_an_id_is_used_once_ended_or_not_and_whatever_else_stands_against_it(
    rig: Rig,
) -> None:
    worker = await rig.start()
    await worker.submit(a_job("a"))
    await worker.submit(a_job("b", ENDLESS))
    await ended(worker, "a")
    for draining in (False, True):
        worker.drain(draining)
        for name in ("a", "b"):
            rejected = await refused(worker, a_job(name, SLOW))
            assert rejected.error.code == Code.JOB_ID_ALREADY_EXISTS
            assert (rejected.status, rejected.job_id) == (409, name)


@with_rig
async def test_of_many_at_once_with_one_id_one_is_taken(rig: Rig) -> None:
    worker = await rig.start()
    answers = await asyncio.gather(
        *(worker.submit(a_job("a", ENDLESS)) for _ in range(10)), return_exceptions=True
    )
    taken = [answer for answer in answers if isinstance(answer, Receipt)]
    codes = {answer.error.code for answer in answers if isinstance(answer, Rejected)}
    assert len(taken) == 1
    assert codes == {Code.JOB_ID_ALREADY_EXISTS}


@with_rig
async def test_a_key_brings_the_same_job_again(rig: Rig) -> None:
    worker = await rig.start()
    assert await worker.submit(a_job("a"), "k") == Receipt("a", QUEUED)
    assert (await worker.submit(a_job("a"), "k")).repeated
    await ended(worker, "a")
    worker.drain(True)
    assert await worker.submit(a_job("a"), "k") == Receipt("a", FINISHED, repeated=True)
    assert len(await rig.records()) == 1


@with_rig
async def test_a_key_that_brought_something_else_is_refused(rig: Rig) -> None:
    worker = await rig.start()
    await worker.submit(a_job("a"), "k")
    for other in (a_job("a", SLOW), a_job("b")):
        rejected = await refused(worker, other, "k")
        assert rejected.error.code == Code.IDEMPOTENCY_KEY_REUSED
        assert rejected.status == 409
    assert [record.job_id for record in await rig.records()] == ["a"]


@with_rig
async def test_of_many_at_once_with_one_key_all_are_answered_alike(rig: Rig) -> None:
    worker = await rig.start()
    receipts = await asyncio.gather(*(worker.submit(a_job("a"), "k") for _ in range(10)))
    assert {receipt.job_id for receipt in receipts} == {"a"}
    assert sum(not receipt.repeated for receipt in receipts) == 1
    await ended(worker, "a")
    assert rig.ends() == {"a": 1}


@with_rig
async def test_a_full_queue_says_when_to_come_back(rig: Rig) -> None:
    worker = await rig.start(max_concurrent_jobs=1, max_queued_jobs=2)
    await worker.submit(a_job("a", ENDLESS))
    await rig.passes(1)
    await worker.submit(a_job("b"))
    await worker.submit(a_job("c"))
    rejected = await refused(worker, a_job("d"))
    assert (rejected.error.code, rejected.status) == (Code.QUEUE_FULL, 429)
    assert rejected.retry_after is not None
    assert 1 <= rejected.retry_after <= 60
    assert (await refused(worker, a_job("b"))).error.code == Code.JOB_ID_ALREADY_EXISTS
    health = await worker.health()
    assert (health.accepting, health.queued_jobs) == (False, 2)
    await worker.cancel("b")
    await worker.submit(a_job("d"))


@with_rig
async def test_a_draining_worker_takes_nothing_and_finishes_what_it_has(rig: Rig) -> None:
    worker = await rig.start(max_concurrent_jobs=1)
    await worker.submit(a_job("a", SLOW, limits={"max_runtime_seconds": 60}))
    await worker.submit(a_job("b"))
    worker.drain(True)
    rejected = await refused(worker, a_job("c"))
    assert (rejected.error.code, rejected.status) == (Code.DRAINING, 503)
    health = await worker.health()
    assert (health.status, health.draining, health.accepting) == ("degraded", True, False)
    assert (await ended(worker, "b")).state is FINISHED
    worker.drain(False)
    await worker.submit(a_job("c"))
    assert (await worker.health()).status == "ok"


def test_a_disk_that_is_low_refuses_new_jobs_and_holds_those_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 600
    monkeypatch.setattr(upkeep, "disk_of", lambda folder: Disk(1000, free))

    async def body(rig: Rig) -> None:
        nonlocal free
        worker = await rig.start(disk_low_mb=512, max_concurrent_jobs=1)
        await worker.submit(a_job("a", SLOW, limits={"max_runtime_seconds": 60}))
        await worker.submit(a_job("b"))
        await rig.passes(1)
        free = 100
        rejected = await refused(worker, a_job("c"))
        assert (rejected.error.code, rejected.status) == (Code.DISK_LOW, 503)
        assert rejected.retry_after
        await ended(worker, "a")
        await rig.passes(60)
        waiting = await rig.record("b")
        assert waiting.state is QUEUED
        assert "only 100 MB are free" in worker.waits_for(waiting)
        health = await worker.health()
        assert health.status == "degraded"
        assert not health.accepting
        free = 600
        assert (await ended(worker, "b")).state is FINISHED

    virtually(tmp_path, body)


@with_rig
async def test_a_job_that_could_never_start_is_refused_by_the_field_that_asks_too_much(
    rig: Rig,
) -> None:
    worker = await rig.start(memory_mb=500, cpus=1.5)
    for limits, field in [
        ({"memory_mb": 501}, "runtime.limits.memory_mb"),
        ({"cpus": 2}, "runtime.limits.cpus"),
    ]:
        rejected = await refused(worker, a_job("a", limits=limits))
        assert (rejected.error.code, rejected.status) == (Code.NOT_ALLOWED, 400)
        assert rejected.error.field == field
    assert await rig.records() == []


@with_rig
async def test_the_whole_machine_is_no_more_than_there_is(rig: Rig) -> None:
    worker = await rig.start(memory_mb=0, most=replace(rig.config.most, memory_mb=1 << 30))
    rejected = await refused(worker, a_job("a", limits={"memory_mb": 1 << 29}))
    assert rejected.error.field == "runtime.limits.memory_mb"
    assert "for all its jobs" in rejected.error.message


@with_rig
async def test_what_is_wrong_is_told_before_what_stands_against_it(rig: Rig) -> None:
    worker = await rig.start()
    worker.drain(True)
    assert (await refused(worker, b"[")).error.code == Code.INVALID_BODY
    assert (await refused(worker, a_job("a", ""))).error.code == Code.MISSING_IMAGE


# -- cancelled ------------------------------------------------------------------------------------


@with_rig
async def test_a_queued_job_that_is_cancelled_has_ended_and_never_starts(rig: Rig) -> None:
    worker = await rig.start(max_concurrent_jobs=1)
    await worker.submit(a_job("a", SLOW, limits={"max_runtime_seconds": 60}))
    await worker.submit(a_job("b"))
    await worker.submit(a_job("c"))
    cancelled = await worker.cancel("b")
    assert cancelled is not None
    assert (cancelled.record.state, code_of(cancelled.record)) == (FAILED, Code.CANCELLED)
    assert cancelled.note == "cancelled before it started"
    assert cancelled.record.started_at is None
    await ended(worker, "c")
    assert ("b", "running") not in rig.store.moves
    assert worker.position(cancelled.record) is None


@with_rig
async def test_a_running_job_that_is_cancelled_is_ended(rig: Rig) -> None:
    worker = await rig.start()
    await worker.submit(a_job("a", ENDLESS))
    await rig.passes(1)
    cancelled = await worker.cancel("a")
    assert cancelled is not None
    assert cancelled.record.state is RUNNING
    assert "requested" in cancelled.note
    record = await ended(worker, "a")
    assert (record.state, record.exit_code, code_of(record)) == (FAILED, None, Code.CANCELLED)
    await rig.passes(1)
    assert rig.engine.leftovers() == []
    again = await worker.cancel("a")
    assert again is not None
    assert again.note == "the job had ended already: failed"


@with_rig
async def test_a_job_that_is_not_there_is_not_cancelled(rig: Rig) -> None:
    worker = await rig.start()
    assert await worker.cancel("nobody") is None
    await worker.submit(a_job("a"))
    await ended(worker, "a")
    cancelled = await worker.cancel("a")
    assert cancelled is not None
    assert cancelled.note == "the job had ended already: finished"


@with_rig
async def test_a_cancel_that_cannot_be_written_leaves_the_job_in_line(rig: Rig) -> None:
    worker = await rig.start(max_concurrent_jobs=1)
    await worker.submit(a_job("a", SLOW, limits={"max_runtime_seconds": 60}))
    await worker.submit(a_job("b"))
    rig.store.failing["cancel"] = 1
    with pytest.raises(StoreFailed):
        await worker.cancel("b")
    assert (await ended(worker, "b")).state is FINISHED


@pytest.mark.parametrize("steps", range(60))
def test_a_cancel_at_any_moment_gives_one_end_and_leaves_nothing(
    tmp_path: Path, steps: int
) -> None:
    async def body(rig: Rig) -> None:
        rig.engine.scripts["tool:1"] = Script(says=(Say(b"x"),), seconds=0.001)
        worker = await rig.start(max_concurrent_jobs=1)
        submitting = asyncio.ensure_future(worker.submit(a_job("a", "tool:1")))
        for _ in range(steps):
            await asyncio.sleep(0)
        cancelled = await worker.cancel("a")
        await submitting
        record = await ended(worker, "a")
        if cancelled is not None and cancelled.note.startswith("cancelled before"):
            assert code_of(record) is Code.CANCELLED
            assert ("a", "running") not in rig.store.moves
        assert code_of(record) in (None, Code.CANCELLED)
        assert rig.ends() == {"a": 1}
        await rig.passes(2)
        assert rig.engine.leftovers() == []
        assert worker._scheduler.attempts == {}
        assert worker._queue.running == 0

    virtually(tmp_path, body)


# -- waiting and hearing ----------------------------------------------------------------------


@with_rig
async def test_many_wait_for_one_job_and_all_hear_of_its_end(rig: Rig) -> None:
    worker = await rig.start()
    await worker.submit(a_job("a", SLOW, limits={"max_runtime_seconds": 60}))
    records = await asyncio.gather(*(worker.wait("a", 1000) for _ in range(100)))
    assert {record.state for record in records if record is not None} == {FINISHED}
    assert rig.clock.monotonic() < 15


@with_rig
async def test_who_waits_too_short_gets_the_job_as_it_is(rig: Rig) -> None:
    worker = await rig.start()
    await worker.submit(a_job("a", ENDLESS))
    before = rig.clock.monotonic()
    record = await worker.wait("a", 5)
    assert record is not None
    assert record.state is RUNNING
    assert rig.clock.monotonic() - before == pytest.approx(5)
    assert await worker.wait("nobody", 5) is None


@with_rig
async def test_changes_are_heard_from_the_call_on_each_job_once_until_it_is_read(rig: Rig) -> None:
    worker = await rig.start()
    await worker.submit(a_job("before"))
    await ended(worker, "before")
    changes = worker.changes()
    await worker.submit(a_job("a"))
    await ended(worker, "a")
    assert await anext(changes) == "a"
    nothing = asyncio.ensure_future(anext(changes))
    await rig.passes(1)
    assert not nothing.done()
    await worker.submit(a_job("b"))
    assert await nothing == "b"


@with_rig
async def test_a_worker_that_stops_lets_nobody_wait(rig: Rig) -> None:
    worker = await rig.start()
    await worker.submit(a_job("a", ENDLESS))
    changes = worker.changes()
    heard: list[str] = []

    async def listen() -> None:
        async for job_id in changes:
            heard.append(job_id)

    listening = asyncio.ensure_future(listen())
    waiting = asyncio.ensure_future(worker.wait("a", 1e9))
    await rig.passes(1)
    await rig.stop(worker)
    record = await waiting
    assert record is not None
    assert record.state is RUNNING
    await listening
    assert heard == ["a", *heard[1:]]


# -- what is told of the worker -----------------------------------------------------------------


@with_rig
async def test_health_tells_what_there_is(rig: Rig) -> None:
    worker = await rig.start()
    for name in ("a", "b", "c"):
        await worker.submit(a_job(name, ENDLESS))
    await rig.passes(10)
    health = await worker.health()
    assert (health.status, health.problems) == ("ok", ())
    assert (health.running_jobs, health.queued_jobs, health.max_concurrent_jobs) == (2, 1, 2)
    assert health.uptime_seconds == 10
    assert health.timestamp_unix_ms == int(rig.clock.now() * 1000)
    assert health.engine["reachable"] is True
    assert health.engine["name"] == "fake"
    assert health.jobs_disk_total_mb is not None
    assert health.accepting


@with_rig
async def test_info_tells_what_can_be_asked_for(rig: Rig) -> None:
    worker = await rig.start(worker_id="worker007", labels=("gpu",))
    info = await worker.info()
    assert (info.worker_id, info.labels, info.protocol_version) == ("worker007", ("gpu",), 1)
    assert (info.engine, info.modes) == ("fake", ("image",))
    assert info.limits["defaults"]["memory_mb"] == 256
    assert info.limits["together"] == {"jobs": 2, "memory_mb": 1000, "cpus": 8}


@with_rig
async def test_metrics_count_what_happened(rig: Rig) -> None:
    rig.engine.scripts["bad:1"] = Script(exit_code=3, says=(Say(b"12345"),))
    worker = await rig.start()
    await worker.submit(a_job("a"))
    await worker.submit(a_job("b", "bad:1"))
    await ended(worker, "a")
    await ended(worker, "b")
    await worker.submit(a_job("c", ENDLESS))
    await refused(worker, a_job("c"))
    await rig.passes(1)
    text = worker.metrics().decode()
    for line in (
        'penstock_container_jobs_total{code="",state="finished"} 1.0',
        'penstock_container_jobs_total{code="NON_ZERO_EXIT",state="failed"} 1.0',
        "penstock_container_jobs_accepted_total 3.0",
        'penstock_container_jobs_refused_total{code="JOB_ID_ALREADY_EXISTS"} 1.0',
        'penstock_container_output_bytes_total{stream="stdout"} 5.0',
        "penstock_container_running 1.0",
        "penstock_container_queued 0.0",
        "penstock_container_engine_up 1.0",
        "penstock_container_queue_wait_seconds_count 3.0",
        "penstock_container_run_seconds_count 2.0",
    ):
        assert line in text.splitlines(), line


@with_rig
async def test_two_workers_in_one_process_count_for_themselves(rig: Rig) -> None:
    first = await rig.start()
    await first.submit(a_job("a"))
    await ended(first, "a")
    await rig.stop(first)
    second = await rig.start()
    assert b"penstock_container_jobs_accepted_total 0.0" in second.metrics()


@with_rig
async def test_records_are_found(rig: Rig) -> None:
    worker = await rig.start()
    await worker.submit(a_job("a"))
    await worker.submit(a_job("b", ENDLESS))
    await ended(worker, "a")
    found = await worker.find(RecordQuery(states=(FINISHED,)))
    assert [record.job_id for record in found] == ["a"]


# -- an engine that goes away -------------------------------------------------------------------


@with_rig
async def test_jobs_wait_for_an_engine_that_does_not_answer(rig: Rig) -> None:
    rig.engine.die()
    worker = await rig.start()
    await worker.submit(a_job("a"))
    await rig.passes(12)
    record = await rig.record("a")
    assert record.state is QUEUED
    assert worker.waits_for(record) == "the engine does not answer since 12 s: the engine died"
    health = await worker.health()
    assert (health.status, health.engine["reachable"]) == ("degraded", False)
    assert health.problems == ("the engine does not answer since 12 s: the engine died",)
    assert health.accepting, "it takes jobs all the same"
    assert b"penstock_container_engine_up 0.0" in worker.metrics()
    rig.engine.revive()
    assert (await ended(worker, "a")).state is FINISHED
    assert (await worker.health()).status == "ok"


@with_rig
async def test_one_job_that_meets_a_dead_engine_saves_the_others(rig: Rig) -> None:
    worker = await rig.start(max_concurrent_jobs=1)
    rig.engine.fault("image", Fault(error=EngineUnavailable("connection refused")))
    rig.engine.fault("facts", *[Fault(error=EngineUnavailable("connection refused"))] * 3)
    for name in ("a", "b", "c"):
        await worker.submit(a_job(name))
    first = await ended(worker, "a")
    assert code_of(first) is Code.ENGINE_UNAVAILABLE
    assert first.exit_code is None
    await rig.passes(1)
    assert await rig.state("b") is QUEUED
    assert [(await ended(worker, name)).state for name in ("b", "c")] == [FINISHED, FINISHED]


@with_rig
async def test_an_engine_that_says_nothing_at_all_counts_as_gone(rig: Rig) -> None:
    worker = await rig.start()
    rig.engine.fault("facts", Fault(before=1e4))
    await rig.passes(20)
    await worker.submit(a_job("a"))
    health = await worker.health()
    assert "said nothing for 10 s" in health.engine["error"]
    assert (await ended(worker, "a")).state is FINISHED


@with_rig
async def test_an_engine_that_dies_with_its_containers_ends_their_jobs(rig: Rig) -> None:
    worker = await rig.start()
    await worker.submit(a_job("a", ENDLESS))
    await rig.passes(1)
    rig.engine.die(spare=False)
    await rig.passes(3)
    rig.engine.revive()
    record = await ended(worker, "a")
    assert code_of(record) is Code.ENGINE_UNAVAILABLE
    await worker.submit(a_job("b"))
    assert (await ended(worker, "b")).state is FINISHED


# -- a store that fails ---------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 8])
@pytest.mark.parametrize("event", ["start", "finish"])
def test_a_write_that_fails_is_made_again_until_it_is_durable(
    tmp_path: Path, event: str, times: int
) -> None:
    async def body(rig: Rig) -> None:
        worker = await rig.start()
        rig.store.failing[event] = times
        await worker.submit(a_job("a"))
        await rig.passes(0.01)
        problems = (await worker.health()).problems
        assert problems == ("records can't be written: the disk is on fire",)
        if event == "finish":
            assert rig.engine.containers, "its container is kept until then"
        assert (await ended(worker, "a")).state is FINISHED
        assert (await worker.health()).status == "ok"
        assert rig.store.moves == [("a", "running"), ("a", "finished")]
        assert rig.engine.calls.count("start") == 1

    virtually(tmp_path, body)


@pytest.mark.parametrize("event", ["start", "finish"])
def test_a_write_that_seemed_to_fail_counts_once(tmp_path: Path, event: str) -> None:
    async def body(rig: Rig) -> None:
        worker = await rig.start()
        rig.store.lying[event] = 2
        await worker.submit(a_job("a"))
        assert (await ended(worker, "a")).state is FINISHED
        assert rig.store.moves == [("a", "running"), ("a", "finished")]
        assert rig.engine.calls.count("start") == 1

    virtually(tmp_path, body)


@with_rig
async def test_a_job_that_was_stored_although_that_seemed_to_fail_is_run(rig: Rig) -> None:
    worker = await rig.start()
    rig.store.lying["add"] = 1
    with pytest.raises(StoreFailed):
        await worker.submit(a_job("a"))
    rig.store.failing["add"] = 1
    with pytest.raises(StoreFailed):
        await worker.submit(a_job("b"))
    await rig.passes(30)
    assert await rig.state("a") is FINISHED
    assert await rig.store.get("b") is None


# -- images ---------------------------------------------------------------------------------------


@with_rig
async def test_an_image_that_was_pulled_and_is_not_used_any_more_is_removed(rig: Rig) -> None:
    rig.engine.registry["far:1"] = Script()
    worker = await rig.start(image_retention=3600)
    await worker.submit(a_job("a", "far:1"))
    await worker.submit(a_job("b", QUICK))
    await ended(worker, "a")
    await rig.passes(3000)
    await worker.submit(a_job("c", "far:1"))
    await ended(worker, "c")
    await rig.passes(3000)
    assert "far:1" in rig.engine.scripts, "a job has used it"
    await rig.passes(3600)
    assert "far:1" not in rig.engine.scripts
    assert {QUICK, SLOW, ENDLESS} <= set(rig.engine.scripts), "these were here before"


class _Silent:
    """A place whose files never come."""

    async def stream(self, uri: str) -> AsyncIterator[bytes]:
        await asyncio.get_running_loop().create_future()
        yield b""


@with_rig
async def test_a_job_does_not_wait_for_ever_for_its_files(rig: Rig) -> None:
    rig.sandboxes = Sandboxes(rig.config.jobs_dir / "jobs", rig.config.inputs, cast(Any, _Silent()))
    worker = await rig.start()
    inputs = [{"path": "a", "pointer": "s3://far/away"}]
    await worker.submit(a_job("a", inputs=inputs, limits={"pull_seconds": 20}))
    await worker.submit(a_job("b"))
    record = await ended(worker, "a")
    assert code_of(record) is Code.INPUT_UNAVAILABLE
    assert record.error is not None
    assert "longer than 20 s" in record.error.message
    assert (await ended(worker, "b")).exit_code == 0


@with_rig
async def test_health_tells_of_the_disk_of_the_folder_that_is_configured(rig: Rig) -> None:
    worker = await rig.start(docker_root_dir=rig.config.jobs_dir)
    health = await worker.health()
    assert health.docker_root_dir == str(rig.config.jobs_dir)
    assert health.docker_disk_total_mb
