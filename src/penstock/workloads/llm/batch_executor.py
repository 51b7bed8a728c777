"""Runs batches as canonical jobs: lines are checked, submitted as child jobs, and answered.

Lines go in chunks. The answers of a chunk whose jobs have all ended are blobs, and two rows of the
batch's job point to them; so the next attempt goes on with the chunks that have no rows. The
child jobs of these it finds by their ids, and submits only what is missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec
from msgspec.structs import replace

from penstock.core.check import MAX_TIMEOUT
from penstock.core.errors import (
    Conflict,
    IllegalMove,
    InvalidRequest,
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
from penstock.ports.executor import Context, Environment, Outcome, Task
from penstock.ports.store import JobQuery
from penstock.workloads.llm.batch_lines import (
    CANCELLED,
    EXPIRED,
    LATE,
    Line,
    LineCheck,
    LineWriter,
    OutputLine,
    job_id_of,
    off_loop,
    raw_lines,
    read_line,
)
from penstock.workloads.llm.batches import (
    ROW,
    TOPIC,
    Batch,
    BatchFormat,
    FileRecords,
    Purpose,
    RequestCounts,
    StoredFile,
    read_batch,
)
from penstock.workloads.llm.values import model_of

log = logging.getLogger(__name__)

LABEL = "openai.batch"
CUSTOM_ID = "openai.custom_id"
JSON_LINES = "application/jsonl"
_OUTPUT, _ERRORS = "output", "errors"
"""The names of a chunk's rows; `n` is its first line, `key` its last, `info` how many lines."""
_CHUNK = 200
"""Lines that are submitted in one commit, and whose answers are kept together."""
_CHUNK_BYTES = 4 << 20
_PIECE = 256 << 10
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


@dataclass
class _Chunk:
    """Lines that follow each other."""

    first: int
    last: int
    start: int
    """Where in the file they begin, and end."""
    end: int
    expected: list[int] = field(default_factory=list)
    """Those that have jobs."""
    refused: dict[int, PenstockError] = field(default_factory=dict)
    """Those that could not be made jobs."""
    jobs: dict[int, Job] = field(default_factory=dict)
    """By line, as they ended."""


