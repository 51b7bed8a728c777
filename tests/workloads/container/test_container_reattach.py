"""Containers outlive their worker: a stop, a crash, and what is left behind, on a fake engine."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.fake_containers import HANGS, FakeEngine, Say, Script, image_of
from tests.support.waiting import soon

from penstock.app.engine import Engine
from penstock.config import Settings
from penstock.core.job import Job, JobRequest
from penstock.core.pointer import encode_data
from penstock.lifecycles.canonical import JobState
from penstock.ports.clock import SystemClock
from penstock.ports.executor import PAUSED, Environment, Interrupted, Outcome
from penstock.ports.store import JobQuery, StepPage, StepQuery
from penstock.testing.aio import run_async
from penstock.worker.worker import Worker, WorkerOptions
from penstock.workloads.container.config import OnRestart, WorkerConfig
from penstock.workloads.container.engine import JOB_LABEL, OWNER_LABEL, ContainerSpec
from penstock.workloads.container.executor import ContainerAttempt, ContainerExecutor
from penstock.workloads.container.files.artifacts import ArtifactCollector
from penstock.workloads.container.host import ContainerHost
from penstock.workloads.container.job import TOPIC, ContainerJob, ContainerResult
from penstock.workloads.container.runner import Runner

SCRIPTS = {
    "quick:1": Script(says=(Say(b"done\n"),)),
    "slow:1": Script(says=(Say(b"up\n"), Say(b"down\n", after=1.5)), exit_code=3),
    "endless:1": Script(says=(Say(b"up\n"),), seconds=1e6),
}


class Undying(FakeEngine):
    """It outlives the workers that close it."""

    async def close(self) -> None:
        pass


class ContainerSite:
    """A data folder and a container engine; workers come and go."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder
        self.engine = Undying(SystemClock(), SCRIPTS)
        usual = {"disk_low_mb": 0, "stop_grace": 0.05, "reattach_seconds": 30}
        self.config = WorkerConfig(jobs_dir=folder / "containers", **{**usual, **config})

    @asynccontextmanager
    async def worker(
        self, concurrency: int = 4, data: str = "", **others: Any
    ) -> AsyncIterator[Engine]:
        executor = ContainerExecutor(self.config, self.engine)
        settings = Settings(data_dir=self.folder / data)
        settings = settings.changed(concurrency=concurrency, **others)
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


async def submit(
    engine: Engine, job_id: str, image: str, *, outputs: bool = False, **fields: Any
) -> None:
    payload = json.dumps({"runtime": {"image": image, **fields}, "outputs": outputs}).encode()
    pointer = encode_data(payload, "application/json")
    await engine.api.submit([JobRequest(job_id=job_id, topic=TOPIC, context_ptr=pointer)])


async def runs(engine: Engine, site: ContainerSite, count: int = 1) -> None:
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
    site = ContainerSite(tmp_path)
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
    site = ContainerSite(tmp_path)
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
    here, there = ContainerSite(tmp_path / "here"), ContainerSite(tmp_path / "there")
    async with Engine(Settings(data_dir=tmp_path)) as engine:
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
    site = ContainerSite(tmp_path)
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
        for name in ("b2", "b1", "b0"):  # those that wait first
            await engine.api.cancel(name, timeout=10)
    assert site.ran() == 2


@run_async
async def test_output_that_is_too_long_for_the_result_is_an_artifact(tmp_path: Path) -> None:
    site = ContainerSite(tmp_path)
    written = b"\0" * 300_000  # six bytes each in JSON
    site.engine.registry["zeros:1"] = Script(says=(Say(written),))
    async with site.worker(limits__max_input=1 << 20, limits__max_result=1 << 20) as engine:
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
    site = ContainerSite(tmp_path)
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
    site = ContainerSite(tmp_path)
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
    site = ContainerSite(tmp_path)
    async with site.worker() as engine:
        await submit(engine, "a", "endless:1")
        await runs(engine, site)
    settings = Settings(data_dir=site.folder)
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
    site = ContainerSite(tmp_path)
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
        site = ContainerSite(tmp_path / str(moment))
        async with site.worker() as engine:
            await submit(engine, "a", "endless:1")
            await runs(engine, site)
        async with site.worker() as engine:
            await asyncio.sleep(moment * 0.05)
            answer = await engine.api.cancel("a", timeout=10)
            assert answer.job.state is JobState.CANCELLED
            assert site.engine.running() == []
        assert site.engine.leftovers() == []


