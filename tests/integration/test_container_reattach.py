"""Containers outlive their worker: a stop, a crash, and what is left behind, on a fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tests.support.waiting import soon

from penstock.app.engine import Engine
from penstock.config import Settings
from penstock.core.job import Job, JobRequest
from penstock.core.pointer import encode_data
from penstock.lifecycles.canonical import JobState
from penstock.ports.clock import SystemClock
from penstock.ports.executor import PAUSED, Environment
from penstock.testing.aio import run_async
from penstock.testing.containers import HANGS, FakeEngine, Say, Script
from penstock.worker.worker import Worker, WorkerOptions
from penstock.workloads.container.config import OnRestart, WorkerConfig
from penstock.workloads.container.executor import ContainerExecutor
from penstock.workloads.container.job import TOPIC

SCRIPTS = {
    "quick:1": Script(says=(Say(b"done\n"),)),
    "slow:1": Script(says=(Say(b"up\n"), Say(b"down\n", after=1.5)), exit_code=3),
    "endless:1": Script(says=(Say(b"up\n"),), seconds=1e6),
}


class Undying(FakeEngine):
    """It outlives the workers that close it."""

    async def close(self) -> None:
        pass


class Site:
    """A data folder and a container engine; workers come and go."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder
        self.engine = Undying(SystemClock(), SCRIPTS)
        usual = {"disk_low_mb": 0, "stop_grace": 0.05, "reattach_seconds": 30}
        self.config = WorkerConfig(jobs_dir=folder / "containers", **{**usual, **config})

    @asynccontextmanager
    async def worker(self, concurrency: int = 4, **others: Any) -> AsyncIterator[Engine]:
        executor = ContainerExecutor(self.config, self.engine)
        settings = Settings(data_dir=self.folder, concurrency=concurrency, http="", **others)
        async with Engine(settings, [executor]) as engine:
            yield engine

    @asynccontextmanager
    async def worker_of(self, engine: Engine, name: str) -> AsyncIterator[ContainerExecutor]:
        """A worker of an engine that stays up."""
        executor, clock = ContainerExecutor(self.config, self.engine), SystemClock()
        environment = Environment(name, clock, engine.blobs, engine.api, engine.state)
        options = WorkerOptions(worker_id=name, slots=4)
        worker = Worker(
            engine.bus, engine.blobs, [executor], clock, options, environment=environment
        )
        running = asyncio.create_task(worker.run())
        await worker.welcomed.wait()
        try:
            yield executor
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def ran(self) -> int:
        return self.engine.calls.count("start")


async def submit(engine: Engine, job_id: str, image: str, **fields: Any) -> None:
    payload = json.dumps({"runtime": {"image": image, **fields}}).encode()
    pointer = encode_data(payload, "application/json")
    await engine.api.submit([JobRequest(job_id=job_id, topic=TOPIC, context_ptr=pointer)])


async def runs(engine: Engine, site: Site, count: int = 1) -> None:
    await soon(lambda: len(site.engine.running()) == count)


async def ended(engine: Engine, job_id: str) -> tuple[Job, dict[str, Any]]:
    job = await engine.api.wait(job_id, 20)
    assert job.result is not None
    pointer = job.result.result_ptr
    return job, json.loads(await engine.api.get_blob(pointer)) if pointer else {}