class BatchRun:
    """One attempt of one batch."""

    def __init__(
        self, batch: Batch, ctx: Context, environment: Environment, options: BatchOptions
    ) -> None:
        self.batch = batch
        self._ctx, self._options = ctx, options
        self._api, self._blobs, self._clock = environment.api, environment.blobs, environment.clock
        self._files = FileRecords(environment.state)
        self._lines = LineWriter(batch.id, batch.endpoint, environment.blobs, options.batch_format)
        self._news = asyncio.Event()
        self._moving = asyncio.Lock()
        self._live = self._done = self._failed = 0
        """Lines of the chunks that have not ended; and lines that have."""

    @property
    def view(self) -> Batch:
        """The record, with counts as of now."""
        if self.batch.in_progress_at is None or self.batch.finalizing_at is not None:
            return self.batch
        counts = RequestCounts(self.batch.request_counts.total, self._done, self._failed)
        return replace(self.batch, request_counts=counts)

    async def run(self) -> Outcome:
        """Until the batch has ended. What it raises, another run may get past."""
        if self.batch.status is BatchStatus.VALIDATING:
            await self._validate()
        if self.batch.status is not BatchStatus.FAILED:
            if self.batch.in_progress_at is not None:
                if self.batch.status is not BatchStatus.FINALIZING:
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
        """Until each line has its answer in a chunk's rows. The job takes no slot meanwhile."""
        waits, some = self._ctx.waits, [job_id_of(self.batch.id, 1)]
        self._live = self._done = self._failed = 0
        stopping = asyncio.create_task(self._stop_when_over())
        if waits is not None:
            waits.begin(some)
        try:
            async with asyncio.TaskGroup() as group:
                async for chunk, lines in self._chunks():
                    while self._live + len(lines) > self._options.room and not self._is_over:
                        await self.pause(MAX_TIMEOUT)
                    self._live += len(lines)
                    await self._submit(chunk, lines)
                    group.create_task(self._see_chunk_through(chunk))
        except BaseException as error:
            if waits is not None:
                waits.leave(some)
            raise _only(error) from None
        finally:
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
        if waits is not None:
            await waits.end(some)

    async def _chunks(self) -> AsyncIterator[tuple[_Chunk, list[Line]]]:
        """The lines that have no rows yet."""
        done: set[int] = set()
        async for row in self._ctx.steps(_OUTPUT):
            done.update(range(row.n, int(row.key) + 1))
            self._done += int(row.info)
        async for row in self._ctx.steps(_ERRORS):
            errors, not_run = map(int, row.info.split())
            self._failed += errors - not_run
        lines: list[Line] = []
        most, start, end = max(1, min(_CHUNK, self._options.room // 4)), 0, 0
        async for raw in raw_lines(self._read, self._options.longest):
            full = len(lines) >= most or raw.at - start >= _CHUNK_BYTES
            if lines and (raw.number in done or full):
                yield _Chunk(lines[0].number, lines[-1].number, start, end), lines
                lines = []
            if raw.number in done:
                continue
            if not lines:
                start = raw.at
            lines.append(read_line(raw.number, raw.data, self.batch.endpoint))
            end = raw.end
        if lines:
            yield _Chunk(lines[0].number, lines[-1].number, start, end), lines

    async def _submit(self, chunk: _Chunk, lines: Sequence[Line]) -> None:
        """Make them jobs, unless they are already."""
        while not self._is_over:
            made = await asyncio.gather(*(self._request(chunk, line) for line in lines))
            requests = [request for request in made if request is not None]
            lines = [line for line in lines if line.number not in chunk.refused]
            try:
                if requests:
                    await self._api.submit(requests)
            except TooMany as full:
                await self.pause(full.retry_after or PATIENCE)
            except UnknownTopic:
                await self.pause(PATIENCE)  # its workers are away
            except (InvalidRequest, Conflict) as error:
                if self._is_late:
                    return
                if len(lines) > 1:
                    for line in lines:
                        await self._submit(chunk, [line])
                else:
                    log.warning("line %d of %s: %s", lines[0].number, self.batch.id, error)
                    chunk.refused[lines[0].number] = error
                return
            else:
                chunk.expected += [line.number for line in lines]
                return
        for line in lines:  # an earlier attempt may have submitted it
            with suppress(NotFound):
                await self._api.get(job_id_of(self.batch.id, line.number))
                chunk.expected.append(line.number)

    async def _request(self, chunk: _Chunk, line: Line) -> JobRequest | None:
        """None if its model does not exist."""
        batch, ask = self.batch, self._options.batch_format.ask
        try:
            asked = await off_loop(len(line.body), ask, batch.endpoint, line.body)
            if asked.topic in batch.unserved:
                raise UnknownTopic("model", f"the model {model_of(asked.topic)!r} does not exist")
        except (InvalidRequest, NotFound) as error:
            chunk.refused[line.number] = error
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

    async def _see_chunk_through(self, chunk: _Chunk) -> None:
        waiting = {job_id_of(self.batch.id, number): number for number in chunk.expected}
        while waiting:
            # The more lines are under way, the less often is each looked up to count them.
            pause = max(_COUNTED, self._live / _LOOK_UPS)
            for end in await self._api.wait_many([*waiting], len(waiting), timeout=pause):
                chunk.jobs[waiting.pop(end.job_id)] = end.job
                self._done += end.job.state is JobState.SUCCEEDED
                is_ended_by_us = end.job.state is JobState.CANCELLED and self._is_over
                self._failed += end.job.state is not JobState.SUCCEEDED and not is_ended_by_us
        self._failed += len(chunk.refused)
        await self._keep_answers(chunk)
        self._live -= chunk.last - chunk.first + 1
        self._news.set()

    async def _keep_answers(self, chunk: _Chunk) -> None:
        done = errors = not_run = 0
        failed: list[bytes] = []

        async def answers() -> AsyncIterator[bytes]:
            nonlocal done, errors, not_run
            span = {"first": chunk.first, "at": chunk.start, "end": chunk.end}
            piece = bytearray()
            async for raw in raw_lines(self._read, self._options.longest, **span):
                line = read_line(raw.number, raw.data, self.batch.endpoint)
                told = await self._told(chunk, line)
                if not told.is_answer:
                    errors, not_run = errors + 1, not_run + (told.response is None)
                    failed.append(told.encode())
                    continue
                done += 1
                piece += told.encode()
                if len(piece) >= _PIECE:
                    yield bytes(piece)
                    piece.clear()
                if raw.number % _BREATH == 0:
                    await asyncio.sleep(0)
            if piece:
                yield bytes(piece)

        output = (await self._blobs.put_stream(answers(), JSON_LINES)).uri
        told = (await self._blobs.put_stream(_pieces(failed), JSON_LINES)).uri if failed else ""
        row = partial(Step, n=chunk.first, key=str(chunk.last), at=self._clock.now())
        await self._ctx.checkpoint(
            [
                row(_OUTPUT, output=output if done else "", info=str(done)),
                row(_ERRORS, output=told, info=f"{errors} {not_run}"),
            ]
        )

    async def _told(self, chunk: _Chunk, line: Line) -> OutputLine:
        job = chunk.jobs.get(line.number)
        why = EXPIRED if self.batch.cancelling_at is None else CANCELLED
        if job is None:
            refusal = chunk.refused.get(line.number)
            return self._lines.refused(line, refusal) if refusal else self._lines.not_run(line, why)
        late = job.result is not None and job.result.error_code == LATE
        if late or (job.state is JobState.CANCELLED and self._is_over):
            return self._lines.not_run(line, why)
        return await self._lines.ended(line, job)

    # -- finalizing -----------------------------------------------------------------

    async def _finish(self) -> None:
        """Every line has its answer, or will never have one: the chunks become files."""
        done = errors = not_run = 0
        async for row in self._ctx.steps(_OUTPUT):
            done += int(row.info)
        async for row in self._ctx.steps(_ERRORS):
            some, skipped = map(int, row.info.split())
            errors, not_run = errors + some, not_run + skipped
        counts, now = RequestCounts(done + errors, done, errors - not_run), self._clock.now()
        if self.batch.status is BatchStatus.IN_PROGRESS:
            late = now if not_run else None
            with suppress(IllegalMove):  # it was cancelled meanwhile
                await self._move(
                    BatchEvent.FINALIZE, finalizing_at=now, expired_at=late, request_counts=counts
                )
        files = {
            "output_file_id": await self._keep_file(_OUTPUT, "output") if done else None,
            "error_file_id": await self._keep_file(_ERRORS, "error") if errors else None,
            "request_counts": counts,
        }
        now = self._clock.now()
        if self.batch.cancelling_at is not None:
            await self._move(BatchEvent.END, cancelled_at=now, **files)
        elif self.batch.expired_at is not None:
            await self._move(BatchEvent.EXPIRE, expired_at=now, **files)
        else:
            await self._move(BatchEvent.COMPLETE, completed_at=now, **files)

    async def _keep_file(self, name: str, kind: str) -> str:
        """Under an id of its own for each batch: whoever does it again replaces it."""

        async def content() -> AsyncIterator[bytes]:
            async for row in self._ctx.steps(name):
                if row.output:
                    async for piece in self._blobs.stream(row.output):
                        yield piece

        stat, batch, now = (
            await self._blobs.put_stream(content(), JSON_LINES),
            self.batch,
            self._clock.now(),
        )
        kept = batch.output_expires_after
        file = StoredFile(
            id=f"file-{batch.id}-{kind}",
            filename=f"{batch.id}_{kind}.jsonl",
            purpose=Purpose.BATCH_OUTPUT,
            created_at=now,
            tenant=batch.tenant,
            bytes=stat.size,
            expires_at=None if kept is None else now + kept,
            pointer=stat.uri,
        )
        await self._files.put(file)
        return file.id


async def _pieces(pieces: Sequence[bytes]) -> AsyncIterator[bytes]:
    yield b"".join(pieces)


def _only(error: BaseException) -> BaseException:
    """What a group of tasks failed of, if that is one thing."""
    while isinstance(error, BaseExceptionGroup):
        superseded = [one for one in error.exceptions if isinstance(one, Superseded)]
        error = superseded[0] if superseded else error.exceptions[0]
    return error
