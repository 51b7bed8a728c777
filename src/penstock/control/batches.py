"""Keeps files, and sees every batch through, over any number of restarts."""

from __future__ import annotations

import asyncio
import builtins
import logging
import re
from collections.abc import Mapping, Sequence

from penstock.control.batch_course import BatchCourse
from penstock.control.batch_surroundings import Surroundings
from penstock.core.check import DAY
from penstock.core.errors import Conflict, InvalidRequest, NotFound, PenstockError
from penstock.core.ids import IdSource
from penstock.core.transition import Answer
from penstock.ports.batches import Batch, Draft, Purpose, ShelfQuery, StoredFile
from penstock.ports.clock import Clock

log = logging.getLogger(__name__)

MAX_METADATA = 16
_WINDOW = re.compile(r"([1-9]\d{0,5})([smhd])", re.ASCII)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY}
_LONGEST = 30 * DAY
_ALL = 1_000_000_000
ABANDONED = 3600.0
"""Seconds after which an upload that nobody goes on with is dropped."""
UploadKey = tuple[str, str]
"""Whose an upload is, and its name."""
_SWEEP = 60.0
"""Seconds between looks for files whose time is over."""
_TRY_AGAIN = 5.0
"""Seconds after which a batch that could not go on is tried again."""


class Uploading:
    """Files that are being written, over all callers."""

    def __init__(self, max_file: int, clock: Clock) -> None:
        self.max_file = max_file
        self._clock = clock
        self._drafts: dict[UploadKey, Draft] = {}
        self._used: dict[UploadKey, float] = {}
        """When each was last written to."""

    def add(self, key: UploadKey, draft: Draft) -> None:
        self._drafts[key], self._used[key] = draft, self._clock.monotonic()

    def use(self, key: UploadKey) -> Draft | None:
        if (draft := self._drafts.get(key)) is not None:
            self._used[key] = self._clock.monotonic()
        return draft

    async def drop(self, key: UploadKey) -> None:
        self._used.pop(key, None)
        if (draft := self._drafts.pop(key, None)) is not None:
            await draft.drop()

    async def drop_abandoned(self) -> None:
        """Those whose client has not written for an hour: it is dead, or as good as that."""
        limit = self._clock.monotonic() - ABANDONED
        for key in [key for key, used in self._used.items() if used < limit]:
            await self.drop(key)


