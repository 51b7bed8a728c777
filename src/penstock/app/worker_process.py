"""A worker in a process of its own, joined to an engine over a link.

`Membership`: several processes over one data folder. The process that holds the writer lock has the
engine. Another one connects to it, runs jobs as a worker of its own, and looks at the lock: when
it is free, because its holder ended or died, it starts the engine. Its own clients and its worker
do not notice: they reconnect to the same socket, as they do after any restart.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import msgspec

from penstock.adapters.files.start_log import FileStartLog
from penstock.adapters.link.address import Address
from penstock.adapters.link.blocking import Pulse
from penstock.adapters.link.client import Link
from penstock.adapters.link.proxy import RemoteBlobs, remote_api, remote_state
from penstock.adapters.link.secure import Security
from penstock.adapters.nats.tunnel import NatsPulse
from penstock.adapters.sqlite.database import WriterLock
from penstock.app.application import App, connect, engine_address, make_executors
from penstock.app.client import Client
from penstock.app.engine import Drain, Engine, abandon
from penstock.app.nats import NatsWorker
from penstock.app.portal import Portal
from penstock.app.remote import RemoteWorker, is_remote
from penstock.app.shards import address_of, bus_prefix, folder_of
from penstock.config import Settings
from penstock.core.errors import Misconfigured, NotRunning, PenstockError
from penstock.ports.bus import HANDSHAKE, AnyMessage, Farewell
from penstock.ports.clock import SystemClock
from penstock.ports.engine_api import EngineApi
from penstock.ports.executor import SCHEMA, Environment, Executor, is_needed
from penstock.worker.worker import Worker, WorkerOptions
from penstock.workloads.function.executor import FunctionExecutor

log = logging.getLogger(__name__)

_LAST_WORDS = 5.0
"""Seconds that a stopped worker waits for a lost engine, to send it the last results."""


Probe = Callable[[], Awaitable[None]]
"""Connects to an engine once; raises NotRunning."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0


