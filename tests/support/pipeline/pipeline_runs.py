"""A place to run pipelines in: an engine of dicts that keeps the real one's rules for rows.

Rows replace those of the same name and number, notes are numbered, long checkpoints are kept
message by message, and an attempt that is not live any more is refused. Runs go through
`PipelineExecutor.run`, and what a test sees of them is folded as for a user.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.core.errors import NotFound, Superseded
from penstock.core.job import Job, JobRequest, JobResult
from penstock.core.journal import Transition
from penstock.core.ledger import Step
from penstock.core.pointer import encode_data
from penstock.core.steps import check_notes, size_of, split_rows
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.clock import Clock, SystemClock
from penstock.ports.executor import Environment, Interrupted, Outcome, Task
from penstock.ports.store import StepPage, StepQuery
from penstock.testing.clock import LoopClock, VirtualLoop
from penstock.testing.context import RecordingContext
from penstock.workloads.pipeline.breakers import Breakers
from penstock.workloads.pipeline.calls import Pools
from penstock.workloads.pipeline.context import RunOptions, RunScope
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.executor import PipelineExecutor
from penstock.workloads.pipeline.orchestrator import AsyncPipelineOrchestrator
from penstock.workloads.pipeline.records import (
    ItemRecord,
    PipelineEvent,
    PipelineRecord,
    StageRecord,
)
from penstock.workloads.pipeline.rows import RunRows
from penstock.workloads.pipeline.service import RunReader

_ENDINGS = {
    JobState.SUCCEEDED: JobEvent.SUCCEED,
    JobState.FAILED: JobEvent.FAIL,
    JobState.CANCELLED: JobEvent.CANCEL,
    JobState.TIMEOUT: JobEvent.EXPIRE,
    JobState.DENIED: JobEvent.DENY,
}


class MemoryState:
    """Shared values in a dict."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    async def read(self, name: str) -> bytes | None:
        await asyncio.sleep(0)
        return self.values.get(name)

    async def read_all(self, prefix: str) -> dict[str, bytes]:
        return {name: self.values[name] for name in sorted(self.values) if name.startswith(prefix)}

    async def write(self, name: str, value: bytes | None) -> None:
        if value is None:
            self.values.pop(name, None)
        else:
            self.values[name] = value

    async def replace(self, name: str, before: bytes | None, value: bytes) -> bool:
        await asyncio.sleep(0)
        if self.values.get(name) != before:
            return False
        self.values[name] = value
        return True


class MemoryEngine:
    """Jobs, their rows and their histories."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.jobs: dict[str, Job] = {}
        self.rows: dict[str, dict[tuple[str, int], Step]] = {}
        self.entries: dict[str, list[Transition]] = {}
        self.messages: list[list[Step]] = []
        """The rows of every message that was kept."""
        self.read_rows = 0
        self.before_message: Callable[[Sequence[Step]], Awaitable[None]] | None = None
        """Called when a message comes, before it is looked at."""
        self.after_message: Callable[[], None] | None = None

    def accept(self, request: JobRequest) -> Job:
        now = self.clock.now()
        job = Job(
            seq=len(self.jobs) + 1,
            request=request,
            state=JobState.PENDING,
            version=1,
            accepted_at=now,
            updated_at=now,
        )
        self.jobs[request.job_id] = job
        self._enter(job, JobEvent.ACCEPT, JobState.PENDING)
        return job

    def begin(self, job_id: str) -> Job:
        """The next attempt: whoever had the job before can't write any more."""
        job, now = self.jobs[job_id], self.clock.now()
        started = now if job.started_at is None else job.started_at
        job = replace(job, state=JobState.RUNNING, attempt=job.attempt + 1, started_at=started)
        self.jobs[job_id] = job
        event = JobEvent.START if job.attempt == 1 else JobEvent.REDISPATCH
        self._enter(job, event, JobState.RUNNING)
        return job

    def end(
        self,
        job_id: str,
        state: JobState,
        code: str | None = None,
        message: str | None = None,
        pointer: str | None = None,
    ) -> Job:
        job = self.jobs[job_id]
        result = JobResult(
            job_id=job_id, status=state, error_code=code, error_message=message, result_ptr=pointer
        )
        job = replace(job, state=state, finished_at=self.clock.now(), result=result)
        self.jobs[job_id] = job
        self._enter(job, _ENDINGS[state], state)
        return job

    async def write(
        self, job_id: str, attempt: int, rows: Sequence[Step], notes: Sequence[str] = ()
    ) -> None:
        """As `ctx.checkpoint`: message by message, each of them whole or not at all."""
        checked = check_notes(notes)
        messages = split_rows(rows) or ([([], 0)] if checked else [])
        for place, (some, _) in enumerate(messages, 1):
            if self.before_message is not None:
                await self.before_message(some)
            await asyncio.sleep(0)
            self._keep(job_id, attempt, some, checked if place == len(messages) else ())

    def _keep(
        self, job_id: str, attempt: int, rows: Sequence[Step], notes: tuple[str, ...]
    ) -> None:
        job, now = self.jobs[job_id], self.clock.now()
        if job.attempt != attempt or job.is_final:
            raise Superseded(f"attempt {attempt} of job {job_id} is not live")
        kept = self.rows.setdefault(job_id, {})
        for row in rows:
            kept[row.name, row.n] = replace(row, at=row.at or now, attempt=attempt)
        for note in notes:
            self._enter(job, JobEvent.NOTE, job.state, note)
        self.messages.append(list(rows))
        if self.after_message is not None:
            self.after_message()

    def _enter(self, job: Job, event: JobEvent, after: JobState, reason: str = "") -> None:
        entries = self.entries.setdefault(job.job_id, [])
        entries.append(
            Transition(
                job_id=job.job_id,
                n=len(entries) + 1,
                before=job.state,
                event=event,
                after=after,
                attempt=job.attempt,
                actor="worker",
                at=self.clock.now(),
                reason=reason,
            )
        )

    # -- what is asked of an engine -----------------------------------------------

    async def read_steps(self, job_id: str, query: StepQuery | None = None) -> StepPage:
        await asyncio.sleep(0)
        query = query or StepQuery()
        rows = self.rows.get(job_id, {})
        found = [
            (size_of(rows[place]), rows[place])
            for place in sorted(rows)
            if query.name in (None, place[0])
            and (query.after is None or place > query.after)
            and (not query.outcomes or rows[place].outcome in query.outcomes)
        ]
        page = StepPage.of(found, query.limit)
        self.read_rows += len(page.steps)
        return page

    async def get(self, job_id: str) -> Job | None:
        return self.jobs.get(job_id)

    async def find(self, query: Any) -> list[Job]:
        raise NotImplementedError

    async def history(self, job_id: str) -> list[Transition]:
        return self.entries.get(job_id, [])


