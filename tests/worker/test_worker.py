"""A worker by itself: what it takes, and what it says."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.waiting import soon

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.core.artifact import MAX_ARTIFACTS, Artifact
from penstock.core.job import JobResult, TopicDefaults
from penstock.core.pointer import JSON
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState
from penstock.ports.bus import (
    CHECKPOINT,
    HANDSHAKE,
    RESULT,
    AnyMessage,
    Checkpointed,
    CheckpointKept,
    Confirmed,
    Dispatch,
    Farewell,
    Finished,
    Handshake,
    JobCancel,
    MakeStartLog,
    MemoryBus,
    Resumed,
    Returned,
    Started,
    Welcomed,
    jobs_of,
)
from penstock.ports.executor import Context, Outcome, Task
from penstock.testing.aio import run_async
from penstock.testing.clock import LoopClock, VirtualLoop
from penstock.testing.samples import a_request
from penstock.worker.attempt import Attempt
from penstock.worker.worker import Worker, WorkerOptions


class Waiting:
    """An executor whose jobs run until they are let go."""

    def __init__(self) -> None:
        self.topics: tuple[str, ...] = ("job.*",)
        self.topic_defaults: Mapping[str, TopicDefaults] = {}
        self.begun: list[tuple[str, int]] = []
        self.tasks: list[Task] = []
        self.payload = b"1"
        self.go = asyncio.Event()

    def check(self, topic: str, payload: bytes) -> None:
        pass

    async def run(self, task: Task, ctx: Context) -> Outcome:
        self.begun.append((task.request.job_id, task.attempt))
        self.tasks.append(task)
        await self.go.wait()
        return Outcome(JobState.SUCCEEDED, self.payload)

    async def close(self) -> None:
        pass


class CountingBlobs(MemoryBlobs):
    stored = 0

    async def put(self, data: bytes, media_type: str = JSON) -> str:
        self.stored += 1
        return await super().put(data, media_type)


class WorkerBench:
    """A worker, and everything that it says."""

    def __init__(
        self,
        slots: int = 1,
        executor: Waiting | None = None,
        make_log: MakeStartLog | None = None,
    ) -> None:
        self.bus, self.executor = MemoryBus(), executor or Waiting()
        self.said: list[AnyMessage] = []
        for subject in (HANDSHAKE, RESULT):
            self.bus.subscribe(subject, self._hear)
        options = WorkerOptions(worker_id="w", slots=slots, drain_timeout=5.0)
        self.clock = clock = LoopClock(asyncio.get_running_loop())
        self.blobs = CountingBlobs(inline_limit=0)
        self.worker = Worker(self.bus, self.blobs, [self.executor], clock, options, make_log)
        self.task = asyncio.ensure_future(self.worker.run())

    async def _hear(self, messages: list[AnyMessage]) -> None:
        self.said.extend(messages)

    async def welcome(self, start_logs: str = "") -> None:
        await asyncio.sleep(0.01)
        (hello,) = self.heard(Handshake)
        await self.tell(Welcomed(hello.session, start_logs))

    async def tell(self, *messages: AnyMessage) -> None:
        self.bus.publish(jobs_of("w"), messages)
        await asyncio.sleep(0.02)

    def heard(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]

    async def end(self) -> None:
        self.executor.go.set()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.bus.close()


def dispatch(job_id: str = "a", attempt: int = 1, **fields: Any) -> Dispatch:
    return Dispatch(a_request(job_id, **fields), attempt, 60.0, fields.get("deadline"))


def on_virtual_time(test: Any) -> Any:
    @wraps(test)
    def run(*args: Any, **given: Any) -> None:
        loop = VirtualLoop()
        try:
            loop.run_until_complete(test(*args, **given))
        finally:
            loop.close()

    return run


@on_virtual_time
async def test_an_idempotent_job_begins_at_once() -> None:
    site = WorkerBench()
    await site.welcome()
    await site.tell(dispatch(idempotent=True))
    assert site.executor.begun == [("a", 1)]
    assert site.heard(Started) == [Started("a", 1, "w")]
    await site.end()


@on_virtual_time
async def test_another_begins_when_its_start_is_confirmed() -> None:
    site = WorkerBench()
    await site.welcome()
    await site.tell(dispatch())
    assert site.executor.begun == []
    assert site.heard(Started) == [Started("a", 1, "w", confirm=True)]
    await site.tell(Confirmed((("a", 1),)))
    assert site.executor.begun == [("a", 1)]
    await site.end()


@on_virtual_time
async def test_a_job_that_is_refused_its_start_never_begins() -> None:
    site = WorkerBench()
    await site.welcome()
    await site.tell(dispatch())
    await site.tell(JobCancel("a", 1, "not live", "scheduler"))
    await site.tell(Confirmed((("a", 1),)))
    assert site.executor.begun == []
    await site.end()


@pytest.mark.seed("001", "6.9")
@on_virtual_time
async def test_a_dispatch_that_comes_twice_runs_once() -> None:
    site = WorkerBench(slots=2)
    await site.welcome()
    twice = dispatch(idempotent=True)
    await site.tell(twice, twice)
    site.executor.go.set()
    await asyncio.sleep(0.1)
    await site.tell(twice)
    assert site.executor.begun == [("a", 1)]
    assert len(site.heard(Finished)) == 1
    await site.end()


@on_virtual_time
async def test_a_dispatch_that_comes_twice_while_it_waits_runs_once() -> None:
    site = WorkerBench(slots=1)
    await site.welcome()
    waiting = dispatch("b", idempotent=True)
    await site.tell(dispatch("a", idempotent=True), waiting, waiting)
    site.executor.go.set()
    await asyncio.sleep(0.1)
    assert site.executor.begun == [("a", 1), ("b", 1)]
    await site.end()


@on_virtual_time
async def test_a_new_attempt_is_no_repeat() -> None:
    site = WorkerBench(slots=2)
    await site.welcome()
    await site.tell(dispatch(attempt=1, idempotent=True), dispatch(attempt=2, idempotent=True))
    assert site.executor.begun == [("a", 1), ("a", 2)]
    await site.end()


@on_virtual_time
async def test_a_worker_that_was_not_welcomed_takes_nothing() -> None:
    site = WorkerBench()
    await site.tell(dispatch(idempotent=True))
    assert site.executor.begun == []
    await site.end()


@on_virtual_time
async def test_what_can_not_be_started_is_handed_back() -> None:
    site = WorkerBench(slots=1)
    await site.welcome()
    await site.tell(dispatch("a", idempotent=True), dispatch("b", idempotent=True))
    await asyncio.sleep(2)
    assert [back.job_id for back in site.heard(Returned)] == ["b"]
    await site.end()


@on_virtual_time
async def test_a_worker_that_is_leaving_says_so_whenever_it_introduces_itself() -> None:
    site = WorkerBench()
    await site.welcome()
    await site.tell(dispatch(idempotent=True))
    site.task.cancel()
    await asyncio.sleep(0.01)
    site.said.clear()
    site.worker.announce(2)
    await asyncio.sleep(0.01)
    kinds = [type(message) for message in site.said if isinstance(message, Handshake | Farewell)]
    assert kinds == [Handshake, Farewell]
    await site.end()


# -- runners ------------------------------------------------------------------------------


LEFT_BEHIND: ContextVar[str] = ContextVar("left_behind", default="")


class Short(Waiting):
    """Jobs that end at once, except those of a topic that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    async def run(self, task: Task, ctx: Context) -> Outcome:
        self.begun.append((task.request.job_id, task.attempt))
        self.seen.append(LEFT_BEHIND.get())
        LEFT_BEHIND.set(task.request.job_id)
        if task.request.topic == "job.waits":
            await self.go.wait()
        return Outcome(JobState.SUCCEEDED, self.payload)


