"""The jobs that a server has: attempts, events, cancellation, health, and threads for files."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum, StrEnum
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from msgspec import Struct

from penstock.core.errors import PenstockError
from penstock.ports.clock import Clock
from penstock.workloads.spool.config import ServerConfig, Sync
from penstock.workloads.spool.disk.files import (
    OpenFolder,
    Unfit,
    read_file,
    read_optional,
    replace_file,
)
from penstock.workloads.spool.disk.meta import Meta
from penstock.workloads.spool.disk.peers import Claims
from penstock.workloads.spool.disk.workspace import Workspace

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


FILE = "attempts.txt"
_MOST = 1 << 20


class Loss(StrEnum):
    """Why an attempt came to nothing."""

    CRASHED = "crashed the engine"
    LOST = "lost its server"


class Attempts(Struct, frozen=True):
    """What was tried before."""

    crashed: int = 0
    lost: int = 0

    @property
    def count(self) -> int:
        return self.crashed + self.lost

    @property
    def is_suspect(self) -> bool:
        """Whether it is to run alone, so that what it may break is nobody else's."""
        return self.crashed > 0 or self.lost > 1

    @property
    def reason(self) -> str:
        """Why it is not tried again, as a sentence's end."""
        if not self.lost:
            return f"crashed the engine {_times(self.crashed)}"
        if not self.crashed:
            return f"lost its server {_times(self.lost)}"
        return f"crashed the engine {_times(self.crashed)} and lost its server {_times(self.lost)}"


_NO_ATTEMPTS = Attempts()


def read_attempts(folder: Path | str | OpenFolder) -> Attempts:
    """What its file tells; one that can't be read is no file."""
    try:
        data = read_optional(folder, FILE, _MOST)
    except (OSError, Unfit):
        data = None
    if data is None:
        return _NO_ATTEMPTS
    lines = data.decode(errors="replace").splitlines()
    crashed = sum(line == Loss.CRASHED for line in lines)
    return Attempts(crashed, len(lines) - crashed)


def count_attempt(folder: Path, loss: Loss, sync: Sync) -> Attempts:
    """One more, durably; returns all so far."""
    before = read_attempts(folder)
    crashed, lost = before.crashed, before.lost
    after = Attempts(crashed + (loss is Loss.CRASHED), lost + (loss is Loss.LOST))
    lines = [Loss.CRASHED] * after.crashed + [Loss.LOST] * after.lost
    replace_file(folder, FILE, ("\n".join(lines) + "\n").encode(), sync)
    return after


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


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
        self.attempts = _NO_ATTEMPTS
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
        if not self._most:
            return work(*args, **kwargs)
        future = self._begin(partial(work, *args, **kwargs))
        try:
            return await future
        except asyncio.CancelledError:
            future.exception()  # whoever cancelled does not want to know
            raise

    async def see_through(self, work: Callable[[], T]) -> T:
        """Its result, even if it was cancelled meanwhile; that is told only if it failed."""
        if not self._most:
            return work()
        future = self._begin(work)
        try:
            return await future
        except asyncio.CancelledError:
            if future.exception() is not None:
                raise
            return future.result()

    def close(self) -> None:
        self._threads.shutdown(wait=True)

    def _begin(self, work: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = _Unstoppable(loop=loop)
        self._waiting.append((future, work))
        self._start(loop)
        return future

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


NOTES = "cancel"
_MAX_NOTE = 4096


class CancelNotes:
    """Notes are small and few; they are read where they are found."""

    def __init__(self, workspace: Workspace, running: dict[str, Running]) -> None:
        self.folder = workspace.private / NOTES
        self._notes = str(self.folder)
        self._running = running

    def came(self, name: str) -> None:
        """A note has appeared."""
        running = self._running.get(name)
        if running is not None and not running.ended:
            running.end(Why.CANCELLED, self._reason(name))

    def look(self) -> None:
        """All notes, in case one was missed."""
        with suppress(OSError):
            for name in os.listdir(self.folder):
                self.came(name)

    def check(self, job_id: str) -> None:
        """The note may have been there before the job was claimed."""
        if os.path.lexists(f"{self._notes}/{job_id}"):
            self.came(job_id)

    def over(self, job_id: str) -> None:
        with suppress(OSError):
            os.unlink(self.folder / job_id)

    def _reason(self, name: str) -> str:
        try:
            return read_file(self.folder, name, _MAX_NOTE).decode(errors="replace").strip()
        except (OSError, PenstockError):
            return ""


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