class _Api:
    """The part of the engine's API that an executor of pipelines uses."""

    def __init__(self, engine: MemoryEngine) -> None:
        self._engine, self.read_steps = engine, engine.read_steps

    async def get(self, job_id: str) -> Job:
        job = await self._engine.get(job_id)
        if job is None:
            raise NotFound(f"no job {job_id}")
        return job


class Attempt(RecordingContext):
    """One attempt of a run, and the worker's part in it."""

    def __init__(self, place: Place, job: Job) -> None:
        super().__init__(job.request, attempt=job.attempt, environment=place.environment)
        self._place = place
        self.task: asyncio.Task[PipelineRecord]
        self._executing: asyncio.Task[Outcome] | None = None

    async def checkpoint(self, rows: Sequence[Step], notes: Sequence[str] = ()) -> None:
        await self._place.engine.write(self.job_id, self.attempt, rows, notes)

    def stop(self, how: JobState, reason: str) -> None:
        """As the worker does when a job is cancelled, is out of time, or the worker stops."""
        self.ended_as = how
        self.cancel.request(reason)
        if self._executing is not None:
            self._executing.cancel()

    def cancel_run(self, reason: str = "enough") -> None:
        job = self._place.engine.jobs[self.job_id]
        if not job.is_final:
            self._place.engine.jobs[self.job_id] = replace(job, cancel_requested=True)
        self.stop(JobState.CANCELLED, reason)

    async def perform(self, pipeline: Definition) -> PipelineRecord:
        place = self._place
        executor = PipelineExecutor([pipeline], place.options)
        payload = await place.blobs.get(self.request.context_ptr)
        task = Task(self.request, self.attempt, payload, deadline=float("inf"))
        try:
            self._executing = asyncio.create_task(executor.run(task, self))
            if self.cancel.requested:
                self._executing.cancel()
            outcome = await self._executing
        except asyncio.CancelledError:
            outcome = Outcome(self.ended_as, error_message=self.cancel.reason)
        finally:
            await executor.close()
        pointer = None
        if outcome.payload is not None:
            pointer = await place.blobs.put(outcome.payload)
        if place.engine.jobs[self.job_id].attempt != self.attempt:
            raise Superseded(f"attempt {self.attempt} of job {self.job_id} is not live")
        place.engine.end(
            self.job_id, outcome.status, outcome.error_code, outcome.error_message, pointer
        )
        return await place.record(self.job_id)

    def heard(self, text: str) -> bool:
        return any(text in line for _, line in self.lines)

    @property
    def fractions(self) -> list[float | None]:
        return [fraction for fraction, _ in self.progressed]