@pytest.mark.seed("003", "10.3")
@run_async
async def test_on_restart_end_ends_containers_with_their_worker(tmp_path: Path) -> None:
    site = ContainerSite(tmp_path, on_restart=OnRestart.END)
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
    site = ContainerSite(tmp_path)
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
async def test_a_job_of_which_nothing_is_left_here_is_ended_soon(tmp_path: Path) -> None:
    """A worker was killed after it removed the container of a job, and before the job's end."""
    site = ContainerSite(tmp_path, reattach_seconds=600)
    async with site.worker() as engine:
        await submit(engine, "a", "endless:1")
        await runs(engine, site)
    site.engine.die(spare=False)
    site.engine.revive()
    for folder in (site.config.jobs_dir / "jobs").iterdir():
        shutil.rmtree(folder)
    async with site.worker() as engine:
        job, _ = await ended(engine, "a")
        assert job.result is not None
        assert job.result.error_code == "WORKER_RESTARTED"
    assert site.ran() == 1


@pytest.mark.seed("003", "10.9")
@run_async
async def test_a_job_that_does_not_fit_waits_in_the_queue_and_says_why(tmp_path: Path) -> None:
    site = ContainerSite(tmp_path, memory_mb=300)
    async with site.worker() as engine:
        await submit(engine, "a", "endless:1", limits={"memory_mb": 256})
        await runs(engine, site)
        await submit(engine, "b", "quick:1", limits={"memory_mb": 256})

        def paused() -> bool:
            return any(w.facts.get(PAUSED) for w in engine.open_jobs.roster.workers.values())

        await soon(lambda: paused() and len(engine.open_jobs.backlog))
        assert "needs 256 MB and 44 MB are free" in await engine.api.why("b")
        await engine.api.cancel("a", timeout=10)
        job, _ = await ended(engine, "b")
        assert job.state is JobState.SUCCEEDED


@run_async
async def test_while_the_engine_does_not_answer_jobs_wait(tmp_path: Path) -> None:
    site = ContainerSite(tmp_path)
    async with site.worker() as engine:
        site.engine.die()
        await submit(engine, "a", "quick:1")
        await soon(lambda: any(engine.open_jobs.orphaned) or len(engine.open_jobs.backlog))
        site.engine.revive()
        job, _ = await ended(engine, "a")
        assert job.state is JobState.SUCCEEDED


@run_async
async def test_a_worker_of_another_engine_on_the_same_folder_leaves_containers_alone(
    tmp_path: Path,
) -> None:
    site = ContainerSite(tmp_path)
    async with site.worker(data="one") as engine:
        await submit(engine, "a", "slow:1")
        await runs(engine, site)
    async with site.worker(data="two") as engine:
        await submit(engine, "a", "quick:1")  # its own job of that name
        _, result = await ended(engine, "a")
        assert result["stdout"] == "done\n"
    async with site.worker(data="one") as engine:
        _, result = await ended(engine, "a")
        assert (result["exit_code"], result["stdout"]) == (3, "up\ndown\n")
    assert site.ran() == 2
    assert site.engine.leftovers() == []


