"""The checkpoints of a worker's running jobs, on their way to the engine and back.

Each attempt has one message under way. Rows that its code checkpoints meanwhile go into the
next one together. What is not answered is sent again after a lost connection: rows replace
those with the same name and number, so a repeated message changes nothing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from penstock.core.errors import Misconfigured, Unstorable
from penstock.core.job import Cancelled
from penstock.core.ledger import Step
from penstock.core.steps import (
    MAX_BYTES,
    MAX_NOTES,
    MAX_PAGE_ROWS,
    MAX_ROWS,
    check_notes,
    split_rows,
)
from penstock.ports.bus import (
    CHECKPOINT,
    Bus,
    Checkpointed,
    CheckpointKept,
    StepsRead,
    StepsWanted,
)
from penstock.ports.executor import CancelToken
from penstock.ports.store import StepQuery

T = TypeVar("T")
Key = tuple[str, int]
"""A job and its attempt."""
Place = tuple[str, int]
"""Name and number of a row."""

_CANCEL_GRACE = 5.0
"""Seconds for which a thread of a job that should end waits for its last checkpoint."""


class _Part:
    """Rows that are kept together, and the future of it."""

    __slots__ = ("alone", "done", "notes", "rows", "size")

    def __init__(self, rows: list[Step], size: int, done: asyncio.Future[None]) -> None:
        self.rows, self.size, self.done = rows, size, done
        self.notes: tuple[str, ...] = ()
        self.alone = False
        """Others must not be refused because of it."""


class _Channel:
    """What one attempt has to send."""

    __slots__ = ("message", "sent", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[_Part] = deque()
        self.sent: list[_Part] = []
        self.message: Checkpointed | None = None
        """The one under way, with the rows of `sent`."""


class Checkpoints:
    """Used in the worker's event loop, unless something else is said."""

    def __init__(self, bus: Bus, worker_id: str) -> None:
        self._bus, self._worker_id = bus, worker_id
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._channels: dict[Key, _Channel] = {}
        self._reads: dict[int, tuple[StepsWanted, asyncio.Future[StepsRead]]] = {}

    # -- for jobs, in any thread and event loop ------------------------------------

    def checkpoint(
        self, key: Key, rows: Sequence[Step], notes: Sequence[str]
    ) -> Coroutine[Any, Any, None]:
        writing = self.write(*key, rows, notes)
        return writing if asyncio.get_running_loop() is self._loop else self.call(writing)

    def checkpoint_sync(
        self, key: Key, rows: Sequence[Step], notes: Sequence[str], cancel: CancelToken
    ) -> None:
        self.call_sync(self.write(*key, rows, notes), cancel)

    async def steps(self, key: Key, name: str | None, after: Place | None) -> AsyncIterator[Step]:
        more = True
        while more:
            page = await self.call(self.read(*key, _query(name, after)))
            for row in page.rows:
                yield row
                after = (row.name, row.n)
            more = page.more

    def steps_sync(
        self, key: Key, name: str | None, after: Place | None, cancel: CancelToken
    ) -> Iterator[Step]:
        more = True
        while more:
            page = self.call_sync(self.read(*key, _query(name, after)), cancel)
            for row in page.rows:
                yield row
                after = (row.name, row.n)
            more = page.more

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work of the worker's loop, in whichever event loop the caller runs."""
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def call_sync(self, work: Coroutine[Any, Any, T], cancel: CancelToken) -> T:
        """The same in a thread, which is blocked."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            work.close()
            raise Misconfigured(
                "this would block the event loop that the job runs in",
                hint="in async code use 'await ctx.checkpoint(...)', 'await ctx.artifact(...)' and"
                " 'async for ... in ctx.steps(...)'",
            )
        loop, future = self._loop, asyncio.run_coroutine_threadsafe(work, self._loop)
        forget = cancel.when_requested(
            lambda: loop.call_soon_threadsafe(loop.call_later, _CANCEL_GRACE, future.cancel)
        )
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Cancelled(cancel.reason) from None
        finally:
            forget()

    # -- writing ------------------------------------------------------------------

    async def write(
        self, job_id: str, attempt: int, rows: Sequence[Step], notes: Sequence[str] = ()
    ) -> None:
        """Send the rows and then the notes, and wait until they are durable."""
        checked = check_notes(notes) if notes else ()
        messages = split_rows(rows) or ([([], 0)] if checked else [])
        for place, (some, size) in enumerate(messages, 1):
            part = _Part(some, size, self._loop.create_future())
            part.notes = checked if place == len(messages) else ()
            channel = self._channels.setdefault((job_id, attempt), _Channel())
            channel.waiting.append(part)
            if channel.message is None:
                self._send_next((job_id, attempt), channel)
            await part.done

    def _send_next(self, key: Key, channel: _Channel) -> None:
        sent: list[_Part] = []
        rows_left, bytes_left, notes_left = MAX_ROWS, MAX_BYTES, MAX_NOTES
        while channel.waiting:
            part = channel.waiting[0]
            if part.done.done():  # the waiter was cancelled
                channel.waiting.popleft()
                continue
            rows_left, bytes_left = rows_left - len(part.rows), bytes_left - part.size
            notes_left -= len(part.notes)
            is_full = min(rows_left, bytes_left, notes_left) < 0
            if sent and (part.alone or sent[0].alone or is_full):
                break
            sent.append(channel.waiting.popleft())
        if not sent:
            del self._channels[key]
            return
        rows, notes = tuple(sent[0].rows), sent[0].notes
        for part in sent[1:]:
            rows += tuple(part.rows)
            notes += part.notes
        channel.sent = sent
        channel.message = Checkpointed(*key, self._worker_id, next(self._numbers), rows, notes)
        self._bus.publish(CHECKPOINT, [channel.message])

    def kept(self, answer: CheckpointKept) -> None:
        key = (answer.job_id, answer.attempt)
        channel = self._channels.get(key)
        if channel is None or channel.message is None or channel.message.n != answer.n:
            return  # the answer to a message that was sent twice
        refusal, sent = answer.refusal, channel.sent
        channel.message, channel.sent = None, []
        if refusal is not None and refusal.code == Unstorable.code and len(sent) > 1:
            for part in reversed(sent):
                part.alone = True
                channel.waiting.appendleft(part)
        else:
            for part in sent:
                if part.done.done():
                    continue
                if refusal is None:
                    part.done.set_result(None)
                else:
                    part.done.set_exception(refusal.revive())
        self._send_next(key, channel)

    # -- reading ------------------------------------------------------------------

    async def read(self, job_id: str, attempt: int, query: StepQuery) -> StepsRead:
        """A page of rows."""
        n = next(self._numbers)
        wanted = StepsWanted(job_id, attempt, self._worker_id, n, query)
        future: asyncio.Future[StepsRead] = self._loop.create_future()
        self._reads[n] = (wanted, future)
        self._bus.publish(CHECKPOINT, [wanted])
        try:
            return await future
        finally:
            del self._reads[n]

    def read_back(self, page: StepsRead) -> None:
        _, future = self._reads.get(page.n, (None, None))
        if future is not None and not future.done():
            future.set_result(page)

    def send_again(self) -> None:
        """The connection is a new one: what has no answer may be lost."""
        for channel in self._channels.values():
            if channel.message is not None:
                self._bus.publish(CHECKPOINT, [channel.message])
        for wanted, _ in self._reads.values():
            self._bus.publish(CHECKPOINT, [wanted])


def _query(name: str | None, after: Place | None) -> StepQuery:
    return StepQuery(name=name, after=after, limit=MAX_PAGE_ROWS)
