"""Runs batches as canonical jobs: lines are checked, submitted as child jobs, and answered.

The child jobs are what a batch remembers. Their ids are made of its id and the number of the line,
so an attempt that submits a line again finds its job, and what is computed is computed once. When
all have ended, one pass over the input writes the files of the batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from penstock.core.check import MAX_TIMEOUT
from penstock.core.errors import (
    Conflict,
    IllegalMove,
    InvalidRequest,
    JobEnded,
    NotFound,
    PenstockError,
    Superseded,
    TooMany,
    UnknownTopic,
)
from penstock.core.job import Job, JobRequest, Priority, TopicDefaults
from penstock.core.ledger import Step
from penstock.lifecycles.batch import BATCH, ENDS, BatchEvent, BatchStatus
from penstock.lifecycles.canonical import JobState
from penstock.ports.clock import wait_at_most
from penstock.ports.engine_api import MAX_WAITED
from penstock.ports.executor import Context, Environment, Outcome, Task
from penstock.ports.store import JobQuery
from penstock.workloads.llm.batch_lines import Line, LineCheck, off_loop, raw_lines, read_line
from penstock.workloads.llm.batches import (
    ROW,
    TOPIC,
    Batch,
    BatchFormat,
    FilePurpose,
    FileRecords,
    RequestCounts,
    StoredFile,
    read_batch,
)
from penstock.workloads.llm.values import model_of

log = logging.getLogger(__name__)

LABEL = "openai.batch"
CUSTOM_ID = "openai.custom_id"
JSON_LINES = "application/jsonl"
LATE = "DEADLINE_EXCEEDED"
"""The error code of a job that ended because its batch's time was over."""
_EXPIRED = {
    "code": "batch_expired",
    "message": "the batch's completion window ended before this request ran",
}
_CANCELLED = {
    "code": "batch_cancelled",
    "message": "the batch was cancelled before this request ran",
}
_CHUNK = 200
"""Lines that are submitted in one commit, and whose answers are written together."""
_CHUNK_BYTES = 4 << 20
_PIECE = 256 << 10
"""Bytes of a file that are written at once."""
PATIENCE = 1.0
"""Seconds until a model that nobody serves is looked for again."""
_TRY_AGAIN = 5.0
"""Seconds after which a batch that could not go on is tried again, as when the disk is full."""
_COUNTED = 0.25
"""Seconds after which lines that have ended are counted, at the least."""
_LOOK_UPS = 4000
"""Lines that are looked up in a second, at most, to count them."""
_BREATH = 50
"""Lines after which others get a turn."""
_MAX_ATTEMPTS = 100
"""How often a batch may lose its worker: it goes on where it was, so that costs little."""


@dataclass(frozen=True)
class BatchOptions:
    batch_format: BatchFormat
    knows: Callable[[str], bool]
    """Whether somebody serves this topic, or may."""
    room: int = 10_000
    """Jobs of one batch that may be unfinished at a time."""
    longest: int = 64 << 20
    """Bytes that a line may have."""
    settled_at: float = 0.0
    """When a model without workers counts as unknown: those of an earlier engine need some
    seconds to come back."""