@run_async
async def test_a_worker_with_another_container_engine_does_not_take_a_container_for_lost(
    tmp_path: Path,
) -> None:
    site = ContainerSite(tmp_path)
    async with site.worker() as engine:
        await submit(engine, "a", "slow:1")
        await runs(engine, site)
    first, site.engine = site.engine, Undying(SystemClock(), SCRIPTS)
    site.engine.where = "another"
    async with site.worker() as engine:
        await asyncio.sleep(1.5)
        assert (await engine.api.get("a")).attempt == 1
    site.engine = first
    async with site.worker() as engine:
        _, result = await ended(engine, "a")
        assert result["exit_code"] == 3
    assert site.engine.leftovers() == []


def a_container(runner: Runner, job_id: str) -> ContainerSpec:
    return ContainerSpec(
        name=runner.name_of(job_id),
        image=image_of("quick:1").id,
        memory=1 << 20,
        cpus=1,
        pids=16,
        tmp=1 << 20,
        labels={OWNER_LABEL: runner.owner, JOB_LABEL: job_id},
    )


async def dies_before_the_start(
    self: Runner, job: ContainerJob, *others: Any, starts: Callable[[], Awaitable[None]]
) -> ContainerResult:
    """A run whose worker dies between the checkpoint and the start of the container."""
    await self.engine.create(a_container(self, job.job_id))
    await starts()
    raise Interrupted("killed")


@run_async
async def test_a_job_whose_container_was_only_made_waits_for_room_and_runs(tmp_path: Path) -> None:
    site = ContainerSite(tmp_path, memory_mb=600)
    async with site.worker() as engine:
        await submit(engine, "b", "endless:1", limits={"memory_mb": 256})
        await runs(engine, site)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Runner, "run", dies_before_the_start)
            await submit(engine, "a", "quick:1", limits={"memory_mb": 256})
            await soon(lambda: site.engine.calls.count("create") == 2)
            await asyncio.sleep(0.1)
    site.config = replace(site.config, memory_mb=300)
    async with site.worker() as engine:
        await soon(lambda: "remove" in site.engine.calls)  # there is no room for it
        await asyncio.sleep(0.1)
        assert not (await engine.api.get("a")).is_final
        await engine.api.cancel("b", timeout=10)
        job, result = await ended(engine, "a")
        assert (job.state, result["stdout"]) == (JobState.SUCCEEDED, "done\n")
    assert site.ran() == 2
    assert site.engine.leftovers() == []


@run_async
async def test_a_container_that_was_made_only_in_part_is_in_nobodys_way(tmp_path: Path) -> None:
    async def dies(self: Runner, job: ContainerJob, *others: Any, starts: Any) -> ContainerResult:
        await self.engine.create(replace(a_container(self, job.job_id), labels={}))
        raise Interrupted("killed")

    site = ContainerSite(tmp_path)
    async with site.worker() as engine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Runner, "run", dies)
            await submit(engine, "a", "quick:1")
            await soon(lambda: "create" in site.engine.calls)
            await asyncio.sleep(0.1)
    async with site.worker() as engine:
        job, result = await ended(engine, "a")
        assert (job.state, result["stdout"]) == (JobState.SUCCEEDED, "done\n")
    assert site.engine.leftovers() == []


@pytest.mark.parametrize("end", ["stop", "cancel"])
def test_a_job_is_let_go_of_while_its_artifacts_are_collected(tmp_path: Path, end: str) -> None:
    @run_async
    async def test() -> None:
        site = ContainerSite(tmp_path)
        site.engine.registry["leaves:1"] = Script(says=(Say(b"x"),), leaves={"f": b"left"})
        collecting = asyncio.Event()

        async def never(self: ArtifactCollector, folder: Path) -> None:
            collecting.set()
            await asyncio.get_running_loop().create_future()

        async with site.worker() as engine:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ArtifactCollector, "add_folder", never)
                await submit(engine, "a", "leaves:1", outputs=True)
                await asyncio.wait_for(collecting.wait(), 10)
                if end == "cancel":
                    answer = await engine.api.cancel("a", timeout=10)
                    assert answer.job.state is JobState.CANCELLED
        async with site.worker() as engine:
            job, result = await ended(engine, "a")
            assert job.result is not None
            if end == "stop":
                assert (job.state, result["stdout"]) == (JobState.SUCCEEDED, "x")
                (left,) = job.result.artifacts
                assert await engine.api.get_blob(left.pointer) == b"left"
        assert site.ran() == 1
        assert site.engine.leftovers() == []

    test()


