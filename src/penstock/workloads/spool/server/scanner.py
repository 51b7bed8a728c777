"""Finds queued jobs: the kernel tells of each that is renamed in, and a slow scan is the net.

A job is learned once, when it comes: what it costs does not depend on how many others wait. A
scan lists names only, and takes a small part of the time however many there are.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

from msgspec import Struct

from penstock.core.errors import PenstockError
from penstock.lifecycles.spool import Status
from penstock.workloads.spool.client.work import PROMPT
from penstock.workloads.spool.config import SpoolOptions
from penstock.workloads.spool.disk.files import NotAFolder, OpenFolder
from penstock.workloads.spool.disk.job import (
    OPTIONS,
    Meta,
    fail_impostor,
    read_attempts,
    read_options,
    seen_meta,
    stamp,
)
from penstock.workloads.spool.disk.workspace import Turn, is_job_id, order_of, turn_of
from penstock.workloads.spool.server.pool import ServerParts

log = logging.getLogger(__name__)

BATCH = 256
"""Jobs that are learned at a time: work begins with the first of them."""
GRACE = 2.0
"""Seconds that a folder without a prompt has: somebody may be writing it where it lies."""
INVALID = "INVALID"
"""The code of a job with a file that is not what it must be."""
_NO_OPTIONS = SpoolOptions()
_SHARE = 20
"""A scan has at most one part in so many of the time."""


class Waiting(Struct, frozen=True, kw_only=True):
    """One queued job."""

    job_id: str
    turn: Turn
    deadline: float | None = None
    parent: str | None = None
    """The job whose end it waits for."""
    suspect: bool = False
    """Whether it is to run alone."""
    model: str = ""
    """The model that it names; empty for the default one."""


class Queue:
    """A heap by turn, and beside it those that wait for a job (their parent) or for a model."""

    def __init__(self) -> None:
        self._known: dict[str, Waiting] = {}
        self._heap: list[tuple[Turn, str]] = []
        self._deadlines: list[tuple[float, str]] = []
        self._blocked: dict[str, set[str]] = {}
        """The jobs that wait, by the id of the job or the name of the model that they wait for."""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._known

    def add(self, found: Iterable[Waiting]) -> None:
        for waiting in found:
            if waiting.job_id not in self._known:
                circle = waiting.parent is not None and self._is_circle(waiting)
                self.put(waiting, None if circle else waiting.parent)

    def put(self, waiting: Waiting, blocked_by: str | None) -> None:
        """Keep it until its turn, or first until `blocked_by` is released."""
        self._known[waiting.job_id] = waiting
        if waiting.deadline is not None:
            heapq.heappush(self._deadlines, (waiting.deadline, waiting.job_id))
        if blocked_by is None:
            heapq.heappush(self._heap, (waiting.turn, waiting.job_id))
        else:
            self._blocked.setdefault(blocked_by, set()).add(waiting.job_id)

    def _is_circle(self, waiting: Waiting) -> bool:
        """Whether it would wait for itself: then it is let through, to fail with that reason."""
        seen = {waiting.job_id}
        parent = waiting.parent
        while parent is not None and parent not in seen:
            seen.add(parent)
            known = self._known.get(parent)
            parent = known.parent if known else None
        return parent is not None

    def pop(self) -> Waiting | None:
        """The job whose turn it is; the queue forgets it."""
        while self._heap:
            _, job_id = heapq.heappop(self._heap)
            if (waiting := self._known.pop(job_id, None)) is not None:
                return waiting
        return None

    def release(self, blocker: str) -> bool:
        """Let those that wait for it have their turn; whether there were any."""
        jobs = [one for one in self._blocked.pop(blocker, ()) if one in self._known]
        for job_id in jobs:
            heapq.heappush(self._heap, (self._known[job_id].turn, job_id))
        return bool(jobs)

    @property
    def parents(self) -> Collection[str]:
        """The jobs that somebody waits for."""
        for blocker in list(self._blocked):
            self._blocked[blocker] &= self._known.keys()
            if not self._blocked[blocker]:
                del self._blocked[blocker]
        return list(filter(is_job_id, self._blocked))

    def late(self, now: float) -> list[str]:
        """Those whose deadline is over; the queue forgets them."""
        late: list[str] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, job_id = heapq.heappop(self._deadlines)
            if self._known.pop(job_id, None) is not None:
                late.append(job_id)
        return late


class Scanner:
    """Fills a Queue; `next` waits for the job whose turn it is."""

    def __init__(self, parts: ServerParts) -> None:
        self._workspace, self._every = parts.workspace, parts.config.scan
        self._clock, self._threads, self._health = parts.clock, parts.threads, parts.health
        self._chores, self._ready = parts.chores, self._workspace.folder(Status.QUEUED)
        self._arrived: list[str] = []
        self._all = True
        """Whether every name is to be looked at."""
        self._woken = asyncio.Event()
        self._more = asyncio.Event()
        self._reported: set[str] = set()
        self.queue = Queue()

    # -- told from outside -------------------------------------------------------------

    def came(self, name: str) -> None:
        """A name has appeared in `input/ready`."""
        self._arrived.append(name)
        self._woken.set()

    def release(self, blocker: str) -> None:
        """A job has ended, or a model's engine answers again: who waits for it may go on."""
        if self.queue.release(blocker):
            self._more.set()

    def look(self) -> None:
        """Something may have been missed: scan now."""
        self._all = True
        self._woken.set()

    # -- asked -------------------------------------------------------------------------

    async def next(self) -> Waiting:
        while (waiting := self.queue.pop()) is None:
            self._more.clear()
            await self._more.wait()
        return waiting

    async def run(self) -> None:
        """Until it is cancelled."""
        due = 0.0
        while True:
            now = self._clock.monotonic()
            if self._all or now >= due:
                await self._scan()
                took = self._clock.monotonic() - now
                due = now + took + max(self._every, _SHARE * took)
            await self._learn_arrived()
            await self._wait(due - self._clock.monotonic())

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._woken.wait()
        self._woken.clear()

    # -- learning ----------------------------------------------------------------------

    async def _scan(self) -> None:
        self._all = False
        try:
            names = await self._chores.do(self._unknown)
        except OSError as error:
            self._health.trouble("scan", f"{self._ready}: {(error.strerror or '').lower()}")
            with suppress(OSError, PenstockError):
                await self._threads.do(self._workspace.create)
            return
        self._health.over("scan")
        for at in range(0, len(names), BATCH):
            await self._learn(names[at : at + BATCH])
            await self._learn_arrived()
        await self._look_at_parents(self.queue.parents)

    async def _learn_arrived(self) -> None:
        while self._arrived:
            names, self._arrived = self._arrived[:BATCH], self._arrived[BATCH:]
            await self._learn(names)

    async def _learn(self, names: Sequence[str]) -> None:
        found = await self._threads.do(self._read_all, names)
        await asyncio.sleep(0)
        self.queue.add(found)
        if found:
            self._more.set()
        await self._look_at_parents({one.parent for one in found if one.parent is not None})

    async def _look_at_parents(self, parents: Collection[str]) -> None:
        # They are awaited by now, so that one that ends during the look is not missed.
        if parents:
            for parent in await self._threads.do(self._final, list(parents)):
                self.release(parent)

    # -- blocking, in a thread ---------------------------------------------------------

    def _unknown(self) -> list[str]:
        """The jobs that we don't know, in their order."""
        names = [name for name in os.listdir(self._ready) if name not in self.queue]
        for name in names:
            if not is_job_id(name):
                self._report(name)
        return sorted(filter(is_job_id, names), key=order_of)

    def _read_all(self, names: Iterable[str]) -> list[Waiting]:
        now = self._clock.now()
        found = (self._read(name, now) for name in names if is_job_id(name))
        return [one for one in found if one is not None]

    def _read(self, job_id: str, now: float) -> Waiting | None:
        options, parent, suspect = _NO_OPTIONS, "", False
        try:
            with OpenFolder(self._workspace.name(Status.QUEUED, job_id)) as folder:
                if not _is_written(folder, now):
                    return None
                parent, suspect = seen_meta(folder).parent, read_attempts(folder).is_suspect
                options = read_options(folder)
        except FileNotFoundError:
            return None
        except NotAFolder as problem:
            meta = Meta(submitted_at=stamp(now), completed_at=stamp(now), code=INVALID)
            with suppress(OSError, PenstockError):  # else the next scan does it
                fail_impostor(self._workspace, job_id, meta, f"{INVALID}: {problem}")
            return None
        except (OSError, PenstockError):
            pass  # it will fail with the reason when it is its turn
        return Waiting(
            job_id=job_id,
            turn=turn_of(job_id, options.priority, now),
            deadline=options.deadline,
            parent=parent if is_job_id(parent) else None,
            suspect=suspect,
            model=options.model,
        )

    def _final(self, parents: Iterable[str]) -> list[str]:
        still = (Status.QUEUED, Status.RUNNING)
        return [one for one in parents if self._workspace.find(one) not in still]

    def _report(self, name: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            log.warning("%a in input/ready is left alone: its name is not a job id", name)


def _is_written(folder: OpenFolder, now: float) -> bool:
    """Whether it has a prompt, or nobody is writing it any more."""
    prompt = folder.look(PROMPT)
    if (prompt is not None and prompt.st_size) or folder.look(OPTIONS):
        return True
    found = folder.look(".")
    return found is None or abs(now - found.st_mtime) >= GRACE
