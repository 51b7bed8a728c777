"""One server on one workspace."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from penstock.core.errors import PenstockError
from penstock.lifecycles.spool import SPOOL, Status
from penstock.ports.clock import Clock, SystemClock
from penstock.workloads.llm.health import EngineHealth
from penstock.workloads.llm.runner import Loading, Runner
from penstock.workloads.spool.client.changes import clean
from penstock.workloads.spool.config import ServerConfig, Sync
from penstock.workloads.spool.disk.peers import Claims, Peers, remove_pid, write_pid
from penstock.workloads.spool.disk.watching import FolderWatch
from penstock.workloads.spool.disk.workspace import Workspace
from penstock.workloads.spool.server.pool import (
    Counts,
    JobEvent,
    Pool,
    ServerHealth,
    ServerParts,
    Tell,
    Threads,
    Why,
)
from penstock.workloads.spool.server.processor import Processor
from penstock.workloads.spool.server.recovery import Recovery
from penstock.workloads.spool.server.scanner import Scanner, Waiting

log = logging.getLogger(__name__)


_TICK = 0.25
"""Seconds between two looks for passed deadlines."""
_CLEAN = 60.0
_TOUCHES = 10
"""Signs of life in the time of a lease."""
_THREADS = 16
_LAST = 5.0
"""Seconds that giving jobs back may take when the server leaves."""


class Server:
    """Runs the jobs of a workspace, from `start` to `stop`; both once. Several may share one.

    The Runner is its caller's to close.
    """

    def __init__(self, config: ServerConfig, runner: Runner, clock: Clock | None = None) -> None:
        self.config = config
        self.counts = Counts()
        """What it did since it started."""
        self.on_event: Tell | None = None
        """Told of each thing that happens to a job."""
        self._runner, self._health = runner, ServerHealth()
        runner.health.listeners.append(self._engine_changed)
        workspace = self._workspace = Workspace(config.workspace, config.sync)
        # Threads wait for flushes side by side. What is not flushed takes no longer than handing it
        # to a thread.
        flushes = config.sync is Sync.FULL
        parts = ServerParts(
            config=config,
            workspace=workspace,
            claims=Claims(workspace.private),
            clock=clock or SystemClock(),
            health=self._health,
            tell=self._tell,
            threads=Threads(min(_THREADS, config.workers + 2) if flushes else 0),
            chores=Threads(2),
        )
        self._threads, self._chores, self._claims = parts.threads, parts.chores, parts.claims
        self._clock = parts.clock
        self._processor = Processor(parts, runner)
        self._pool = Pool(parts, self._processor.process)
        self._scanner = Scanner(parts)
        peers = Peers(workspace.private, config.lease, parts.clock)
        self._recovery = Recovery(workspace, peers, config.attempts, parts.clock)
        self._duties: list[asyncio.Task[None]] = []
        """What goes on until the last job has left."""
        self._finding: list[asyncio.Task[None]] = []
        """What brings new jobs."""
        self._watch: FolderWatch | None = None
        self._at_once = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._over: asyncio.Future[None] | None = None

    # -- from outside ------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether new jobs are taken."""
        return bool(self._finding) and self._stopping is None

    @property
    def running(self) -> list[str]:
        """The jobs that it has now."""
        return list(self._pool.running)

    @property
    def queued(self) -> int:
        """How many queued jobs it knows of."""
        return len(self._scanner.queue)

    @property
    def health(self) -> ServerHealth:
        """What keeps it from its work, as a disk without room or an engine out of memory."""
        return self._health

    async def start(self, on_progress: Loading | None = None) -> None:
        """Loads the model, recovers orphans, and begins. Misconfigured or LlmFailure if it
        can't; then nothing of it is left. `on_progress` hears how far the model is."""
        try:
            await self._threads.do(self._workspace.create)
            facts = await self._runner.load(on_progress=on_progress)
            self._processor.default_model = facts.name
            await self._threads.do(self._claims.enter)
            await self._threads.do(write_pid, self._workspace.path)
        except BaseException:
            self._close()
            raise
        self._over = asyncio.get_running_loop().create_future()
        self._listen()
        every = self._every
        self._duties = [
            every(self.config.lease / _TOUCHES, "sign of life", self._give_sign),
            every(self.config.scan, "recovery", self._look),
        ]
        try:
            await self._attempt("recovery", self._look)
        except BaseException:
            await self.stop(at_once=True)
            raise
        self._finding = [
            self._own(self._scanner.run()),
            self._own(self._pool.run(self._following)),
            every(_TICK, "deadlines", self._expire),
            every(self.config.scan, "pid file", self._keep_pid),
            every(_CLEAN, "upkeep", self._clean),
        ]

    async def wait(self) -> None:
        """Until it has stopped; raises what broke it, if something did."""
        if self._over is not None:
            await asyncio.shield(self._over)

    async def stop(self, *, at_once: bool = False) -> None:
        """No new job is claimed; running ones have `drain` seconds, then they are queued again.

        `at_once` queues them again now, and may be asked for while a stop is under way.
        """
        if at_once:
            self._at_once.set()
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    # -- duties ------------------------------------------------------------------------

    def _every(
        self, seconds: float, name: str, duty: Callable[[], Awaitable[object]]
    ) -> asyncio.Task[None]:
        async def repeat() -> None:
            while True:
                well = await self._attempt(name, duty)
                await self._clock.sleep(seconds if well else min(seconds, self.config.scan))

        return self._own(repeat())

    async def _attempt(self, name: str, duty: Callable[[], Awaitable[object]]) -> bool:
        """Whether it was done. A disk that refuses is a trouble, and no reason to stop."""
        try:
            await duty()
        except (OSError, PenstockError) as error:
            self._health.trouble(name, str(error))
            return False
        self._health.over(name)
        return True

    async def _give_sign(self) -> None:
        """Tell other machines that it is alive."""
        if not await self._chores.do(self._claims.touch):
            log.error("this server was taken for dead; it goes on under a new claim")
            await self._chores.do(self._claims.enter)

    async def _look(self) -> None:
        """At the jobs in `processing`."""
        self._pool.look()
        await self._chores.do(self._recovery.look)

    async def _keep_pid(self) -> None:
        """Write the pid file again when an original server that left took it along."""
        await self._chores.do(write_pid, self._workspace.path, missing=True)

    async def _clean(self) -> None:
        """Remove jobs that are kept no longer. Two servers that do it at once don't disturb each
        other."""
        limits = (self.config.keep_seconds or None, self.config.keep_jobs or None)
        await self._chores.do(clean, self._workspace, *limits, clock=self._clock)

    async def _expire(self) -> None:
        """Have queued jobs fail whose deadline is over."""
        for job_id in self._scanner.queue.late(self._clock.now()):
            self._pool.start(job_id)

    # ----------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._watch = FolderWatch(self._scanner.look)
        self._watch.add(self._workspace.folder(Status.QUEUED), self._scanner.came)
        self._watch.add(self._pool.notes, self._pool.cancel)
        for ended in SPOOL.final:
            self._watch.add(self._workspace.folder(ended), self._scanner.release)

    async def _following(self) -> Waiting:
        """The next job whose model can be asked; the others are not even claimed."""
        while True:
            await self._runner.health.gate.opened()
            waiting = await self._scanner.next()
            model = waiting.model or self._processor.default_model
            if not self._runner.health.of(model).is_ill:
                return waiting
            self._scanner.queue.put(waiting, blocked_by=model)

    def _engine_changed(self, model: str, health: EngineHealth) -> None:
        if health.is_ill:
            self._health.trouble(f"model {model}", str(health))
        else:
            self._health.over(f"model {model}")
            self._scanner.release(model)

    def _tell(self, event: JobEvent) -> None:
        self.counts.add(event)
        if self.on_event is not None:
            try:
                self.on_event(event)
            except Exception:
                log.exception("who watches the server has failed")

    async def _stop(self) -> None:
        await _ended(self._finding)
        with suppress(OSError):
            await self._threads.do(remove_pid, self._workspace.path)
        if not self._at_once.is_set() and self._pool.running:
            await self._drained()
        self._pool.end_all(Why.STOP)
        await self._pool.empty(_LAST)
        await _ended(self._duties)
        self._close()
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    async def _drained(self) -> None:
        hurry = asyncio.ensure_future(self._at_once.wait())
        empty = asyncio.ensure_future(self._pool.empty())
        await asyncio.wait(
            (hurry, empty), timeout=self.config.drain, return_when=asyncio.FIRST_COMPLETED
        )
        await _ended([hurry, empty])

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._runner.health.listeners.remove(self._engine_changed)
        self._claims.leave()
        self._threads.close()
        self._chores.close()

    def _own(self, duty: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(duty)
        task.add_done_callback(self._look_at)
        return task

    def _look_at(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("the server can't go on", exc_info=error)
            if self._over is not None and not self._over.done():
                self._over.set_exception(error)


async def _ended(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