class Place:
    """An engine, blobs and a clock, and a way to run pipelines with them."""

    def __init__(self, *, blobs: Any = None, clock: Clock | None = None, **options: Any) -> None:
        loop = asyncio.get_running_loop()
        virtual = isinstance(loop, VirtualLoop)
        self.clock: Clock = clock or (LoopClock(loop) if virtual else SystemClock())
        self.engine = MemoryEngine(self.clock)
        self.state = MemoryState()
        self.blobs = blobs or MemoryBlobs()
        self.options = RunOptions(**options)
        self.reader = RunReader(self.engine, self.blobs, self.state, self.clock)
        api: Any = _Api(self.engine)
        self.environment = Environment("me", self.clock, self.blobs, api, self.state)
        self.attempt: Attempt
        """The one that was begun last."""

    async def create(
        self, pipeline: Definition, config: Any = None, job_id: str = "job", **more: Any
    ) -> Job:
        payload = msgspec.json.encode(pipeline.plain_config(config))
        pointer = encode_data(payload)
        await PipelineExecutor([pipeline]).open(self.environment)
        return self.engine.accept(
            JobRequest(job_id=job_id, topic=pipeline.topic, context_ptr=pointer, **more)
        )

    def next_attempt(self, pipeline: Definition, job_id: str = "job") -> Attempt:
        """The next attempt of a run, under way."""
        self.attempt = attempt = Attempt(self, self.engine.begin(job_id))
        attempt.task = asyncio.ensure_future(attempt.perform(pipeline))
        return attempt

    async def begin(
        self, pipeline: Definition, config: Any = None, job_id: str = "job", **more: Any
    ) -> Attempt:
        """A new run, under way."""
        await self.create(pipeline, config, job_id, **more)
        return self.next_attempt(pipeline, job_id)

    async def run(
        self, pipeline: Definition, config: Any = None, job_id: str = "job", **more: Any
    ) -> PipelineRecord:
        """A new run, to its end."""
        return await (await self.begin(pipeline, config, job_id, **more)).task

    async def go_on(self, pipeline: Definition, job_id: str = "job") -> PipelineRecord:
        """The next attempt of a run, to its end."""
        return await self.next_attempt(pipeline, job_id).task

    async def orchestrator(
        self, pipeline: Definition, job_id: str = "job", **more: Any
    ) -> AsyncPipelineOrchestrator:
        """The next attempt of a run, without an executor."""
        self.attempt = attempt = Attempt(self, self.engine.begin(job_id))
        state, _, _ = await RunRows(self.engine.read_steps, job_id).head()
        scope = self.scope(pipeline, await self.record(job_id))
        return AsyncPipelineOrchestrator(scope, state, attempt.checkpoint, **more)

    def scope(self, pipeline: Definition, record: PipelineRecord) -> RunScope:
        """What a worker gives the last attempt."""
        return RunScope(
            pipeline,
            record,
            self.attempt,
            self.environment,
            options=self.options,
            pools=Pools(self.options),
            breakers=Breakers(self.state, self.clock),
        )

    async def crash(self, attempt: Attempt) -> None:
        """The process of an attempt dies: nothing of it is written any more."""
        job = self.engine.jobs[attempt.job_id]
        self.engine.jobs[attempt.job_id] = replace(job, attempt=job.attempt + 1)
        attempt.stop(JobState.FAILED, "its process died")
        with suppress(Superseded, Interrupted):
            await attempt.task

    async def crash_after(self, messages: int, pipeline: Definition, job_id: str = "job") -> bool:
        """The next attempt, whose process dies when so many more messages were kept. Whether it
        came to that."""
        left = messages

        def count() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                job = self.engine.jobs[job_id]
                self.engine.jobs[job_id] = replace(job, attempt=job.attempt + 1)

        self.engine.after_message = count
        try:
            await self.go_on(pipeline, job_id)
        except Superseded:
            await turns()
            return True
        finally:
            self.engine.after_message = None
        return False

    # -- what a user sees ---------------------------------------------------------

    async def record(self, job_id: str = "job") -> PipelineRecord:
        return await self.reader.record(self.engine.jobs[job_id])

    async def items(self, stage: str, job_id: str = "job") -> list[ItemRecord]:
        record = await self.record(job_id)
        return await self.reader.items(record, stage, -1, 100_000, ())

    async def outputs(self, stage: str, job_id: str = "job") -> list[Any]:
        """What its items gave, as it is stored."""
        pointers = [item.output for item in await self.items(stage, job_id) if item.output]
        return [msgspec.json.decode(await self.blobs.get(pointer)) for pointer in pointers]

    async def events(self, job_id: str = "job") -> list[PipelineEvent]:
        return [event async for event in self.reader.events(self.engine.jobs[job_id])]

    async def result(self, job_id: str = "job") -> Any:
        """What the run's job returned."""
        result = self.engine.jobs[job_id].result
        assert result is not None
        assert result.result_ptr is not None
        return msgspec.json.decode(await self.blobs.get(result.result_ptr))


def stage_of(record: PipelineRecord, name: str) -> StageRecord:
    stage = record.stage(name)
    assert stage is not None
    return stage


def statuses(record: PipelineRecord) -> dict[str, str]:
    return {stage.name: str(stage.status) for stage in record.stages}


def reasons(record: PipelineRecord) -> dict[str, str]:
    return {stage.name: stage.reason for stage in record.stages}


async def turns(count: int = 50) -> None:
    """Let everything that can go on go on."""
    for _ in range(count):
        await asyncio.sleep(0)


async def within(seconds: float, work: Awaitable[Any]) -> Any:
    async with asyncio.timeout(seconds):
        return await work