class WorkerProcess:
    """One worker process: `run` until cancelled, then it drains."""

    def __init__(
        self,
        app: App,
        address: Address,
        settings: Settings,
        *,
        token: str = "",
        worker_id: str = "",
        pool: str = "default",
        labels: Mapping[str, str] | None = None,
        drain_timeout: float = 30.0,
        bind: bool = True,
        make: Callable[[App, Settings], Sequence[Executor]] = make_executors,
        remote: RemoteWorker | None = None,
        nats: NatsWorker | None = None,
    ) -> None:
        """`bind`: let the application's functions submit through this worker's connection.
        `remote`: how it gets to an engine on another machine; `nats`: how it gets there through a
        NATS server.
        `make` gives the executors, if they are not to be those of the settings alone."""
        self._make = make
        self._app, self._address, self._settings, self._token = app, address, settings, token
        self._worker: Worker | None = None
        self._made = asyncio.Event()
        self._bind, self._remote, self._nats = bind, remote, nats
        self.left_running = False
        """Whether it ended although a job still ran."""
        given = worker_id or (nats.worker_id if nats is not None else "")
        self.options = WorkerOptions(
            worker_id=given or f"{socket.gethostname()}-{os.getpid()}",
            pool=pool,
            slots=settings.concurrency,
            labels=labels or {},
            drain_timeout=drain_timeout,
            max_log_lines=settings.limits.max_log_lines,
        )

    @property
    def address(self) -> Address:
        """That of the engine."""
        return self._address

    def _last_word(self, link: int) -> tuple[str, AnyMessage]:
        session = self._worker.session if self._worker is not None else ""
        farewell = Farewell(self.options.worker_id, lost=True, link=link, session=session)
        return HANDSHAKE, farewell

    @cached_property
    def executors(self) -> list[Executor]:
        return list(filter(is_needed, self._make(self._app, self._settings)))

    async def welcomed(self) -> None:
        """Wait until the engine knows the worker, and what it serves."""
        await self._made.wait()
        assert self._worker is not None
        await self._worker.welcomed.wait()

    def hurry(self) -> None:
        """When it drains, ask what runs to end at once."""
        if self._worker is not None:
            self._worker.hurry()

    async def run(self) -> None:
        options, settings, executors = self.options, self._settings, self.executors
        if not executors:
            raise Misconfigured("the application has no jobs, so a worker has nothing to serve")
        security = None if self._remote is None else await self._remote.enter()
        # What its jobs ask for while the engine is away waits; their own time limits end it.
        link = Link(
            self._address,
            token=self._token,
            will=self._last_word,
            reconnect_timeout=None,
            security=security,
            dial=None if self._nats is None else self._nats.dial,
        )
        api = remote_api(link)
        max_size = max(settings.limits.max_input, settings.limits.max_result)
        blobs = RemoteBlobs(
            link,
            inline_limit=settings.storage.inline_limit,
            max_size=max_size,
            max_artifact=settings.limits.max_artifact,
        )
        # An engine behind a Unix socket is on this machine, and can read our start log.
        make_log = FileStartLog if self._address.path is not None else None
        clock, state = SystemClock(), remote_state(link)
        environment = Environment(options.worker_id, clock, blobs, api, state)
        worker = Worker(link, blobs, executors, clock, options, make_log, environment)
        self._worker = worker
        self._made.set()
        portal = Portal(asyncio.get_running_loop())
        if self._bind:
            self._app.bind(Client(api, portal, self._app.functions))
        interval = settings.timeouts.lease / 5
        pulse: Pulse | NatsPulse
        if self._nats is not None:
            pulse = self._nats.pulse(interval)
        else:
            pulse = Pulse(
                self._address,
                options.worker_id,
                token=self._token,
                interval=interval,
                security=security,
            )
        await link.connect()
        await self._compare_signatures(api)
        keeping = asyncio.create_task(self._keep(link, security))
        pulse.start()
        working = asyncio.create_task(worker.run())
        link.on_connect = lambda: worker.announce(link.number)
        drain = Drain()
        try:
            await asyncio.wait((working, keeping), return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():  # the engine does not let it in any more: others have its jobs
                worker.hurry()
                drain.give_up_after(settings.timeouts.kill_grace + _LAST_WORDS)
                keeping.result()
            await working
        finally:
            self.left_running = not await drain.end(working)
            with suppress(TimeoutError, PenstockError):
                async with asyncio.timeout(_LAST_WORDS):
                    await link.ready()  # else its last results would not leave
            await asyncio.to_thread(pulse.stop)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await link.close()
            if self._nats is not None:
                await self._nats.close()
            if self._bind:
                self._app.bind(None)

    async def _compare_signatures(self, api: EngineApi) -> None:
        """Warn of functions that take something else than those which the engine knows."""
        try:
            known = {view.topic: view.input_schema for view in await api.describe_topics()}
        except PenstockError:
            return
        executors: list[object] = [*self.executors]
        for executor in executors:
            if not isinstance(executor, FunctionExecutor):
                continue
            for name, fact in executor.facts().items():
                topic = name.removeprefix(SCHEMA)
                schema = known.get(topic)
                if schema is not None and msgspec.to_builtins(fact.get("input")) != schema:
                    log.warning(
                        "%s: the function of this worker takes other arguments than the one"
                        " that the engine knows; deploy the same code everywhere",
                        topic,
                    )

    async def _keep(self, link: Link, security: Security | None) -> None:
        remote = self._remote
        identity = None if remote is None else remote.identity
        if remote is None or identity is None or security is None:
            await link.keep()
            return
        renewing_link = remote.renewing_link(link, security)
        renewing = asyncio.create_task(identity.keep_valid(renewing_link, security))
        try:
            await link.keep()
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)


# -- several processes over one data folder ------------------------------------------

_LOOK = 0.2
"""Seconds between looks at the lock."""
_RETRY = 2.0
"""Seconds until a start of the engine that failed is tried again."""
_WELCOME = 5.0
"""Seconds that joining waits for the engine to know the worker."""