class BatchExecutor:
    """Executes `job.batch`."""

    resumable = True
    topics: tuple[str, ...] = (TOPIC,)
    topic_defaults: Mapping[str, TopicDefaults] = {
        TOPIC: TopicDefaults(timeout=MAX_TIMEOUT, idempotent=True, max_attempts=_MAX_ATTEMPTS)
    }

    def __init__(self, options: BatchOptions) -> None:
        self.options = options
        self.runs: dict[str, BatchRun] = {}
        """The batches that run here, by id."""

    def check(self, topic: str, payload: bytes) -> None:
        batch, endpoints = read_batch(payload), self.options.batch_format.endpoints
        if batch.endpoint not in endpoints:
            raise InvalidRequest(
                "endpoint",
                f"{batch.endpoint[:60]!r} takes no batches",
                hint=f"one of {', '.join(endpoints)}",
            )
        if batch.status is not BatchStatus.VALIDATING:
            raise InvalidRequest("status", f"must be {BatchStatus.VALIDATING}")

    async def run(self, task: Task, ctx: Context) -> Outcome:
        if ctx.environment is None:
            message = "there is no engine behind this worker to submit its lines to"
            return Outcome(JobState.FAILED, error_code="NO_ENGINE", error_message=message)
        try:
            self.check(task.request.topic, task.payload)
        except InvalidRequest as wrong:
            return Outcome(JobState.FAILED, error_code="BAD_INPUT", error_message=str(wrong))
        environment = ctx.environment
        job = await environment.api.get(ctx.job_id)
        record = task.payload
        async for row in ctx.steps(ROW):
            record = await environment.blobs.get(row.output)
        run = BatchRun(read_batch(record, job), ctx, environment, self.options)
        self.runs[ctx.job_id] = run
        try:
            return await self._see_through(run, ctx)
        finally:
            del self.runs[ctx.job_id]

    async def _see_through(self, run: BatchRun, ctx: Context) -> Outcome:
        """A run can be started again at any point. So a full disk or a store that fails is waited
        for, and a cancelled batch still writes its files."""
        while True:
            try:
                return await run.run()
            except asyncio.CancelledError:
                if ctx.ended_as is not JobState.CANCELLED:
                    raise
                if (me := asyncio.current_task()) is not None:
                    me.uncancel()
                with suppress(Conflict):  # it is being finished
                    await run.cancel()
            except Superseded:
                raise
            except Exception as error:
                known = isinstance(error, PenstockError)
                log.error("%s can't go on: %s", ctx.job_id, error, exc_info=not known)
                await run.pause(_TRY_AGAIN)

    async def close(self) -> None:
        pass


