"""The jobs that a server has at once: claims the next when there is room; and what the parts of a
server share: health, events, threads for files."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum, StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from msgspec import Struct

from penstock.core.errors import PenstockError, StoreFailed
from penstock.lifecycles.spool import SPOOL, SpoolEvent, Status
from penstock.ports.clock import Clock
from penstock.workloads.spool.config import ServerConfig, Sync
from penstock.workloads.spool.disk.files import exists, make_usable, move, read_file
from penstock.workloads.spool.disk.job import NO_ATTEMPTS, Attempts, Meta
from penstock.workloads.spool.disk.peers import Claims
from penstock.workloads.spool.disk.workspace import Workspace

if TYPE_CHECKING:
    from penstock.workloads.spool.server.scanner import Waiting

log = logging.getLogger(__name__)


class ServerHealth:
    """Troubles that last, each under a name; told when they come and when they are over."""

    def __init__(self) -> None:
        self._troubles: dict[str, str] = {}

    @property
    def troubles(self) -> Mapping[str, str]:
        return dict(self._troubles)

    @property
    def is_well(self) -> bool:
        return not self._troubles

    def trouble(self, name: str, why: str) -> None:
        if name not in self._troubles:
            log.error("%s: %s", name, why)
        self._troubles[name] = why

    def over(self, name: str) -> None:
        if self._troubles.pop(name, None) is not None:
            log.warning("%s: goes on", name)


class EventKind(StrEnum):
    CLAIMED = "claimed"
    DONE = "done"
    FAILED = "failed"
    REQUEUED = "requeued"
    """It goes back to the queue: the server stops, or the engine died."""
    LET_GO = "let go"
    """Somebody else took its folder away."""


class JobEvent(Struct, frozen=True, kw_only=True):
    """One thing that happened to one job."""

    at: float
    what: EventKind
    job_id: str
    seconds: float = 0.0
    """Since it was claimed."""
    tokens: int = 0
    """Of the answer."""
    code: str = ""
    """Why it failed, for programs."""
    reason: str = ""
    """Why it failed or was given back, in a sentence."""


Tell = Callable[[JobEvent], None]


class Counts(Struct, kw_only=True):
    """What a server did since it started."""

    claimed: int = 0
    done: int = 0
    failed: int = 0
    requeued: int = 0
    let_go: int = 0
    tokens: int = 0

    def add(self, event: JobEvent) -> None:
        name = _COUNTER[event.what]
        setattr(self, name, getattr(self, name) + 1)
        self.tokens += event.tokens


_COUNTER = {kind: kind.name.lower() for kind in EventKind}


class Why(Enum):
    """Why a job is ended from outside."""

    STOP = "the server stops"
    CANCELLED = "cancelled"
    GONE = "its folder was moved or deleted"


class Running:
    """From its claim to its end. What is cancelled first says why."""

    def __init__(self, job_id: str, folder: str, folder_id: int, since: float) -> None:
        self.job_id, self.since = job_id, since
        self.folder = folder
        """In `processing`."""
        self.folder_id = folder_id
        """The inode of its folder: another folder under its name is another job."""
        self.why: Why | None = None
        self.reason = ""
        """What was said about a cancellation."""
        self.ended = False
        """Whether its folder has left `processing`."""
        self.task: asyncio.Task[None] | None = None
        self.meta: Meta | None = None
        """As it was read; None if it could not be."""
        self.model = ""
        """The model that it names, or the default one."""
        self.facts: dict[str, str] = {}
        """What is known of it for its metadata, however it ends."""
        self.suspect = False
        """Whether it was known to be one when it was claimed."""
        self.attempts = NO_ATTEMPTS
        """Those before this one."""
        self.lost: Attempts | None = None
        """With this one, once it is counted as lost."""

    def end(self, why: Why, reason: str = "") -> None:
        if self.why is None and self.task is not None and not self.task.done():
            self.why, self.reason = why, reason
            # Not before its first step: a task that never ran can't clean up.
            asyncio.get_running_loop().call_soon(self.task.cancel)


P = ParamSpec("P")
T = TypeVar("T")
_TURN = 0.002
"""Seconds after which a thread tells what it has done so far."""


class _Unstoppable(asyncio.Future[T]):
    """A task that is cancelled while it waits for this hears of it once this is done."""

    def cancel(self, msg: Any = None) -> bool:
        return False


class Threads:
    """A few threads, handed in to whoever reads and writes; with none, it is done at once.

    What waits is done by one thread in one go: many small pieces of work would otherwise spend
    most of their time with handing the interpreter from thread to thread.
    """

    def __init__(self, most: int) -> None:
        self._threads = ThreadPoolExecutor(most or 1, thread_name_prefix="spool")
        self._most, self._busy = most, 0
        self._waiting: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()

    async def do(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Its result. When cancelled it waits for the end first, so that what is being written
        is never touched by two."""
        return await self._done(partial(work, *args, **kwargs), insist=False)

    async def see_through(self, work: Callable[[], T]) -> T:
        """Its result, even if it was cancelled meanwhile; that is told only if it failed."""
        return await self._done(work, insist=True)

    async def _done(self, work: Callable[[], T], *, insist: bool) -> T:
        if not self._most:
            return work()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = _Unstoppable(loop=loop)
        self._waiting.append((future, work))
        self._start(loop)
        try:
            return await future
        except asyncio.CancelledError:
            if future.exception() is not None or not insist:
                raise
            return future.result()

    def close(self) -> None:
        self._threads.shutdown(wait=True)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._waiting and self._busy < self._most:
            self._threads.submit(self._work, loop)
            self._busy += 1

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread."""
        done: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []
        end = time.monotonic() + _TURN
        while not done or time.monotonic() < end:
            try:
                future, work = self._waiting.popleft()
            except IndexError:  # another thread was quicker
                break
            try:
                done.append((future, work(), None))
            except BaseException as error:
                done.append((future, None, error))
        loop.call_soon_threadsafe(self._tell, loop, done)

    def _tell(
        self,
        loop: asyncio.AbstractEventLoop,
        done: list[tuple[asyncio.Future[Any], Any, BaseException | None]],
    ) -> None:
        self._busy -= 1
        for future, result, error in done:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        self._start(loop)


class ServerParts(Struct, frozen=True, kw_only=True):
    """What the parts of one server share."""

    config: ServerConfig
    workspace: Workspace
    claims: Claims
    clock: Clock
    health: ServerHealth
    tell: Tell
    threads: Threads
    """For the files of jobs."""
    chores: Threads
    """For what may take long, as removing many jobs."""


Following = Callable[[], Awaitable["Waiting"]]
Process = Callable[[Running], Awaitable[None]]
_MAX_NOTE = 4096
_PAUSE = 1.0
"""Seconds until the next claim after the disk refused one."""


class Pool:
    """Claims by rename, without a flush: a claim that is lost makes the job an orphan, no more."""

    def __init__(self, parts: ServerParts, process: Process) -> None:
        self._workspace, self._claims, self._process = parts.workspace, parts.claims, process
        self._clock, self._health, self._tell = parts.clock, parts.health, parts.tell
        self._room = asyncio.Semaphore(parts.config.workers)
        self.notes = parts.workspace.private / "cancel"
        """Each file is named for a job that is to be cancelled, and says why."""
        self._put_off: set[str] = set()
        self.running: dict[str, Running] = {}

    async def run(self, following: Following) -> None:
        """Keep all workers busy with the jobs that `following` gives, until cancelled."""
        while True:
            await self._room.acquire()
            try:
                running = await self._next(following)
            except BaseException:
                self._room.release()
                raise
            self._start(running, self._room.release)
            if running.suspect:
                # Claimed beside it, jobs would only wait, and be lost with it.
                await self.empty()

    async def _next(self, following: Following) -> Running:
        while True:
            waiting = await following()
            if waiting.suspect:
                await self.empty()
            try:
                running = self.claim(waiting.job_id)
            except (OSError, StoreFailed) as error:
                self._health.trouble("claiming", str(error))
                await self._clock.sleep(_PAUSE)
                continue
            if running is not None:
                self._health.over("claiming")
                running.suspect = waiting.suspect
                return running

    def start(self, job_id: str) -> None:
        """Have it now, whether there is room or not: it is known to take no time."""
        if (running := self.claim(job_id)) is not None:
            self._start(running, lambda: None)

    def claim(self, job_id: str) -> Running | None:
        """None if it is not there any more, or can't be had now: the next scan finds it again."""
        if job_id in self.running or not self._claims.take(job_id):
            return None
        queued = self._workspace.name(Status.QUEUED, job_id)
        claimed = self._workspace.name(SPOOL.after(Status.QUEUED, SpoolEvent.CLAIM), job_id)
        try:
            _move(queued, claimed)
            folder_id = os.lstat(claimed).st_ino
        except FileNotFoundError:
            self._claims.drop(job_id)
            return None
        except FileExistsError:
            self._claims.drop(job_id)
            self._report(job_id, "another job with its id is in processing")
            return None
        except StoreFailed as error:
            self._claims.drop(job_id)
            if not isinstance(error.__cause__, PermissionError):
                raise
            self._report(job_id, str(error))
            return None
        return Running(job_id, claimed, folder_id, self._clock.monotonic())

    def _start(self, running: Running, over: Callable[[], None]) -> None:
        self.running[running.job_id] = running
        self._put_off.discard(running.job_id)
        running.task = asyncio.create_task(self._one(running, over))
        self._tell(JobEvent(at=self._clock.now(), what=EventKind.CLAIMED, job_id=running.job_id))
        if exists(f"{self.notes}/{running.job_id}"):  # a note that came before the claim
            self.cancel(running.job_id)

    async def _one(self, running: Running, over: Callable[[], None]) -> None:
        try:
            await self._process(running)
        except Exception:
            # It stays where it is, and ours; whoever starts next finds an orphan.
            log.exception("job %s could not be ended", running.job_id)
        finally:
            del self.running[running.job_id]
            over()

    def cancel(self, job_id: str) -> None:
        """A note about it has appeared."""
        running = self.running.get(job_id)
        if running is not None and not running.ended:
            reason = b""
            with suppress(OSError, PenstockError):
                reason = read_file(self.notes, job_id, _MAX_NOTE)
            running.end(Why.CANCELLED, reason.decode(errors="replace").strip())

    def look(self) -> None:
        """Find notes that were missed, and jobs whose folders were taken away."""
        with suppress(OSError):
            for name in os.listdir(self.notes):
                self.cancel(name)
        for running in list(self.running.values()):
            try:
                found = os.lstat(running.folder).st_ino
            except FileNotFoundError:
                found = 0
            if found != running.folder_id and not running.ended:
                running.end(Why.GONE)

    async def empty(self, patience: float | None = None) -> None:
        """Until no job runs; what is not over by then is left as it is, for others to find."""
        tasks = [running.task for running in self.running.values() if running.task]
        if not tasks:
            return
        _, left = await asyncio.wait(tasks, timeout=patience)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    def end_all(self, why: Why) -> None:
        for running in list(self.running.values()):
            running.end(why)

    def _report(self, job_id: str, why: str) -> None:
        if job_id not in self._put_off:
            self._put_off.add(job_id)
            log.warning("job %s can't be claimed: %s", job_id, why)


def _move(queued: str, claimed: str) -> None:
    try:
        move(queued, claimed, sync=Sync.NONE)
    except StoreFailed as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
        # A folder that may not be written to can't be moved: if it is ours, it may be from now on.
        make_usable(queued)
        move(queued, claimed, sync=Sync.NONE)