@run_async
async def test_a_worker_that_stops_leaves_its_containers_running_and_the_next_reattaches(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    async with site.worker() as engine:
        await submit(engine, "a", "slow:1")
        await runs(engine, site)
    assert len(site.engine.running()) == 1
    async with site.worker() as engine:
        job, result = await ended(engine, "a")
        assert (job.state, job.attempt, job.uncharged) == (JobState.FAILED, 2, 1)
        assert (result["exit_code"], result["stdout"]) == (3, "up\ndown\n")
    assert site.ran() == 1
    assert site.engine.leftovers() == []


@run_async
async def test_a_container_that_ended_meanwhile_is_reported_with_its_exit_code(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    async with site.worker() as engine:
        await submit(engine, "a", "slow:1")
        await runs(engine, site)
    await soon(lambda: not site.engine.running())
    async with site.worker() as engine:
        _, result = await ended(engine, "a")
        assert result["exit_code"] == 3
    assert site.ran() == 1


@run_async
async def test_a_container_that_runs_where_no_job_can_begin_is_not_run_elsewhere(
    tmp_path: Path,
) -> None:
    here, there = Site(tmp_path / "here"), Site(tmp_path / "there")
    async with Engine(Settings(data_dir=tmp_path, http="")) as engine:
        async with here.worker_of(engine, "here"):
            await submit(engine, "a", "slow:1")
            await runs(engine, here)
        here.config = replace(here.config, disk_low_mb=1e12)
        async with there.worker_of(engine, "there"), here.worker_of(engine, "here"):
            job, result = await ended(engine, "a")
            assert (job.worker_id, result["stdout"]) == ("here", "up\ndown\n")
    assert (here.ran(), there.ran()) == (1, 0)


@run_async
async def test_a_busy_worker_reattaches_after_a_restart_before_it_begins_others(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    async with site.worker(concurrency=1) as engine:
        await submit(engine, "a", "slow:1")
        await runs(engine, site)
        for n in range(3):
            await submit(engine, f"b{n}", "endless:1")
    async with site.worker(concurrency=1) as engine:
        most = 0
        while not (job := await engine.api.get("a")).is_final:
            most = max(most, len(site.engine.running()))
            assert job.attempt <= 2
            await asyncio.sleep(0.02)
        assert most == 1
        await runs(engine, site)
        for n in range(3):
            await engine.api.cancel(f"b{n}", timeout=10)
    assert site.ran() == 2


@run_async
async def test_output_that_is_too_long_for_the_result_is_an_artifact(tmp_path: Path) -> None:
    site = Site(tmp_path)
    written = b"\0" * 300_000  # six bytes each in JSON
    site.engine.registry["zeros:1"] = Script(says=(Say(written),))
    async with site.worker(max_input=1 << 20, max_result=1 << 20) as engine:
        await submit(engine, "a", "zeros:1")
        job, result = await ended(engine, "a")
        assert (job.state, result["exit_code"]) == (JobState.SUCCEEDED, 0)
        assert job.result is not None
        assert [(one.name, one.size) for one in job.result.artifacts] == [("stdout.log", 300_000)]
        assert result["stdout_count"]["shown"] < len(written) == result["stdout_count"]["bytes"]


@run_async
async def test_of_many_files_a_thousand_are_kept_and_the_others_are_counted(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    leaves = {f"{n:04}": b"x" for n in range(1200)}
    site.engine.registry["many:1"] = Script(leaves=leaves)
    async with site.worker() as engine:
        payload = json.dumps({"runtime": {"image": "many:1"}, "outputs": True}).encode()
        pointer = encode_data(payload, "application/json")
        await engine.api.submit([JobRequest(job_id="a", topic=TOPIC, context_ptr=pointer)])
        job, result = await ended(engine, "a")
        assert job.result is not None
        assert [one.name for one in job.result.artifacts] == sorted(leaves)[:1000]
        assert len(result["skipped"]) == 101
        assert result["skipped"][-1] == "and 100 more"


@run_async
async def test_a_stop_during_a_pull_gives_the_job_back_and_runs_it_later(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.engine.registry["far:1"] = Script(says=(Say(b"here\n"),))
    site.engine.fault("pull", HANGS)
    async with site.worker() as engine:
        await submit(engine, "a", "far:1")
        await soon(lambda: "pull" in site.engine.calls)
    async with site.worker() as engine:
        job, result = await ended(engine, "a")
        assert (job.state, result["stdout"]) == (JobState.SUCCEEDED, "here\n")
    assert site.ran() == 1


@run_async
async def test_a_job_that_is_cancelled_without_a_worker_ends_when_its_container_is_gone(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    async with site.worker() as engine:
        await submit(engine, "a", "endless:1")
        await runs(engine, site)
    settings = Settings(data_dir=site.folder, http="")
    async with Engine(settings) as engine:  # without a worker
        answer = await engine.api.cancel("a", timeout=2)
        assert (answer.job.state, answer.job.cancel_requested) == (JobState.RUNNING, True)
        assert len(site.engine.running()) == 1
    async with site.worker() as engine:
        job, result = await ended(engine, "a")
        assert site.engine.running() == []
        assert (job.state, result["stdout"]) == (JobState.CANCELLED, "up\n")
    assert site.engine.leftovers() == []


@run_async
async def test_a_cancel_after_a_restart_ends_the_container(tmp_path: Path) -> None:
    site = Site(tmp_path)
    async with site.worker() as engine:
        await submit(engine, "a", "endless:1")
        await runs(engine, site)
    async with site.worker() as engine:
        await soon(lambda: "reattach" in site.engine.calls)
        answer = await engine.api.cancel("a", timeout=10)
        assert answer.job.state is JobState.CANCELLED
        _, result = await ended(engine, "a")
        assert result["stdout"] == "up\n"
    assert site.engine.leftovers() == []


@run_async
async def test_a_cancel_at_any_moment_of_a_restart_ends_the_container(tmp_path: Path) -> None:
    for moment in range(10):
        site = Site(tmp_path / str(moment))
        async with site.worker() as engine:
            await submit(engine, "a", "endless:1")
            await runs(engine, site)
        async with site.worker() as engine:
            await asyncio.sleep(moment * 0.05)
            answer = await engine.api.cancel("a", timeout=10)
            assert answer.job.state is JobState.CANCELLED
            assert site.engine.running() == []
        assert site.engine.leftovers() == []


@run_async
async def test_on_restart_end_ends_containers_with_their_worker(tmp_path: Path) -> None:
    site = Site(tmp_path, on_restart=OnRestart.END)
    async with site.worker() as engine:
        await submit(engine, "a", "endless:1")
        await runs(engine, site)
    assert site.engine.running() == []
    async with site.worker() as engine:
        job, _ = await ended(engine, "a")
        assert job.result is not None
        assert job.result.error_code == "WORKER_RESTARTED"


@run_async
async def test_a_container_that_somebody_removed_is_not_run_again(tmp_path: Path) -> None:
    site = Site(tmp_path)
    async with site.worker() as engine:
        await submit(engine, "a", "endless:1")
        await runs(engine, site)
    site.engine.die(spare=False)
    site.engine.revive()
    async with site.worker() as engine:
        job, _ = await ended(engine, "a")
        assert job.result is not None
        assert job.result.error_code == "WORKER_RESTARTED"
    assert site.ran() == 1


@run_async
async def test_a_job_that_does_not_fit_waits_in_the_queue_and_says_why(tmp_path: Path) -> None:
    site = Site(tmp_path, memory_mb=300)
    async with site.worker() as engine:
        await submit(engine, "a", "endless:1", limits={"memory_mb": 256})
        await runs(engine, site)
        await submit(engine, "b", "quick:1", limits={"memory_mb": 256})

        def paused() -> bool:
            return any(w.facts.get(PAUSED) for w in engine.open_jobs.roster.workers.values())

        await soon(paused)
        assert "needs 256 MB and 44 MB are free" in await engine.api.why("b")
        await engine.api.cancel("a", timeout=10)
        job, _ = await ended(engine, "b")
        assert job.state is JobState.SUCCEEDED


@run_async
async def test_while_the_engine_does_not_answer_jobs_wait(tmp_path: Path) -> None:
    site = Site(tmp_path)
    async with site.worker() as engine:
        site.engine.die()
        await submit(engine, "a", "quick:1")
        await soon(lambda: any(engine.open_jobs.orphaned) or len(engine.open_jobs.backlog))
        site.engine.revive()
        job, _ = await ended(engine, "a")
        assert job.state is JobState.SUCCEEDED