@on_virtual_time
async def test_a_job_does_not_see_the_context_variables_of_another() -> None:
    site = WorkerBench(slots=2, executor=Short())
    await site.welcome()
    await site.tell(*(dispatch(f"j{n}", idempotent=True) for n in range(50)))
    assert isinstance(site.executor, Short)
    assert site.executor.seen == [""] * 50
    assert len(site.heard(Finished)) == 50
    await site.end()


@on_virtual_time
async def test_only_what_has_not_ended_by_then_is_reported_as_started() -> None:
    site = WorkerBench(slots=4, executor=Short())
    await site.welcome()
    short = [dispatch(f"j{n}", idempotent=True) for n in range(20)]
    await site.tell(dispatch("long", topic="job.waits", idempotent=True), *short)
    assert site.heard(Started) == [Started("long", 1, "w")]
    assert len(site.heard(Finished)) == 20
    await site.end()


@on_virtual_time
async def test_jobs_that_wait_fill_the_slots_and_no_more() -> None:
    site = WorkerBench(slots=32, executor=Short())
    await site.welcome()
    waiting = [dispatch(f"w{n}", topic="job.waits", idempotent=True) for n in range(40)]
    await site.tell(*waiting)
    assert len(site.executor.begun) == 32
    site.executor.go.set()
    await asyncio.sleep(0.1)
    assert len(site.heard(Finished)) == 40
    await site.end()