@run_async
async def test_a_job_whose_worker_died_before_anything_was_here_is_run_by_the_next(
    tmp_path: Path,
) -> None:
    async def dies(self: ContainerAttempt) -> Outcome:
        raise Interrupted("killed")

    here, there = ContainerSite(tmp_path / "here"), ContainerSite(tmp_path / "there")
    async with Engine(Settings(data_dir=tmp_path)) as engine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ContainerAttempt, "outcome", dies)
            async with here.worker_of(engine, "here"):
                await submit(engine, "a", "quick:1")
                await soon(lambda: engine.open_jobs.reattaching)
        async with there.worker_of(engine, "there"):
            job, result = await ended(engine, "a")
            assert (job.state, result["stdout"]) == (JobState.SUCCEEDED, "done\n")
    assert (here.ran(), there.ran()) == (0, 1)


@run_async
async def test_a_job_that_began_elsewhere_meanwhile_is_not_run_twice(tmp_path: Path) -> None:
    here, there = ContainerSite(tmp_path / "here"), ContainerSite(tmp_path / "there")
    async with Engine(Settings(data_dir=tmp_path)) as engine:
        async with here.worker_of(engine, "here"):
            await submit(engine, "a", "slow:1")
            await runs(engine, here)
        async with there.worker_of(engine, "there") as executor:
            assert executor.host is not None
            executor.host.reattachable = {"a": 1}  # what it knew before the container was started
            await soon(lambda: "attempt" if engine.open_jobs.held["a"].attempt > 1 else "")
            await asyncio.sleep(0.2)
        async with here.worker_of(engine, "here"):
            _, result = await ended(engine, "a")
            assert result["exit_code"] == 3
    assert (here.ran(), there.ran()) == (1, 0)


class Superseded:
    """Of an engine that has given the job to its next attempt."""

    async def get(self, job_id: str) -> Any:
        return SimpleNamespace(is_final=False, attempt=2, state=JobState.RUNNING)

    async def find(self, query: JobQuery) -> list[Any]:
        return []

    async def read_steps(self, job_id: str, query: StepQuery) -> StepPage:
        return StepPage([], more=False)


@run_async
async def test_what_the_next_attempt_here_needs_is_not_removed(tmp_path: Path) -> None:
    site = ContainerSite(tmp_path)
    environment: Any = SimpleNamespace(
        clock=SystemClock(), blobs=None, api=Superseded(), worker_id="w"
    )
    host = ContainerHost(site.engine, site.config, environment)
    await host.open()
    job = ContainerJob(job_id="a", image="quick:1")
    await site.engine.create(a_container(host.runner, "a"))
    host.settle("a", attempt=1)  # the end that this attempt reported was not taken
    await asyncio.wait_for(host.enter(job), 5)
    await asyncio.sleep(0.1)
    await host.reconcile()
    assert await host.find("a") is not None
    assert "remove" not in site.engine.calls
    entering = asyncio.create_task(host.enter(job))  # a third one waits for the second
    await asyncio.sleep(0.1)
    assert not entering.done()
    host.end("a")
    await asyncio.wait_for(entering, 5)
    await host.close()


@run_async
async def test_a_job_that_is_cleared_away_just_as_its_worker_stops_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def remove(self: ContainerHost, job_id: str) -> bool:
        return True

    monkeypatch.setattr(ContainerHost, "remove", remove)
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    for turns in range(6):
        site = ContainerSite(tmp_path / f"{turns}")
        host = ContainerHost(site.engine, site.config, None)
        await host.open()
        host.settle("a", attempt=1)
        for _ in range(turns):
            await asyncio.sleep(0)
        await host.close()
    gc.collect()
    assert not problems
