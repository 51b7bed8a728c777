"""The container protocol over an engine, on a fake container engine: queue, health, upkeep."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.fake_containers import FakeEngine, Fault, Say, Script
from tests.support.waiting import soon

from penstock.api.container.facade import ContainerFacade, ContainerRecord
from penstock.app.container_worker import container_worker
from penstock.config import Settings
from penstock.ports.clock import SystemClock
from penstock.testing.aio import run_async
from penstock.workloads.container import host
from penstock.workloads.container.config import BuildRules, WorkerConfig
from penstock.workloads.container.engine import EngineError
from penstock.workloads.container.job import Rejected, Stream

SCRIPTS = {
    "quick:1": Script(says=(Say(b"done\n"),)),
    "slow:1": Script(seconds=0.3),
    "endless:1": Script(says=(Say(b"up\n"),), seconds=1e6),
}


class Undying(FakeEngine):
    """It outlives the workers that close it."""

    async def close(self) -> None:
        pass


@pytest.fixture
def engine() -> FakeEngine:
    return Undying(SystemClock(), SCRIPTS)


@asynccontextmanager
async def serving(
    folder: Path, engine: FakeEngine, **settings: Any
) -> AsyncIterator[ContainerFacade]:
    usual = {"port": 0, "disk_low_mb": 0, "stop_grace": 0.05, "max_concurrent_jobs": 1}
    config = WorkerConfig(jobs_dir=folder / "containers", **{**usual, **settings})
    async with container_worker(config, Settings(data_dir=folder), engine) as (facade, _):
        yield facade


async def submit(facade: ContainerFacade, job_id: str, image: str, **fields: Any) -> None:
    runtime = {"mode": "image", "image": image}
    job = {"protocol_version": 1, "job_id": job_id, "runtime": runtime, **fields}
    await facade.submit(json.dumps(job).encode())


async def refused(facade: ContainerFacade, job_id: str, image: str) -> Rejected:
    with pytest.raises(Rejected) as caught:
        await submit(facade, job_id, image)
    return caught.value


async def ended(facade: ContainerFacade, job_id: str) -> ContainerRecord:
    record = await facade.wait(job_id, 20, removed=True)
    assert record is not None
    assert record.is_final, record
    return record


def runs(engine: FakeEngine, count: int) -> bool:
    return len(engine.running()) == count


@pytest.mark.seed("003", "2.8", "3.1", "10.5")
@run_async
async def test_a_job_is_durable_when_it_is_acknowledged(tmp_path: Path, engine: FakeEngine) -> None:
    async with serving(tmp_path, engine) as facade:
        await submit(facade, "first", "endless:1")
        await soon(partial(runs, engine, 1))
        await submit(facade, "second", "quick:1")
    async with serving(tmp_path, engine, max_concurrent_jobs=2) as facade:
        assert (await ended(facade, "second")).state == "finished"
        await facade.cancel("first")
        assert (await ended(facade, "first")).state == "failed"
    assert engine.leftovers() == []


@pytest.mark.seed("003", "3.2", "3.3", "3.4", "3.5", "10.9")
@run_async
async def test_no_more_jobs_run_than_may_and_urgent_ones_first(
    tmp_path: Path, engine: FakeEngine
) -> None:
    async with serving(tmp_path, engine, max_concurrent_jobs=2) as facade:
        for n in range(2):
            await submit(facade, f"busy-{n}", "slow:1")
        await soon(partial(runs, engine, 2))
        for name, priority in (("low", "low"), ("high", "high"), ("normal", "normal")):
            await submit(facade, name, "slow:1", priority=priority)
        most, names = 0, ("low", "high", "normal")
        while not all([(record := await facade.get(name)) and record.is_final for name in names]):
            most = max(most, len(engine.running()))
            await facade.wait("low", 0.01)
        started = [(await ended(facade, name)).job.started_at for name in names]
        assert most == 2
        low, high, normal = started
        assert None not in started
        assert high <= normal <= low  # type: ignore[operator]


@pytest.mark.seed("003", "1.8", "9.1")
@run_async
async def test_a_queued_job_that_is_cancelled_has_ended_and_never_starts(
    tmp_path: Path, engine: FakeEngine
) -> None:
    async with serving(tmp_path, engine) as facade:
        await submit(facade, "busy", "endless:1")
        await soon(partial(runs, engine, 1))
        await submit(facade, "waits", "quick:1")
        record = await facade.cancel("waits")
        assert record is not None
        assert record.error is not None
        assert (record.state, record.error.code) == ("failed", "CANCELLED")
        await facade.cancel("busy")
        busy = await ended(facade, "busy")
        assert busy.error is not None
        assert (busy.error.code, busy.exit_code) == ("CANCELLED", None)
        assert busy.result is not None
        assert busy.result.stdout == "up\n"
    assert engine.calls.count("start") == 1
    assert engine.leftovers() == []


@pytest.mark.seed("003", "10.9")
@run_async
async def test_a_full_queue_says_when_to_come_back(tmp_path: Path, engine: FakeEngine) -> None:
    async with serving(tmp_path, engine, max_queued_jobs=2) as facade:
        await submit(facade, "busy", "endless:1")
        await soon(partial(runs, engine, 1))
        for n in range(2):
            await submit(facade, f"waits-{n}", "quick:1")
        full = await refused(facade, "more", "quick:1")
        assert (full.error.code, full.status) == ("QUEUE_FULL", 429)
        assert full.retry_after
        assert not (await facade.health()).accepting
        taken = await refused(facade, "busy", "quick:1")
        assert (taken.error.code, taken.status) == ("JOB_ID_ALREADY_EXISTS", 409)


@pytest.mark.seed("003", "10.9")
@run_async
async def test_a_draining_worker_accepts_nothing_and_finishes_what_it_has(
    tmp_path: Path, engine: FakeEngine
) -> None:
    async with serving(tmp_path, engine) as facade:
        await submit(facade, "slow", "slow:1")
        facade.drain(True)
        closed = await refused(facade, "more", "quick:1")
        assert (closed.error.code, closed.status) == ("DRAINING", 503)
        health = await facade.health()
        assert (health.status, health.draining, health.accepting) == ("degraded", True, False)
        assert (await ended(facade, "slow")).state == "finished"
        facade.drain(False)
        await submit(facade, "more", "quick:1")


@pytest.mark.seed("003", "10.10")
@run_async
async def test_a_disk_that_is_low_refuses_new_jobs(tmp_path: Path, engine: FakeEngine) -> None:
    async with serving(tmp_path, engine, disk_low_mb=1e12) as facade:
        low = await refused(facade, "a", "quick:1")
        assert (low.error.code, low.status) == ("DISK_LOW", 503)
        health = await facade.health()
        assert (health.status, health.accepting) == ("degraded", False)
        assert "disk_low_mb" in health.problems[0]


@pytest.mark.seed("003", "9.8", "10.12")
@run_async
async def test_health_and_info_say_what_there_is(tmp_path: Path, engine: FakeEngine) -> None:
    async with serving(tmp_path, engine, worker_id="w7", labels=("gpu",)) as facade:
        await submit(facade, "busy", "endless:1")
        await soon(partial(runs, engine, 1))
        await submit(facade, "waits", "quick:1")
        health, info = await facade.health(), await facade.info()
        assert (health.status, health.running_jobs, health.queued_jobs) == ("ok", 1, 1)
        assert (health.engine["name"], health.engine["reachable"]) == ("fake", True)
        assert (info.worker_id, info.labels, info.modes) == ("w7", ("gpu",), ("image",))


@pytest.mark.seed("003", "8.2", "10.10")
@run_async
async def test_a_container_that_could_not_be_removed_is_removed_later(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_SOON", 0.05)
    async with serving(tmp_path, engine) as facade:
        engine.fault("remove", *[Fault(error=EngineError("busy"))] * 3)
        await submit(facade, "a", "quick:1")
        await facade.wait("a", 20)
        await soon(lambda: engine.leftovers() == [])


@pytest.mark.seed("003", "8.3", "9.11")
@run_async
async def test_an_image_that_was_pulled_and_is_not_used_any_more_is_removed(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_LOOK", 0.05)
    engine.registry["far:1"] = Script()
    async with serving(tmp_path, engine) as facade:
        await submit(facade, "a", "far:1")
        await ended(facade, "a")
        assert "far:1" in engine.scripts
    async with serving(tmp_path, engine, image_retention=0.01):
        await soon(lambda: "far:1" not in engine.scripts)
    assert "quick:1" in engine.scripts


@run_async
async def test_the_whole_output_is_an_artifact_where_the_record_has_only_some(
    tmp_path: Path, engine: FakeEngine
) -> None:
    engine.scripts["loud:1"] = Script(says=(Say(b"x" * 3000 + b"\n"), Say(b"\xff\n")))
    limits = replace(WorkerConfig().defaults, max_output_bytes=1000)
    async with serving(tmp_path, engine, defaults=limits) as facade:
        await submit(facade, "a", "loud:1")
        record = await ended(facade, "a")
        (log,) = record.artifacts
        assert (log.name, log.size) == ("stdout.log", 3003)
        assert (await facade.read_artifact(log, 2999, 100)) == b"x\n\xff\n"
        count = record.count(Stream.STDOUT)
        assert (count.bytes, count.kept, count.truncated) == (3003, 3003, True)


@pytest.mark.seed("003", "10.7")
@run_async
async def test_the_log_of_a_build_is_an_artifact_and_what_was_built_is_removed(
    tmp_path: Path, engine: FakeEngine
) -> None:
    engine.recipe = Script(leaves={"made": b"12"})
    async with serving(tmp_path, engine, build=BuildRules(enabled=True)) as facade:
        runtime = {"mode": "build", "build": {"dockerfile": "FROM scratch\n"}}
        await submit(facade, "a", "", runtime=runtime, outputs=True)
        record = await ended(facade, "a")
        assert record.state == "finished", record.error
        made, log = record.artifacts
        assert (made.name, made.size) == ("made", 2)
        assert (log.name, log.media_type) == ("build.log", "text/plain")
        assert await facade.read_artifact(log, 0, 1000) == engine.build_log
    assert engine.leftovers() == []
    assert not any((tmp_path / "containers" / "jobs").iterdir())