@on_virtual_time
async def test_a_waiting_job_that_is_cancelled_ends_without_beginning() -> None:
    site = WorkerBench(slots=1)
    await site.welcome()
    await site.tell(dispatch("a", idempotent=True), dispatch("b", idempotent=True))
    await site.tell(JobCancel("b", 1, "no longer needed", "user"))
    (finished,) = site.heard(Finished)
    assert (finished.result.job_id, finished.result.status) == ("b", JobState.CANCELLED)
    assert site.executor.begun == [("a", 1)]
    await site.end()


class FullLog:
    """A start log that has no space for some starts, and has others revoked."""

    def begin(self, job_id: str, attempt: int) -> bool:
        if job_id == "full":
            raise OSError(errno.ENOSPC, "no space left on device")
        return job_id != "revoked"

    def close(self, *, keep: bool) -> None:
        pass


@on_virtual_time
async def test_what_can_not_be_logged_or_was_revoked_is_handed_back_and_never_begins() -> None:
    site = WorkerBench(slots=2, make_log=lambda *_: FullLog())
    await site.welcome("a folder")
    await site.tell(dispatch("full"), dispatch("revoked"), dispatch("fine"))
    assert site.executor.begun == [("fine", 1)]
    assert [back.job_id for back in site.heard(Returned)] == ["full", "revoked"]
    assert "no space left" in site.heard(Returned)[0].reason
    await site.end()


# -- constraints --------------------------------------------------------------------------


async def result_of(site: WorkerBench, constraints: Constraints | None) -> JobResult:
    await site.welcome()
    await site.tell(replace(dispatch(idempotent=True), constraints=constraints))
    site.executor.go.set()
    await asyncio.sleep(0.1)
    (finished,) = site.heard(Finished)
    assert isinstance(finished.result, JobResult)
    return finished.result


@on_virtual_time
async def test_what_the_rules_demand_reaches_the_executor() -> None:
    site = WorkerBench()
    demands = Constraints(max_memory=5, network=(), read_only=True)
    assert (await result_of(site, demands)).status is JobState.SUCCEEDED
    assert [task.constraints for task in site.executor.tasks] == [demands]
    await site.end()


@on_virtual_time
async def test_a_result_larger_than_the_rules_allow_fails_the_job_and_is_not_stored() -> None:
    site = WorkerBench()
    site.executor.payload = b"12345"
    result = await result_of(site, Constraints(max_output=4))
    assert (result.status, result.error_code) == (JobState.FAILED, "OUTPUT_LIMIT")
    assert "5 bytes" in (result.error_message or "")
    assert "4" in (result.error_message or "")
    assert result.result_ptr is None
    assert site.blobs.stored == 0
    await site.end()


@on_virtual_time
async def test_a_result_as_large_as_the_rules_allow_is_stored() -> None:
    site = WorkerBench()
    site.executor.payload = b"1234"
    result = await result_of(site, Constraints(max_output=4))
    assert result.status is JobState.SUCCEEDED
    assert result.result_ptr is not None
    assert site.blobs.stored == 1
    await site.end()


class Leaving(Waiting):
    """Its jobs leave files first."""

    left: tuple[Artifact, ...] = ()

    async def run(self, task: Task, ctx: Context) -> Outcome:
        await ctx.artifact("a.bin", b"12345")
        return replace(await super().run(task, ctx), artifacts=self.left)


class Keeping(WorkerBench):
    """With an engine that keeps every checkpoint."""

    def __init__(self, executor: Leaving) -> None:
        super().__init__(executor=executor)
        self.bus.subscribe(CHECKPOINT, self._keep)

    async def _keep(self, messages: list[AnyMessage]) -> None:
        for one in messages:
            assert isinstance(one, Checkpointed)
            kept = CheckpointKept(one.job_id, one.attempt, one.n)
            self.bus.publish(jobs_of("w"), [kept])


