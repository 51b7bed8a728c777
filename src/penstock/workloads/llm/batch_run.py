"""One batch: its lines are checked, submitted, awaited, and their answers written.

A run can be started again at any point, by this process or the next: it needs nothing but the
batch store and the job store. Nothing is submitted twice, since a line's job has its own id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.core.errors import (
    Conflict,
    IllegalMove,
    InvalidRequest,
    NotFound,
    TooMany,
    UnknownTopic,
)
from penstock.core.job import Job, JobRequest, Priority
from penstock.lifecycles.batch import BATCH, BatchEvent, BatchStatus
from penstock.ports.blobs import Blobs
from penstock.ports.clock import Clock, wait_at_most
from penstock.workloads.llm.batch_files import (
    BatchProgress,
    Line,
    LineCheck,
    OutputWriter,
    job_id_of,
    off_loop,
    raw_lines,
    read_line,
)
from penstock.workloads.llm.batches import Batch, BatchFormat, BatchStore

if TYPE_CHECKING:
    from penstock.control.gateway import Gateway
    from penstock.control.ledger import Ledger


log = logging.getLogger(__name__)

LABEL = "openai.batch"
CUSTOM_ID = "openai.custom_id"
_CHUNK = 200
"""Lines that are submitted in one commit."""
_CHUNK_BYTES = 4 << 20
_AT_ONCE = 100
"""Jobs that are asked to end together."""
_TOLD = ("output_file_id", "error_file_id", "request_counts")
PATIENCE = 1.0
"""Seconds until a model that nobody serves is looked for again."""
_BREATH = 100
"""Lines after which others get a turn."""


@dataclass(frozen=True)
class BatchDependencies:
    """What every batch needs of the engine."""

    batch_store: BatchStore
    store: Ledger
    blobs: Blobs
    gateway: Gateway
    batch_format: BatchFormat
    clock: Clock
    knows: Callable[[str], bool]
    """Whether somebody serves this topic, or may."""
    room: int = 10_000
    """Jobs of one batch that may be unfinished at a time."""
    longest: int = 64 << 20
    """Bytes that a line may have."""
    grace: float = 10.0
    """Seconds in which the workers of a model may come back before it counts as unknown."""


async def check_lines(
    batch: Batch, needs: BatchDependencies, is_wanted: Callable[[], bool]
) -> LineCheck:
    """What is wrong with them; breaks off when nobody wants to know any more."""
    check = LineCheck(batch.endpoint, needs.batch_format)
    try:
        async for number, raw in raw_lines(needs.batch_store, batch.input_file_id, needs.longest):
            await off_loop(len(raw), check.look, number, raw)
            if check.is_enough or not is_wanted():
                return check
            if number % _BREATH == 0:
                await asyncio.sleep(0)
    except (InvalidRequest, NotFound) as error:
        check.blame(error, None)
    if not check.errors:
        await _check_topics(check, needs, is_wanted)
    return check


async def _check_topics(
    check: LineCheck, needs: BatchDependencies, is_wanted: Callable[[], bool]
) -> None:
    """A worker may be about to come back after a restart: who is away at first is waited for."""
    clock = needs.clock
    until = clock.now() + needs.grace
    for topic, number in check.topics.items():
        while not (known := needs.knows(topic)) and clock.now() < until and is_wanted():
            await clock.sleep(PATIENCE)
        if not known:
            check.blame(UnknownTopic("body.model", f"nothing here serves {topic!r}"), number)


class BatchRun:
    def __init__(self, batch: Batch, needs: BatchDependencies) -> None:
        self.batch = batch
        self._needs = needs
        self._clock, self._store = needs.clock, needs.store
        self.progress = BatchProgress(batch.request_counts.total)
        self._news = asyncio.Event()
        self._moving = asyncio.Lock()
        self._writer = OutputWriter(needs.batch_store, needs.store, needs.blobs, needs.batch_format)

    @property
    def view(self) -> Batch:
        """The record, with counts as of now."""
        if self.batch.status not in (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING):
            return self.batch
        return replace(self.batch, request_counts=self.progress.counts)

    def hear(self, job: Job) -> None:
        if self.progress.note(job):
            self._news.set()

    async def cancel(self) -> Batch:
        """Ask for its end, durably. Raises Conflict if that is too late."""
        try:
            await self._happen(BatchEvent.CANCEL, cancelling_at=self._clock.now())
        except IllegalMove:
            raise Conflict(
                f"batch {self.batch.id} is {self.batch.status}: it can't be cancelled any more"
            ) from None
        self._news.set()
        return self.view

    async def run(self) -> None:
        """Until the batch has ended. What it raises, another run may get past."""
        self.progress = BatchProgress(self.batch.request_counts.total)
        if self.batch.status is BatchStatus.VALIDATING:
            await self._validate()
        if self.batch.in_progress_at is None and self.batch.status is BatchStatus.CANCELLING:
            await self._happen(BatchEvent.END, cancelled_at=self._clock.now())
        if self.batch.status in (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING):
            await self._work()
        if not self.batch.has_ended:
            await self._finish()

    async def _happen(self, event: BatchEvent, **fields: object) -> None:
        """Move as the table says, durably. Raises IllegalMove."""
        async with self._moving:
            after = BATCH.after(self.batch.status, event)
            if after is self.batch.status:
                return
            changed = replace(self.batch, status=after, **fields)
            await self._needs.batch_store.put_batch(changed)
            self.batch = changed

    @property
    def _is_late(self) -> bool:
        return self._clock.now() >= self.batch.expires_at

    @property
    def _is_over(self) -> bool:
        """Whether nothing more is to be begun."""
        return self.batch.status is BatchStatus.CANCELLING or self._is_late

    async def _rest(self, seconds: float | None = None) -> None:
        """Until there is news, or so many seconds have passed, or the batch's time is over."""
        if seconds is None:
            seconds = max(0.0, self.batch.expires_at - self._clock.now())
        await wait_at_most(self._clock, seconds, self._news)
        self._news.clear()

    # -- validating -----------------------------------------------------------------

    async def _validate(self) -> None:
        check = await check_lines(
            self.batch, self._needs, lambda: self.batch.status is BatchStatus.VALIDATING
        )
        errors, now = check.conclude(), self._clock.now()
        self.progress.total = check.count
        with suppress(IllegalMove):  # it was cancelled meanwhile
            if errors:
                await self._happen(BatchEvent.REFUSE, errors=errors, failed_at=now)
            else:
                counts = self.progress.counts
                await self._happen(BatchEvent.ACCEPT, in_progress_at=now, request_counts=counts)

    # -- in progress ----------------------------------------------------------------

    async def _work(self) -> None:
        async for chunk in self._chunks():
            while len(self.progress.live) > self._needs.room - len(chunk) and not self._is_over:
                await self._rest()
            await self._take_up(chunk)
        while self.progress.live and not self._is_over:
            await self._rest()
        if self.progress.live:
            await self._stop_all()

    async def _take_up(self, chunk: Sequence[Line]) -> None:
        """Look what has become of these lines, and submit those that nothing has."""
        missing = [line for line in chunk if not await self._is_there(line.number)]
        while missing and not self._is_over:
            for line in missing:
                self.progress.expect(line.number, job_id_of(self.batch.id, line.number))
            try:
                await self._submit(missing)
                return
            except TooMany as full:
                await self._rest(full.retry_after)
            except UnknownTopic:
                await self._rest(PATIENCE)  # its workers are away
        self._give_up(missing)

    def _give_up(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self.progress.is_not_there(job_id_of(self.batch.id, line.number))

    async def _is_there(self, number: int) -> bool:
        job_id: str | None = job_id_of(self.batch.id, number)
        found = False
        while job_id is not None:
            self.progress.expect(number, job_id)
            job = await self._store.get(job_id)
            if job is None:
                self.progress.is_not_there(job_id)
                break
            found = True
            # What was heard while the store was read is counted, and its retry awaited.
            job_id = job.successor if self.progress.note(job) else None
        return found

    async def _submit(self, lines: Sequence[Line]) -> None:
        try:
            requests = await asyncio.gather(*map(self._request, lines))
            await asyncio.sleep(0)  # others get a turn
            await self._needs.gateway.submit(requests, by=self.batch.principal)
        except UnknownTopic:
            raise
        except (InvalidRequest, Conflict) as error:
            if self._is_late:
                self._give_up(lines)
                return
            if len(lines) > 1:
                for line in lines:
                    await self._submit([line])
                return
            number = lines[0].number
            log.warning("line %d of %s: %s", number, self.batch.id, error)
            self.progress.refuse(number, job_id_of(self.batch.id, number), error)

    async def _request(self, line: Line) -> JobRequest:
        batch, needs = self.batch, self._needs
        asked = await off_loop(len(line.body), needs.batch_format.ask, batch.endpoint, line.body)
        labels = {LABEL: batch.id}
        if line.custom_id.isprintable():
            labels[CUSTOM_ID] = line.custom_id
        return JobRequest(
            job_id=job_id_of(batch.id, line.number),
            topic=asked.topic,
            priority=Priority.BATCH,
            context_ptr=await needs.blobs.put(asked.payload),
            workflow_id=batch.id,
            step_index=line.number,
            tenant=batch.tenant,
            labels=labels,
            deadline=batch.expires_at,
        )

    async def _stop_all(self) -> None:
        """End what has not ended, and wait until it has."""
        why = "its batch was cancelled"
        if self.batch.cancelling_at is None:
            why, self.progress.was_late = "its batch's completion window ended", True
        cancel = self._needs.gateway.cancel
        job_ids = [*self.progress.live]
        for start in range(0, len(job_ids), _AT_ONCE):
            some = job_ids[start : start + _AT_ONCE]
            await asyncio.gather(
                *(cancel(one, reason=why, children=False, by=self.batch.principal) for one in some)
            )
        while self.progress.live:
            await self._rest(PATIENCE)
            for job_id in [*self.progress.live]:
                if (job := await self._store.get(job_id)) is None:
                    self.progress.is_not_there(job_id)
                else:
                    self.progress.note(job)

    # -- finalizing -----------------------------------------------------------------

    async def _finish(self) -> None:
        if self.batch.status is BatchStatus.IN_PROGRESS:
            await self._finalize()
        batch = self.batch
        files = await self._writer.write(batch, self._needs.longest, self._clock.now())
        told = {name: getattr(files, name) for name in _TOLD}
        now = self._clock.now()
        if batch.cancelling_at is not None:
            await self._happen(BatchEvent.END, cancelled_at=now, **told)
        elif batch.expired_at is not None:
            await self._happen(BatchEvent.EXPIRE, expired_at=now, **told)
        else:
            await self._happen(BatchEvent.COMPLETE, completed_at=now, **told)

    async def _finalize(self) -> None:
        """Every line has ended, or never will; which of both is decided here, once."""
        counts, now = self.progress.counts, self._clock.now()
        late = self.progress.was_late or counts.completed + counts.failed < counts.total
        with suppress(IllegalMove):  # it was cancelled meanwhile
            await self._happen(
                BatchEvent.FINALIZE,
                finalizing_at=now,
                expired_at=now if late else None,
                request_counts=counts,
                errors=tuple(self.progress.refused),
            )

    # -- lines ----------------------------------------------------------------------

    async def _chunks(self) -> AsyncIterator[list[Line]]:
        chunk: list[Line] = []
        size, most = 0, min(_CHUNK, self._needs.room)
        needs, batch = self._needs, self.batch
        async for number, raw in raw_lines(needs.batch_store, batch.input_file_id, needs.longest):
            chunk.append(read_line(number, raw, batch.endpoint))
            size += len(raw)
            if len(chunk) >= most or size >= _CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk
