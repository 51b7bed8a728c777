"""Commits the rows that running jobs checkpoint, and reads them back to workers.

A worker sends the next rows of an attempt only when it has the answer to the last ones, so
each job has at most one message here. They are committed in the order of arrival, at most
`MAX_ROWS` rows or `MAX_BYTES` bytes a commit, and full commits take at most half of the time:
a job with many rows delays other jobs by one small commit, not by all its rows.
"""

from __future__ import annotations

import asyncio
from functools import partial

from msgspec.structs import replace

from penstock.control.ledger import Ledger
from penstock.control.store_retry import Retry
from penstock.core.errors import PenstockError, StoreFailed, Superseded, TooLarge
from penstock.core.ledger import Answer, Checkpoint
from penstock.core.steps import MAX_BYTES, MAX_PAGE_ROWS, MAX_ROWS, check_message
from penstock.lifecycles.canonical import HELD
from penstock.ports.bus import (
    CHECKPOINT,
    AnyMessage,
    Bus,
    Checkpointed,
    CheckpointKept,
    Refusal,
    StepsRead,
    StepsWanted,
    jobs_of,
)
from penstock.ports.clock import Clock

_Checked = tuple[Checkpointed, int]
"""A message, and the bytes of its rows."""

_SHORTEST_PAUSE = 0.001
"""Seconds: pauses between commits add up to this before one is made."""
_MOST_USAGES = 10_000
"""Jobs whose numbers of rows are remembered before those that ended are forgotten."""


class _Usage:
    """What one job has checkpointed: at most so much, since rows may have been replaced."""

    __slots__ = ("kept", "latest", "rows", "size")

    def __init__(self, rows: int, size: int) -> None:
        self.rows, self.size = rows, size
        self.latest = (0, 0)
        """(attempt, n) of the newest message."""
        self.kept = (0, 0)
        """(attempt, n) of the newest message that was committed."""


class CheckpointService:
    """A service: `run` until cancelled."""

    def __init__(
        self,
        store: Ledger,
        bus: Bus,
        clock: Clock,
        *,
        max_rows: int = 1_000_000,
        max_bytes: int = 1 << 30,
    ) -> None:
        self._store, self._bus, self._clock = store, bus, clock
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._retry = Retry(clock)
        self._retry_reading = Retry(clock)
        self._waiting: dict[tuple[str, int], _Checked] = {}
        self._wanted: asyncio.Queue[StepsWanted] = asyncio.Queue()
        self._wake_writer = asyncio.Event()
        self._usage: dict[str, _Usage] = {}
        self._older: set[str] = set()
        """Jobs that were with a worker before this service ran (the store is open by then): they
        may have rows."""

    async def run(self) -> None:
        self._older.update(job.job_id for job in self._store.jobs.values() if job.state in HELD)
        subscription = self._bus.subscribe(CHECKPOINT, self.receive)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write())
                group.create_task(self._read())
        finally:
            await subscription.close()

    async def receive(self, messages: list[AnyMessage]) -> None:
        for message in messages:
            if isinstance(message, Checkpointed):
                usage = self._usage.get(message.job_id)
                number = (message.attempt, message.n)
                if usage is not None and number < usage.latest:
                    continue  # a late copy; its worker had the answer before it sent the next
                if usage is not None and number == usage.kept:
                    self._answer(message, None)  # sent again: notes must not be kept twice
                    continue
                try:
                    size = check_message(message.rows, message.notes)
                except PenstockError as error:
                    self._refuse(message, error)
                else:
                    self._waiting[message.job_id, message.attempt] = (message, size)
            elif isinstance(message, StepsWanted):
                self._wanted.put_nowait(message)
        if self._waiting:
            self._wake_writer.set()

    # -- writing ------------------------------------------------------------------

    async def _write(self) -> None:
        pause = 0.0
        while True:
            await self._wake_writer.wait()
            began = self._clock.monotonic()
            batch = self._take()
            share = min(1.0, sum(len(message.rows) for message, _ in batch) / MAX_ROWS)
            await self._retry(f"write {len(batch)} checkpoints", partial(self._keep, batch))
            if not self._waiting:
                self._wake_writer.clear()
            pause += share * (self._clock.monotonic() - began)
            if pause >= _SHORTEST_PAUSE:
                await self._clock.sleep(pause)
                pause = 0.0

    def _take(self) -> list[_Checked]:
        """The messages of the next commit."""
        batch: list[_Checked] = []
        rows = total = 0
        for message, size in self._waiting.values():
            rows, total = rows + len(message.rows), total + size
            if batch and (rows > MAX_ROWS or total > MAX_BYTES):
                break
            batch.append((message, size))
        for message, _ in batch:
            del self._waiting[message.job_id, message.attempt]
        return batch

    async def _keep(self, batch: list[_Checked]) -> None:
        """Commit and answer them; if the store fails, those stay in `batch` that it failed for."""
        batch[:] = [
            one for one in batch if self._has_room(*one) or await self._count_and_admit(*one)
        ]
        now = self._clock.now()
        changes = [
            Checkpoint(
                each.job_id, each.attempt, each.rows, each.notes, f"worker:{each.worker_id}", now
            )
            for each, _ in batch
        ]
        # One commit; but each by itself, so that rows that can't be stored harm no other job.
        commits = [self._store.begin((change,)) for change in changes]
        failed: list[_Checked] = []
        failure: StoreFailed | None = None
        for (message, size), commit in zip(batch, commits, strict=True):
            try:
                answers, _ = await commit
            except StoreFailed as error:
                failure = error
                failed.append((message, size))
            except PenstockError as error:
                self._refuse(message, error)
            else:
                self._settle(message, size, answers[0])
        if failure is not None:
            batch[:] = failed
            raise failure

    def _has_room(self, message: Checkpointed, size: int) -> bool:
        """Whether the job may have these rows, too, by what is known without a look."""
        usage = self._usage.get(message.job_id)
        if usage is None and self._is_first(message):
            usage = self._keep_usage(message.job_id, _Usage(0, 0))
        if usage is None or self._is_over(usage, message, size):
            return False
        usage.latest = max(usage.latest, (message.attempt, message.n))
        return True

    async def _count_and_admit(self, message: Checkpointed, size: int) -> bool:
        """Whether it may after all, since replaced rows count once; if not, they are refused."""
        usage = await self._count(message.job_id)
        usage.latest = max(usage.latest, (message.attempt, message.n))
        if not self._is_over(usage, message, size):
            return True
        why = (
            f"job {message.job_id} has {usage.rows} checkpointed rows with {usage.size} bytes; "
            f"max_steps = {self._max_rows} and max_step_bytes = {self._max_bytes} allow no more"
        )
        hint = "raise the setting, or let later rows replace earlier ones"
        self._refuse(message, TooLarge("rows", why, hint=hint))
        return False

    def _is_first(self, message: Checkpointed) -> bool:
        """Whether the job can have no rows: this service would know of them."""
        job = self._store.jobs.get(message.job_id)
        return job is not None and job.attempt == 1 and message.job_id not in self._older

    def _is_over(self, usage: _Usage, message: Checkpointed, size: int) -> bool:
        return (
            usage.rows + len(message.rows) > self._max_rows or usage.size + size > self._max_bytes
        )

    async def _count(self, job_id: str) -> _Usage:
        counts = await self._store.count_steps(job_id)
        usage = _Usage(sum(count.rows for count in counts), sum(count.size for count in counts))
        if (before := self._usage.get(job_id)) is not None:
            usage.latest, usage.kept = before.latest, before.kept
        return self._keep_usage(job_id, usage)

    def _keep_usage(self, job_id: str, usage: _Usage) -> _Usage:
        if len(self._usage) >= _MOST_USAGES:
            self._usage = {
                known: usage for known, usage in self._usage.items() if known in self._store.jobs
            }
        self._usage[job_id] = usage
        return usage

    def _settle(self, message: Checkpointed, size: int, answer: Answer) -> None:
        if not answer.moved:
            why = f"attempt {message.attempt} of job {message.job_id} is not live any more"
            self._refuse(message, Superseded(why))
            return
        if (usage := self._usage.get(message.job_id)) is not None:
            usage.rows += len(message.rows)
            usage.size += size
            usage.kept = (message.attempt, message.n)
        self._answer(message, None)

    def _refuse(self, message: Checkpointed, error: PenstockError) -> None:
        self._answer(message, Refusal.of(error))

    def _answer(self, message: Checkpointed, refusal: Refusal | None) -> None:
        kept = CheckpointKept(message.job_id, message.attempt, message.n, refusal)
        self._bus.publish(jobs_of(message.worker_id), [kept])

    # -- reading ------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            wanted = await self._wanted.get()
            limit = max(1, min(wanted.query.limit, MAX_PAGE_ROWS))
            query = replace(wanted.query, limit=limit)
            page = await self._retry_reading(
                f"read the steps of job {wanted.job_id}",
                partial(self._store.read_steps, wanted.job_id, query),
            )
            answer = StepsRead(wanted.n, tuple(page.steps), page.more)
            self._bus.publish(jobs_of(wanted.worker_id), [answer])