class BatchRun:
    """One attempt of one batch."""

    def __init__(
        self, batch: Batch, ctx: Context, environment: Environment, options: BatchOptions
    ) -> None:
        self.batch = batch
        self._ctx, self._options = ctx, options
        self._api, self._blobs, self._clock = environment.api, environment.blobs, environment.clock
        self._files = FileRecords(environment.state)
        self._news = asyncio.Event()
        self._moving = asyncio.Lock()
        self._done = self._failed = 0
        """Jobs of lines that have ended."""
        self._refused: dict[int, PenstockError | None] = {}
        """Lines without a job, and why; None if the batch was over before they could have one."""

    @property
    def view(self) -> Batch:
        """The record, with counts as of now."""
        if self.batch.in_progress_at is None or self.batch.finalizing_at is not None:
            return self.batch
        failed = self._failed + sum(error is not None for error in self._refused.values())
        counts = RequestCounts(self.batch.request_counts.total, self._done, failed)
        return replace(self.batch, request_counts=counts)

    async def run(self) -> Outcome:
        """Until the batch has ended. What it raises, another run may get past."""
        if self.batch.status is BatchStatus.VALIDATING:
            await self._validate()
        if self.batch.status is not BatchStatus.FAILED:
            if self.batch.in_progress_at is not None:
                await self._answer_lines()
                await self._finish()
            else:
                await self._move(BatchEvent.END, cancelled_at=self._clock.now())
        state, code = ENDS[self.batch.status]
        errors, payload = self.batch.errors, msgspec.json.encode(self.batch)
        message = errors[0].message if errors else f"the batch is {self.batch.status}"
        return Outcome(state, payload, error_code=code, error_message=message if code else None)

    async def cancel(self) -> None:
        """Ask for its end, durably. Raises Conflict if that is too late."""
        try:
            await self._move(BatchEvent.CANCEL, cancelling_at=self._clock.now())
        except IllegalMove:
            raise Conflict(
                f"batch {self.batch.id} is {self.batch.status}: it can't be cancelled any more"
            ) from None
        self._news.set()

    async def pause(self, seconds: float) -> None:
        """So long, or until there is news, or the batch's time is over."""
        left = self.batch.expires_at - self._clock.now()
        await wait_at_most(self._clock, min(seconds, left) if left > 0 else seconds, self._news)
        self._news.clear()

    async def _move(self, event: BatchEvent, **fields: object) -> None:
        """Move as the table says, durably. Raises IllegalMove."""
        async with self._moving:
            after = BATCH.after(self.batch.status, event)
            if after is self.batch.status:
                return
            changed = replace(self.batch, status=after, **fields)
            if not changed.has_ended:  # then its record is the result of its job
                record = await self._blobs.put(msgspec.json.encode(changed))
                await self._ctx.checkpoint([Step(ROW, 0, output=record, at=self._clock.now())])
            self.batch = changed

    @property
    def _is_late(self) -> bool:
        return self._clock.now() >= self.batch.expires_at

    @property
    def _is_over(self) -> bool:
        """Whether nothing more is to be begun."""
        return self.batch.status is BatchStatus.CANCELLING or self._is_late

    async def _read(self, start: int, length: int) -> bytes:
        """Raises NotFound, also for another tenant's file."""
        file = await self._files.get(self.batch.input_file_id)
        if file is None or file.tenant != self.batch.tenant:
            raise NotFound(f"no file {self.batch.input_file_id!r}", hint="it was deleted")
        return await self._blobs.read(file.pointer, start, length)

    # -- validating -----------------------------------------------------------------

    async def _validate(self) -> None:
        check = await self._check_lines()
        errors = check.conclude()
        unserved = () if errors else await self._unserved(check.topics)
        now = self._clock.now()
        with suppress(IllegalMove):  # it was cancelled meanwhile
            if errors:
                await self._move(BatchEvent.REFUSE, errors=errors, failed_at=now)
            else:
                counts = RequestCounts(check.count)
                await self._move(
                    BatchEvent.ACCEPT, in_progress_at=now, request_counts=counts, unserved=unserved
                )

    async def _check_lines(self) -> LineCheck:
        """What is wrong with them; breaks off when nobody wants to know any more."""
        check = LineCheck(self.batch.endpoint, self._options.batch_format)
        try:
            async for raw in raw_lines(self._read, self._options.longest):
                await off_loop(len(raw.data), check.look, raw.number, raw.data)
                if check.is_enough or self.batch.status is not BatchStatus.VALIDATING:
                    return check
                if raw.number % _BREATH == 0:
                    await asyncio.sleep(0)
        except (InvalidRequest, NotFound) as error:
            check.blame(error, None)
        return check

    async def _unserved(self, topics: Iterable[str]) -> tuple[str, ...]:
        """Decided once: later, a model whose workers are away is waited for."""
        knows, settled_at = self._options.knows, self._options.settled_at
        while unserved := tuple(topic for topic in topics if not knows(topic)):
            left = settled_at - self._clock.now()
            if left <= 0 or self.batch.status is not BatchStatus.VALIDATING:
                break
            await self.pause(min(PATIENCE, left))
        return unserved

    # -- in progress ----------------------------------------------------------------

    async def _answer_lines(self) -> None:
        """Until the job of each line has ended. The batch's own takes no slot meanwhile."""
        waits, some = self._ctx.waits, [job_id_of(self.batch.id, 1)]
        self._done = self._failed = 0
        self._refused.clear()
        stopping = asyncio.create_task(self._stop_when_over())
        if waits is not None:
            waits.begin(some)
        try:
            waiting: dict[str, None] = {}
            async for lines in self._chunks():
                while waiting and len(waiting) + len(lines) > self._options.room:
                    await self._count_ends(waiting, len(lines))
                waiting |= dict.fromkeys(await self._submit(lines))
            while waiting:
                await self._count_ends(waiting, len(waiting))
        except BaseException:
            if waits is not None:
                waits.leave(some)
            raise
        finally:
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
        if waits is not None:
            await waits.end(some)

    async def _chunks(self) -> AsyncIterator[list[Line]]:
        lines: list[Line] = []
        most, size = max(1, min(_CHUNK, self._options.room // 4)), 0
        async for raw in raw_lines(self._read, self._options.longest):
            if lines and (len(lines) >= most or size >= _CHUNK_BYTES):
                yield lines
                lines, size = [], 0
            lines.append(read_line(raw.number, raw.data, self.batch.endpoint))
            size += len(raw.data)
        if lines:
            yield lines

    async def _submit(self, lines: Sequence[Line]) -> list[str]:
        """Make them jobs, unless they are already. Returns the ids of their jobs; `_refused` has
        the lines without one."""
        while not self._is_over:
            made = await asyncio.gather(*map(self._request, lines))
            requests = [request for request in made if request is not None]
            try:
                if requests:
                    await self._api.submit(requests)
                return [request.job_id for request in requests]
            except TooMany as full:
                await self.pause(full.retry_after or PATIENCE)
            except UnknownTopic:
                await self.pause(PATIENCE)  # its workers are away
            except (InvalidRequest, Conflict) as error:
                if self._is_late:
                    break
                lines = [line for line in lines if line.number not in self._refused]
                if len(lines) > 1:
                    return [one for line in lines for one in await self._submit([line])]
                log.warning("line %d of %s: %s", lines[0].number, self.batch.id, error)
                self._refused[lines[0].number] = error
                return []
        found = []
        for line in lines:  # an earlier attempt may have submitted it
            try:
                found.append((await self._api.get(job_id_of(self.batch.id, line.number))).job_id)
            except NotFound:
                self._refused.setdefault(line.number, None)
        return found

    async def _request(self, line: Line) -> JobRequest | None:
        """None if its model does not exist."""
        batch, ask = self.batch, self._options.batch_format.ask
        try:
            asked = await off_loop(len(line.body), ask, batch.endpoint, line.body)
            if asked.topic in batch.unserved:
                raise UnknownTopic("model", f"the model {model_of(asked.topic)!r} does not exist")
        except (InvalidRequest, NotFound) as error:
            self._refused[line.number] = error
            return None
        labels = {LABEL: batch.id}
        if line.custom_id.isprintable():
            labels[CUSTOM_ID] = line.custom_id
        return JobRequest(
            job_id=job_id_of(batch.id, line.number),
            topic=asked.topic,
            priority=Priority.BATCH,
            context_ptr=await self._blobs.put(asked.payload),
            child_of=batch.id,
            workflow_id=batch.id,
            step_index=line.number,
            tenant=batch.tenant,
            principal=self._ctx.request.principal,
            labels=labels,
            deadline=batch.expires_at,
        )

    async def _stop_when_over(self) -> None:
        """End what has not ended; again and again, since a chunk may be just on its way."""
        while not self._is_over:
            await self.pause(MAX_TIMEOUT)
        cancelled = self.batch.cancelling_at is not None
        why = "its batch was cancelled" if cancelled else "its batch's completion window ended"
        query = JobQuery(child_of=self.batch.id, tenant=self.batch.tenant)
        while True:
            try:
                await self._api.cancel_many(query, reason=why)
            except PenstockError as error:
                log.error("the lines of %s can't be ended: %s", self.batch.id, error)
            await self._clock.sleep(PATIENCE)

    async def _count_ends(self, waiting: dict[str, None], enough: int) -> None:
        """Take those that have ended from `waiting`, once they are enough or some time is over."""
        some = [*islice(waiting, MAX_WAITED)]
        # The more lines are under way, the less often is each looked up to count them.
        pause = max(_COUNTED, len(some) / _LOOK_UPS)
        for end in await self._api.wait_many(some, min(enough, len(some)), timeout=pause):
            del waiting[end.job_id]
            self._done += end.job.state is JobState.SUCCEEDED
            self._failed += end.job.state is not JobState.SUCCEEDED and not self._was_ended(end.job)

    def _was_ended(self, job: Job) -> bool:
        """Whether it did not run because its batch is over."""
        late = job.result is not None and job.result.error_code == LATE
        return late or (job.state is JobState.CANCELLED and self._is_over)

    # -- finalizing -----------------------------------------------------------------

    async def _finish(self) -> None:
        """Every line has its answer, or will never have one: they become files."""
        counts = self.view.request_counts
        if self.batch.status is BatchStatus.IN_PROGRESS:
            now, left = self._clock.now(), counts.total - counts.completed - counts.failed
            with suppress(IllegalMove):  # it was cancelled meanwhile
                await self._move(
                    BatchEvent.FINALIZE,
                    finalizing_at=now,
                    expired_at=now if left else None,
                    request_counts=counts,
                )
        errors: dict[int, bool] = {}
        """Lines of the error file, and whether they failed: others did not run."""
        output = await self._keep_file("output", self._answers(errors))
        error = await self._keep_file("error", self._errors(errors)) if errors else None
        total, failed = counts.total, sum(errors.values())
        files = {
            "output_file_id": output,
            "error_file_id": error,
            "request_counts": RequestCounts(total, total - len(errors), failed),
        }
        now = self._clock.now()
        if self.batch.cancelling_at is not None:
            await self._move(BatchEvent.END, cancelled_at=now, **files)
        elif self.batch.expired_at is not None:
            await self._move(BatchEvent.EXPIRE, expired_at=now, **files)
        else:
            await self._move(BatchEvent.COMPLETE, completed_at=now, **files)

    async def _answers(self, errors: dict[int, bool]) -> AsyncIterator[bytes]:
        """The lines of the output file; those that are none go to `errors`."""
        piece = bytearray()
        async for lines in self._chunks():
            jobs = await self._jobs(lines)
            for line in lines:
                told = await self._told(line, jobs.get(line.number))
                if not told.is_answer:
                    errors[line.number] = told.is_run
                    continue
                piece += told.data
                if len(piece) >= _PIECE:
                    yield bytes(piece)
                    piece.clear()
        if piece:
            yield bytes(piece)

    async def _errors(self, errors: Mapping[int, bool]) -> AsyncIterator[bytes]:
        async for chunk in self._chunks():
            lines = [line for line in chunk if line.number in errors]
            jobs = await self._jobs(lines)
            for line in lines:
                yield (await self._told(line, jobs.get(line.number))).data

    async def _jobs(self, lines: Sequence[Line]) -> dict[int, Job]:
        """The jobs of lines, all of which have ended."""
        ids = {
            job_id_of(self.batch.id, line.number): line.number
            for line in lines
            if line.number not in self._refused
        }
        jobs: dict[int, Job] = {}
        while ids:  # fewer come at once if they are large
            for end in await self._api.wait_many([*ids], len(ids)):
                jobs[ids.pop(end.job_id)] = end.job
        return jobs

    async def _told(self, line: Line, job: Job | None) -> _OutputLine:
        error = self._refused.get(line.number)
        if error is not None:
            status, body = self._options.batch_format.refuse(error)
        elif job is None or self._was_ended(job):
            why = _EXPIRED if self.batch.cancelling_at is None else _CANCELLED
            return self._written(line, error=why)
        else:
            status, body = await self._answer(line, job)
        job_id = job_id_of(self.batch.id, line.number) if job is None else job.job_id
        response = {"status_code": status, "request_id": job_id, "body": msgspec.Raw(body)}
        return self._written(line, job_id, response=response)

    def _written(self, line: Line, job_id: str = "", **said: Any) -> _OutputLine:
        name = f"batch_req_{job_id or job_id_of(self.batch.id, line.number)}"
        told = {"id": name, "custom_id": line.custom_id, "response": None, "error": None, **said}
        status = said.get("response", {}).get("status_code", 0)
        return _OutputLine(msgspec.json.encode(told) + b"\n", status == 200, status != 0)

    async def _answer(self, line: Line, job: Job) -> tuple[int, bytes]:
        batch_format = self._options.batch_format
        if job.state is not JobState.SUCCEEDED:
            return batch_format.refuse(JobEnded(job))
        try:
            pointer = job.result.result_ptr if job.result is not None else None
            result = await self._blobs.get(pointer) if pointer else b""
            size, asked = len(line.body) + len(result), (self.batch.endpoint, line.body)
            return 200, await off_loop(size, batch_format.tell, *asked, job, result)
        except PenstockError as error:
            return batch_format.refuse(error)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return batch_format.refuse(InvalidRequest("result", f"can't be read: {error}"))

    async def _keep_file(self, kind: str, content: AsyncIterator[bytes]) -> str | None:
        """Under an id of its own for each batch: whoever does it again replaces it. None if it is
        empty."""
        stat = await self._blobs.put_stream(content, JSON_LINES)
        if not stat.size:
            return None
        batch, now = self.batch, self._clock.now()
        kept = batch.output_expires_after
        file = StoredFile(
            id=f"file-{batch.id}-{kind}",
            filename=f"{batch.id}_{kind}.jsonl",
            purpose=FilePurpose.BATCH_OUTPUT,
            created_at=now,
            tenant=batch.tenant,
            bytes=stat.size,
            expires_at=None if kept is None else now + kept,
            pointer=stat.uri,
        )
        await self._files.put(file)
        return file.id


class _OutputLine(NamedTuple):
    data: bytes
    is_answer: bool
    is_run: bool
    """False if its batch was over before."""


def job_id_of(batch_id: str, number: int) -> str:
    """The id of a line's job: submitting it again finds the same job."""
    return f"{batch_id}.{number:05}"