class BatchKeeper:
    """A service: `restore`, then `run` until cancelled."""

    def __init__(
        self, around: Surroundings, uploading: Uploading, *, ids: IdSource | None = None
    ) -> None:
        self.shelf = around.shelf
        self._around, self._clock, self._uploading = around, around.clock, uploading
        self._ids = ids or IdSource()
        self._courses: dict[str, BatchCourse] = {}
        """Of the batches that have not ended."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_running = False

    # -- the service ------------------------------------------------------------------

    async def restore(self) -> None:
        await self.shelf.open()
        for batch in await self.shelf.batches(ShelfQuery(limit=_ALL, oldest_first=True)):
            if not batch.has_ended:
                self._courses[batch.id] = BatchCourse(batch, self._around)

    async def run(self) -> None:
        self._is_running = True
        try:
            for course in [*self._courses.values()]:
                self._begin(course)
            while True:
                await self._clock.sleep(_SWEEP)
                await self._drop_expired()
        finally:
            self._is_running = False
            tasks = [*self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, course: BatchCourse) -> None:
        if self._is_running:
            doing = self._see_through(course)
            self._tasks[course.batch.id] = asyncio.get_running_loop().create_task(
                doing, name=f"penstock {course.batch.id}"
            )

    async def _see_through(self, course: BatchCourse) -> None:
        """Its troubles stay its own: a full disk passes, and others go on meanwhile."""
        batch_id = course.batch.id
        while not course.batch.has_ended:
            try:
                await course.run()
            except PenstockError as error:
                log.error("%s can't go on: %s", batch_id, error)
                await self._clock.sleep(_TRY_AGAIN)
            except Exception:
                log.exception("%s can't go on", batch_id)
                await self._clock.sleep(_TRY_AGAIN)
        self._courses.pop(batch_id, None)
        self._tasks.pop(batch_id, None)
        log.info("%s ended %s", batch_id, course.batch.status)

    def hear(self, moved: Sequence[Answer]) -> None:
        """Of every commit."""
        if not self._courses:
            return
        for answer in moved:
            job = answer.job
            if job is not None and job.request.workflow_id is not None and job.is_final:
                course = self._courses.get(job.request.workflow_id)
                if course is not None:
                    course.hear(job)

    # -- files ------------------------------------------------------------------------

    def new_file(
        self, filename: str, purpose: str, tenant: str, expires_after: int | None
    ) -> StoredFile:
        """What an upload is going to be. Raises InvalidRequest."""
        if purpose != Purpose.BATCH:
            raise InvalidRequest(
                "purpose",
                f"{purpose[:60]!r} is of no use here",
                hint="files are for batches: 'batch'",
            )
        now = self._clock.now()
        return StoredFile(
            id="file-" + self._ids.next(now),
            filename=_plain_name(filename),
            purpose=Purpose.BATCH,
            created_at=now,
            tenant=tenant,
            expires_at=None if expires_after is None else now + _lifetime(expires_after),
        )

    async def delete_file(self, file: StoredFile) -> None:
        if self._is_needed(file):
            raise Conflict(
                f"{file.id} is the input of a batch that has not ended",
                hint="wait for its end, or cancel it",
            )
        await self.shelf.remove_file(file.id)

    def _is_needed(self, file: StoredFile) -> bool:
        return any(course.batch.input_file_id == file.id for course in self._courses.values())

    # -- batches ----------------------------------------------------------------------

    async def create(
        self,
        file: StoredFile,
        endpoint: str,
        *,
        by: str,
        window: str,
        metadata: Mapping[str, str] | None,
        output_expires_after: int | None,
    ) -> Batch:
        endpoints = self._around.dialect.endpoints
        if endpoint not in endpoints:
            raise InvalidRequest(
                "endpoint",
                f"{endpoint[:60]!r} takes no batches",
                hint=f"one of {', '.join(endpoints)}",
            )
        if file.purpose is not Purpose.BATCH:
            raise InvalidRequest(
                "input_file_id",
                f"{file.id} has the purpose {file.purpose}",
                hint="it takes 'batch'",
            )
        if output_expires_after is not None:
            _lifetime(output_expires_after)
        _check_metadata(metadata)
        now = self._clock.now()
        batch = Batch(
            id="batch_" + self._ids.next(now),
            endpoint=endpoint,
            input_file_id=file.id,
            completion_window=window,
            created_at=now,
            expires_at=now + _seconds(window),
            tenant=file.tenant,
            principal=by,
            metadata=metadata,
            output_expires_after=output_expires_after,
        )
        self._courses[batch.id] = course = BatchCourse(batch, self._around)
        try:
            await self.shelf.put_batch(batch)
        except BaseException:
            del self._courses[batch.id]
            raise
        self._begin(course)
        return batch

    async def get(self, batch_id: str) -> Batch | None:
        course = self._courses.get(batch_id)
        return await self.shelf.batch(batch_id) if course is None else course.view

    async def list(self, query: ShelfQuery) -> builtins.list[Batch]:
        found = await self.shelf.batches(query)
        return [
            batch if (course := self._courses.get(batch.id)) is None else course.view
            for batch in found
        ]

    async def cancel(self, batch_id: str) -> Batch:
        course = self._courses.get(batch_id)
        if course is None:
            batch = await self.shelf.batch(batch_id)
            if batch is None:
                raise NotFound(f"no batch {batch_id!r}")
            raise Conflict(f"batch {batch_id} is {batch.status}: it has ended")
        return await course.cancel()

    # -- upkeep -----------------------------------------------------------------------

    def needs_since(self) -> float:
        """Jobs that ended from this time on may be of a batch that still has to tell of them."""
        begun = (course.batch.created_at for course in self._courses.values())
        return min(begun, default=float("inf"))

    async def prune(self, before: float) -> int:
        """Forget batches that ended, and files that were made, before a time; returns how many.

        Files with a time of their own have that instead."""
        gone = 0
        for batch in await self.shelf.batches(ShelfQuery(limit=_ALL)):
            if (ended_at := batch.ended_at) is not None and ended_at < before:
                gone += await self.shelf.remove_batch(batch.id)
        for file in await self.shelf.files(ShelfQuery(limit=_ALL)):
            old = file.expires_at is None and file.created_at < before
            if old and not self._is_needed(file):
                gone += await self.shelf.remove_file(file.id)
        return gone

    async def _drop_expired(self) -> None:
        now = self._clock.now()
        try:
            for file in await self.shelf.files(ShelfQuery(limit=_ALL)):
                over = file.expires_at is not None and file.expires_at <= now
                if over and not self._is_needed(file):
                    await self.shelf.remove_file(file.id)
            await self._uploading.drop_abandoned()
        except (PenstockError, OSError) as error:
            log.error("can't delete files whose time is over: %s", error)


def _seconds(window: str) -> float:
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= _LONGEST:
        raise InvalidRequest(
            "completion_window", f"{window[:60]!r} is no time", hint="as 24h, and at most 30d"
        )
    return seconds


def _lifetime(seconds: int) -> int:
    if not 3600 <= seconds <= _LONGEST:
        raise InvalidRequest(
            "expires_after.seconds", f"{seconds} is out of range", hint=f"3600 to {_LONGEST:.0f}"
        )
    return seconds


def _plain_name(filename: str) -> str:
    """A name to show: no folders, nothing that a terminal would obey."""
    name = re.split(r"[/\\]", filename)[-1]
    return "".join(c for c in name if c.isprintable())[:255] or "file"


def _check_metadata(metadata: Mapping[str, str] | None) -> None:
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest("metadata", f"has more than {MAX_METADATA} entries")
    for key, value in metadata.items():
        if len(key) > 64 or len(value) > 512:
            raise InvalidRequest(
                "metadata", f"{key[:64]!r} is too long", hint="64 characters and 512 for its value"
            )
