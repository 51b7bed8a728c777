"""A container worker that is stopped or killed, and the one that comes after it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
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

from penstock.lifecycles.container import ContainerJobEvent, ContainerJobState
from penstock.testing.containers import Fault, Say, Script
from penstock.workloads.container.config import ImageRules, OnRestart
from penstock.workloads.container.engine import (
    JOB_LABEL,
    OWNER_LABEL,
    EngineUnavailable,
    Plan,
)
from penstock.workloads.container.job import Code
from penstock.workloads.container.standing.worker import Worker
from penstock.workloads.container.store import Change

QUEUED, RUNNING = ContainerJobState.QUEUED, ContainerJobState.RUNNING
FINISHED, FAILED = ContainerJobState.FINISHED, ContainerJobState.FAILED
MINUTE = {"max_runtime_seconds": 60}


async def a_stray(rig: Rig, worker: Worker, job_id: str) -> str:
    """A container of this worker that no job knows."""
    name = f"penstock-{job_id}"
    await rig.engine.create(await a_plan(rig, worker, name, job_id, ENDLESS))
    await rig.engine.start(name)
    return name


async def a_plan(rig: Rig, worker: Worker, name: str, job_id: str, image: str) -> Plan:
    return Plan(
        name=name,
        image=(await rig.engine.image(image)).id,
        memory=1,
        cpus=1,
        pids=1,
        tmp=1,
        labels={OWNER_LABEL: worker.owner, JOB_LABEL: job_id},
    )


# -- killed ---------------------------------------------------------------------------------------


@with_rig
async def test_a_container_that_runs_on_is_adopted_and_its_job_ends_as_it_does(rig: Rig) -> None:
    rig.engine.scripts["tool:1"] = Script(says=(Say(b"one\n"), Say(b"two\n", after=8)), seconds=5)
    first = await rig.start()
    await first.submit(a_job("a", "tool:1", limits=MINUTE))
    await rig.passes(1)
    await rig.kill(first)
    second = await rig.start()
    record = await rig.record("a")
    assert record.state is RUNNING
    assert (await second.health()).running_jobs == 1
    record = await ended(second, "a")
    assert (record.state, record.exit_code) == (FINISHED, 0)
    assert record.stdout.gap, "nobody can know whether it wrote meanwhile"
    stdout, stderr = await second.text(record)
    assert "one\n" in stdout
    assert "two\n" in stdout
    assert "may be missing" in stderr
    assert rig.ends() == {"a": 1}
    assert rig.engine.calls.count("start") == 1
    await rig.stop(second)
    assert rig.engine.leftovers() == []


@with_rig
async def test_a_container_that_runs_on_is_ended_where_that_is_configured(rig: Rig) -> None:
    first = await rig.start(on_restart=OnRestart.END)
    await first.submit(a_job("a", ENDLESS))
    await rig.passes(1)
    await rig.kill(first)
    second = await rig.start()
    record = await ended(second, "a")
    assert (record.state, record.exit_code) == (FAILED, None)
    assert code_of(record) is Code.WORKER_RESTARTED
    await rig.passes(1)
    assert rig.engine.leftovers() == []


@pytest.mark.parametrize("on_restart", OnRestart)
def test_a_container_that_ended_meanwhile_tells_how(tmp_path: Path, on_restart: OnRestart) -> None:
    async def body(rig: Rig) -> None:
        rig.engine.scripts["tool:1"] = Script(seconds=5, exit_code=7)
        first = await rig.start(on_restart=on_restart)
        await first.submit(a_job("a", "tool:1"))
        await rig.passes(1)
        await rig.kill(first)
        await rig.passes(100)
        second = await rig.start()
        record = await ended(second, "a")
        assert (record.exit_code, code_of(record)) == (7, Code.NON_ZERO_EXIT)

    virtually(tmp_path, body)


@with_rig
async def test_a_job_whose_container_is_gone_is_told_as_such(rig: Rig) -> None:
    first = await rig.start()
    await first.submit(a_job("a", ENDLESS))
    await rig.passes(1)
    await rig.kill(first)
    for name in list(rig.engine.containers):
        await rig.engine.remove(name)
    second = await rig.start()
    record = await ended(second, "a")
    assert (record.state, record.exit_code) == (FAILED, None)
    assert code_of(record) is Code.WORKER_RESTARTED
    assert record.error is not None
    assert "had not been made" in record.error.message


@with_rig
async def test_a_job_that_was_accepted_runs_though_bodies_must_be_smaller_now(rig: Rig) -> None:
    first = await rig.start(max_concurrent_jobs=1)
    await first.submit(a_job("slow", SLOW))
    await first.submit(a_job("large", QUICK, task={"payload": "x" * 1000}))
    await rig.kill(first)
    second = await rig.start(max_body_bytes=500)
    assert (await ended(second, "large")).state is FINISHED


@pytest.mark.parametrize("on_restart", OnRestart)
@pytest.mark.parametrize("step", ["pull", "create", "attach"])
def test_a_job_that_a_clean_stop_caught_before_its_start_runs_afterwards(
    tmp_path: Path, step: str, on_restart: OnRestart
) -> None:
    async def body(rig: Rig) -> None:
        rig.engine.registry["big:1"] = Script(says=(Say(b"done\n"),))
        rig.engine.fault(step, Fault(before=3, after=3))
        first = await rig.start(on_restart=on_restart)
        await first.submit(a_job("a", "big:1"))
        await rig.passes(4.5)
        assert rig.engine.calls.count("start") == 0
        await rig.stop(first)
        second = await rig.start()
        record = await ended(second, "a")
        assert (record.state, record.error) == (FINISHED, None)
        assert await second.text(record) == ("done\n", "")
        assert rig.ends() == {"a": 1}
        await rig.stop(second)
        assert rig.engine.leftovers() == []

    virtually(tmp_path, body)


@with_rig
async def test_a_job_that_a_kill_caught_in_its_pull_runs_afterwards(rig: Rig) -> None:
    rig.engine.registry["big:1"] = Script()
    rig.engine.fault("pull", Fault(before=60))
    first = await rig.start()
    await first.submit(a_job("a", "big:1"))
    await rig.passes(1)
    await rig.kill(first)
    second = await rig.start()
    assert (await ended(second, "a")).state is FINISHED


@with_rig
async def test_a_cancel_during_the_pull_outlives_a_restart(rig: Rig) -> None:
    rig.engine.registry["big:1"] = Script()
    rig.engine.fault("pull", Fault(before=60))
    first = await rig.start()
    await first.submit(a_job("a", "big:1"))
    await rig.passes(1)
    first._scheduler.attempts["a"].cancel("cancelled by a caller")
    await rig.kill(first)
    second = await rig.start()
    assert code_of(await ended(second, "a")) is Code.CANCELLED
    assert rig.engine.calls.count("create") == 0


async def killed_before_the_start(rig: Rig, image: str) -> str:
    """A job that runs by its record, and its container, which was made; returns its name."""
    rig.engine.die()
    worker = await rig.start()
    await worker.submit(a_job("a", image, limits=MINUTE))
    await rig.kill(worker)
    rig.engine.revive()
    name = worker._scheduler._parts.runner.name_of("a")
    start = Change(job_id="a", event=ContainerJobEvent.START, at=rig.clock.now(), container=name)
    await rig.store.change(start)
    await rig.engine.create(await a_plan(rig, worker, name, "a", image))
    return name


@with_rig
async def test_a_job_whose_container_was_not_started_is_not_run_again(rig: Rig) -> None:
    await killed_before_the_start(rig, QUICK)
    worker = await rig.start()
    record = await ended(worker, "a")
    assert record.error is not None
    assert record.error.code == "WORKER_RESTARTED"
    assert rig.engine.calls.count("start") == 0
    assert rig.engine.leftovers() == []


@with_rig
async def test_an_engine_that_still_starts_what_it_was_asked_to_is_given_time(rig: Rig) -> None:
    """Else the job would run twice."""
    name = await killed_before_the_start(rig, SLOW)

    async def start_late() -> None:
        await rig.passes(1)
        await rig.engine.start(name)

    starting = asyncio.ensure_future(start_late())
    worker = await rig.start()
    await starting
    assert (await ended(worker, "a")).is_final
    assert rig.engine.calls.count("start") == 1
    assert rig.engine.calls.count("create") == 1


@with_rig
async def test_jobs_that_waited_go_on_waiting_in_their_order(rig: Rig) -> None:
    first = await rig.start(max_concurrent_jobs=1)
    await first.submit(a_job("a", SLOW, limits=MINUTE))
    for name, priority in [("b", "low"), ("c", "normal"), ("d", "high"), ("e", "normal")]:
        await first.submit(a_job(name, priority=priority))
    await rig.passes(1)
    await rig.kill(first)
    second = await rig.start()
    records = [await rig.record(name) for name in ("d", "c", "e", "b")]
    assert [second.position(record) for record in records] == [0, 1, 2, 3]
    for record in records:
        assert (await ended(second, record.job_id)).state is FINISHED
    started = [job_id for job_id, state in rig.store.moves if state == "running"]
    assert started == ["a", "d", "c", "e", "b"]


@with_rig
async def test_containers_that_no_job_needs_are_removed(rig: Rig) -> None:
    first = await rig.start(max_concurrent_jobs=1)
    await first.submit(a_job("done"))
    await ended(first, "done")
    await first.submit(a_job("runs", ENDLESS))
    await first.submit(a_job("waits", ENDLESS))
    await rig.passes(1)
    strays = [await a_stray(rig, first, name) for name in ("done", "waits", "unknown")]
    await rig.kill(first)
    second = await rig.start()
    assert second.owner == first.owner
    assert len(rig.engine.running()) == 1
    assert not set(strays) & set(rig.engine.containers)
    assert await rig.state("runs") is RUNNING


@with_rig
async def test_nothing_is_given_up_while_the_engine_does_not_answer(rig: Rig) -> None:
    first = await rig.start(max_concurrent_jobs=1)
    await first.submit(a_job("a", SLOW, limits=MINUTE))
    await first.submit(a_job("b"))
    await rig.passes(1)
    await rig.kill(first)
    rig.engine.die()
    second = await rig.start()
    await rig.passes(20)
    assert await rig.state("a") is RUNNING
    health = await second.health()
    assert (health.status, health.running_jobs, health.queued_jobs) == ("degraded", 1, 1)
    assert "does not answer" in second.waits_for(await rig.record("b"))
    rig.engine.revive()
    assert (await ended(second, "a")).state is FINISHED
    assert (await ended(second, "b")).state is FINISHED


@with_rig
async def test_an_engine_that_fails_while_it_is_asked_for_containers_is_asked_again(
    rig: Rig,
) -> None:
    first = await rig.start()
    await first.submit(a_job("a", SLOW, limits=MINUTE))
    await rig.passes(1)
    await rig.kill(first)
    rig.engine.fault("find", *[Fault(error=EngineUnavailable("hiccup"))] * 3)
    rig.engine.fault("find", Fault(before=1e5))
    second = await rig.start()
    assert await rig.state("a") is RUNNING
    assert (await ended(second, "a")).state is FINISHED


@with_rig
async def test_a_cancel_outlives_its_worker(rig: Rig) -> None:
    rig.engine.scripts["stubborn:1"] = Script(seconds=1e6, heeds_term=False)
    first = await rig.start(stop_grace=30)
    await first.submit(a_job("a", "stubborn:1", limits={"max_runtime_seconds": 3600}))
    await rig.passes(1)
    cancelled = await first.cancel("a")
    assert cancelled is not None
    assert "requested" in cancelled.note
    await rig.passes(1)
    await rig.kill(first)
    second = await rig.start()
    record = await ended(second, "a")
    assert code_of(record) is Code.CANCELLED


@with_rig
async def test_a_job_that_was_ended_by_a_cancel_is_told_as_cancelled_by_the_next_worker(
    rig: Rig,
) -> None:
    first = await rig.start()
    await first.submit(a_job("a", ENDLESS, limits={"max_runtime_seconds": 3600}))
    await rig.passes(1)
    rig.store.failing["cancel"] = 10**6
    await first.cancel("a")
    await rig.passes(30)
    assert rig.engine.running() == []
    await rig.kill(first)
    rig.store.failing.clear()
    second = await rig.start()
    record = await ended(second, "a")
    assert (code_of(record), record.exit_code) == (Code.CANCELLED, None)


@with_rig
async def test_a_job_can_be_cancelled_before_its_container_was_found_again(rig: Rig) -> None:
    first = await rig.start()
    await first.submit(a_job("a", ENDLESS, limits={"max_runtime_seconds": 3600}))
    await rig.passes(1)
    await rig.kill(first)
    rig.engine.die()
    second = await rig.start()
    await rig.passes(1)
    cancelled = await second.cancel("a")
    assert cancelled is not None
    assert cancelled.record.state is RUNNING
    rig.engine.revive()
    assert code_of(await ended(second, "a")) is Code.CANCELLED


@with_rig
async def test_a_job_that_new_rules_do_not_allow_is_not_run(rig: Rig) -> None:
    first = await rig.start(max_concurrent_jobs=1)
    await first.submit(a_job("a", SLOW, limits=MINUTE))
    await first.submit(a_job("b", QUICK))
    await rig.passes(1)
    await rig.kill(first)
    second = await rig.start(images=ImageRules(allowed=(SLOW,)))
    assert (await ended(second, "a")).state is FINISHED
    record = await ended(second, "b")
    assert (record.state, code_of(record)) == (FAILED, Code.IMAGE_NOT_ALLOWED)


@pytest.mark.parametrize("seed", range(50))
def test_workers_killed_at_any_moment_end_every_job_once_and_leave_nothing(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)

    async def body(rig: Rig) -> None:
        rig.engine.scripts["tool:1"] = Script(says=(Say(b"x", after=0.5),), seconds=0.5)
        on_restart = chance.choice(list(OnRestart))
        worker = await rig.start(on_restart=on_restart)
        for n in range(8):
            await worker.submit(a_job(f"j{n}", chance.choice([QUICK, "tool:1", SLOW])))
            if chance.random() < 0.5:
                await rig.passes(chance.choice([0, 0.001, 0.3, 3]))
            if chance.random() < 0.3:
                await worker.cancel(f"j{chance.randrange(n + 1)}")
            if chance.random() < 0.5:
                await rig.kill(worker)
                if chance.random() < 0.3:
                    rig.engine.die()
                worker = await rig.start()
                rig.engine.revive()
        for n in range(8):
            await ended(worker, f"j{n}")
        assert rig.ends() == {f"j{n}": 1 for n in range(8)}
        await rig.passes(100)
        assert rig.engine.leftovers() == []
        assert worker._queue.running == 0

    virtually(tmp_path, body)


# -- stopped --------------------------------------------------------------------------------------


@with_rig
async def test_a_worker_that_stops_leaves_its_containers_to_the_next(rig: Rig) -> None:
    first = await rig.start()
    await first.submit(a_job("a", SLOW, limits=MINUTE))
    await rig.passes(1)
    before = rig.clock.monotonic()
    await rig.stop(first)
    assert rig.clock.monotonic() - before < 1
    assert await rig.state("a") is RUNNING
    assert len(rig.engine.running()) == 1
    second = await rig.start()
    assert (await ended(second, "a")).state is FINISHED


@with_rig
async def test_a_worker_that_stops_ends_its_containers_where_that_is_configured(rig: Rig) -> None:
    worker = await rig.start(on_restart=OnRestart.END)
    await worker.submit(a_job("a", ENDLESS))
    await worker.submit(a_job("b", ENDLESS))
    await worker.submit(a_job("waits"))
    await rig.passes(1)
    await worker.cancel("b")
    await rig.stop(worker)
    first, second = await rig.record("a"), await rig.record("b")
    assert (first.state, code_of(first)) == (FAILED, Code.WORKER_RESTARTED)
    assert code_of(second) is Code.CANCELLED
    assert await rig.state("waits") is QUEUED
    assert rig.engine.leftovers() == []


@with_rig
async def test_a_worker_that_stops_gives_running_jobs_time(rig: Rig) -> None:
    worker = await rig.start(max_concurrent_jobs=1, on_restart=OnRestart.END)
    await worker.submit(a_job("a", SLOW, limits=MINUTE))
    await worker.submit(a_job("b"))
    await rig.passes(1)
    before = rig.clock.monotonic()
    await rig.stop(worker, grace=30)
    assert rig.clock.monotonic() - before == pytest.approx(9, abs=0.5)
    assert await rig.state("a") is FINISHED
    assert await rig.state("b") is QUEUED, "nothing more is started"


@with_rig
async def test_a_worker_that_stopped_takes_nothing(rig: Rig) -> None:
    worker = await rig.start()
    await rig.stop(worker)
    rejected = await refused(worker, a_job("a"))
    assert (rejected.error.code, rejected.status) == (Code.DRAINING, 503)


@with_rig
async def test_a_store_that_stays_broken_does_not_keep_a_worker_from_stopping(rig: Rig) -> None:
    first = await rig.start()
    rig.store.failing["finish"] = 10**6
    await first.submit(a_job("a"))
    await rig.passes(5)
    await rig.stop(first)
    assert await rig.state("a") is RUNNING
    assert rig.engine.containers, "it is what tells how the job ended"
    rig.store.failing.clear()
    second = await rig.start()
    assert (await ended(second, "a")).state is FINISHED
    assert rig.engine.calls.count("start") == 1