@pytest.mark.parametrize(("most", "names"), [(4, []), (5, ["a.bin"])])
@run_async
async def test_a_cancelled_job_keeps_no_more_files_than_the_rules_allow(
    most: int, names: list[str]
) -> None:
    site = Keeping(Leaving())
    await site.welcome()
    demands = Constraints(max_output=most)
    await site.tell(replace(dispatch(idempotent=True), constraints=demands))
    await soon(lambda: site.executor.begun)
    await site.tell(JobCancel("a", 1, "enough", "user"))
    finished = await soon(lambda: site.heard(Finished))
    assert finished[0].result.status is JobState.CANCELLED
    assert [left.name for left in finished[0].result.artifacts] == names
    await site.end()


@run_async
async def test_a_result_with_too_many_files_fails_and_has_none_of_them() -> None:
    executor = Leaving()
    executor.left = tuple(
        Artifact(f"{n}", 1, "0" * 64, "text/plain", f"blob:sha256-{'0' * 64}")
        for n in range(MAX_ARTIFACTS)
    )
    site = Keeping(executor)
    await site.welcome()
    site.executor.go.set()
    await site.tell(dispatch(idempotent=True))
    await soon(lambda: site.heard(Finished))
    result = site.heard(Finished)[0].result
    assert (result.status, result.error_code) == (JobState.FAILED, "TOO_LARGE")
    assert [left.name for left in result.artifacts] == ["a.bin"]
    await site.end()


@on_virtual_time
async def test_without_a_limit_any_result_is_stored() -> None:
    for constraints in (None, Constraints(), Constraints(max_runtime=5)):
        site = WorkerBench()
        site.executor.payload = b"1" * 10_000
        assert (await result_of(site, constraints)).status is JobState.SUCCEEDED
        await site.end()


@pytest.mark.parametrize("jump", [7200.0, -7200.0])
@pytest.mark.parametrize(
    ("left", "limit", "code"), [(None, 60.0, "TIMEOUT"), (40.0, 40.0, "DEADLINE_EXCEEDED")]
)
@on_virtual_time
async def test_what_runs_ends_at_its_limit_however_the_wall_clock_is_set(
    left: float | None, limit: float, code: str, jump: float
) -> None:
    site = WorkerBench()
    await site.welcome()
    deadline = None if left is None else site.clock.now() + left
    await site.tell(dispatch(idempotent=True, deadline=deadline))
    site.clock.jump(jump)
    await asyncio.sleep(limit - 1)
    assert site.heard(Finished) == []
    await asyncio.sleep(2)
    (finished,) = site.heard(Finished)
    assert (finished.result.status, finished.result.error_code) == (JobState.TIMEOUT, code)
    await site.end()


class Parents(Waiting):
    """Waits for a child in jobs named so, and counts how many others run at once."""

    def __init__(self) -> None:
        super().__init__()
        self.child_ended = asyncio.Event()
        self.running = self.most = 0

    async def run(self, task: Task, ctx: Context) -> Outcome:
        if task.request.job_id != "parent":
            return await self._work(super().run(task, ctx))
        assert isinstance(ctx, Attempt)
        ctx.waits.begin(["child"])
        await self.child_ended.wait()
        await ctx.waits.end(["child"])
        return await self._work(super().run(task, ctx))

    async def _work(self, work: Coroutine[Any, Any, Outcome]) -> Outcome:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await work
        finally:
            self.running -= 1


@on_virtual_time
async def test_a_parent_does_not_go_on_in_the_slot_of_a_job_whose_start_was_just_confirmed() -> (
    None
):
    executor = Parents()
    site = WorkerBench(executor=executor)
    await site.welcome()
    await site.tell(dispatch("parent", idempotent=True))
    await site.tell(dispatch("other"))
    executor.child_ended.set()
    await asyncio.sleep(0.02)
    await site.tell(Confirmed((("other", 1),)), Resumed("parent", 1))
    assert executor.begun == [("other", 1)]
    executor.go.set()
    await asyncio.sleep(0.02)
    assert executor.begun == [("other", 1), ("parent", 1)]
    assert executor.most == 1
    await site.end()