def worker_process(
    app: App,
    settings: Settings,
    where: str | None,
    data: str | None,
    token: str,
    *,
    by_bus: bool,
    join: str | None,
    worker_id: str,
    shard: int = 0,
    **options: Any,
) -> tuple[WorkerProcess, Probe]:
    """A worker of the engine that is meant, and what looks whether that is there: on this machine,
    on another one (`join` is a token to join it), or behind the NATS server of the settings."""
    if by_bus:
        settings = settings.changed(bus__prefix=bus_prefix(settings, shard))
        nats = NatsWorker(settings, worker_id, token)
        how = {"token": nats.token, "worker_id": worker_id, "nats": nats, **options}
        return WorkerProcess(app, nats.address, settings, **how), nats.probe
    if join or is_remote(where):
        remote = RemoteWorker(where, settings, worker_id, join, shard)
        how = {"worker_id": remote.worker_id, "remote": remote, **options}
        return WorkerProcess(app, remote.address, settings, **how), remote.probe
    if where:
        where = address_of(where, shard)
    else:
        data = str(folder_of(settings.data_dir, shard))
    address, secret = engine_address(where, data, token)
    how = {"token": secret, "worker_id": worker_id, **options}
    return WorkerProcess(app, address, settings, **how), partial(reach, where, data, token)


async def reach(address: str | None, data: str | None, token: str) -> None:
    """Connect once. Raises NotRunning."""
    async with connect(address, data=data, token=token):
        pass


async def wait_for_engine(probe: Probe, address: str) -> None:
    """Wait until an engine answers, saying so once."""
    pause = _FIRST_PAUSE
    while True:
        try:
            return await probe()
        except NotRunning as error:
            if pause == _FIRST_PAUSE:
                log.warning("waiting for an engine at %s: %s", address, error.__cause__ or error)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, _LONGEST_PAUSE)


class Membership:
    """This process's part in an engine that it shares with others."""

    def __init__(self, app: App, settings: Settings) -> None:
        self._settings = settings
        self._worker_process = WorkerProcess(
            app,
            Address(path=settings.socket),
            settings,
            worker_id=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}",
            drain_timeout=settings.timeouts.drain,
            bind=False,
        )
        self._engine: Engine | None = None
        self._working: asyncio.Task[None] | None = None
        self._standby: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._drain = Drain()

    @property
    def has_engine(self) -> bool:
        return self._engine is not None

    async def start(self) -> None:
        """Run jobs of the application, and stand by. Raises if the worker can't be started."""
        self._standby = asyncio.create_task(self._stand_by())
        if not self._worker_process.executors:
            return
        self._working = asyncio.create_task(self._worker_process.run())
        welcomed = asyncio.create_task(self._worker_process.welcomed())
        events = (welcomed, self._working)
        await asyncio.wait(events, timeout=_WELCOME, return_when=asyncio.FIRST_COMPLETED)
        welcomed.cancel()
        if self._working.done():
            await self.stop(0.0)
            self._working.result()

    async def _stand_by(self) -> None:
        """Start the engine whenever no other process runs it."""
        while True:
            await asyncio.sleep(_LOOK)
            try:
                lock = WriterLock(self._settings.lock_file)
            except PenstockError:
                continue
            try:
                await self._have_engine(lock)
            except Exception as error:  # whatever it is, this process stays a standby
                surprise = None if isinstance(error, PenstockError) else error
                folder = self._settings.data_dir
                log.error("the engine of %s can't go on here: %s", folder, error, exc_info=surprise)
                lock.close()  # another process may be luckier
                await asyncio.sleep(_RETRY)
            finally:
                lock.close()

    async def _have_engine(self, lock: WriterLock) -> None:
        """Run the engine until it fails, or this process leaves."""
        # Without a worker of its own: the one that this process has goes on with what it runs.
        engine = Engine(self._settings, lock=lock)
        await engine.start()
        log.info("took over the engine of %s", self._settings.data_dir)
        self._engine = engine
        try:
            await engine.wait()
        finally:
            self._engine = None
            await engine.stop()

    async def stop(self, patience: float | None) -> None:
        """End the worker as `Engine.stop` does, then leave the engine to the others."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        if patience is not None:
            self._worker_process.hurry()
            self._drain.give_up_after(patience)
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        try:
            if self._working is not None:
                # While it stands by, so that its results reach an engine if the others have left.
                await self._drain.end(self._working)
        finally:
            if self._standby is not None:
                self._standby.cancel()
                await asyncio.gather(self._standby, return_exceptions=True)
            abandon(self._worker_process.executors)
