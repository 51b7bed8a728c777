"""Several processes over one data folder: one has the engine, the others join it and stand by.

The process that holds the writer lock has the engine. Another one connects to it, runs jobs as a
worker of its own, and looks at the lock: when the lock is free, because its holder ended or died,
it starts the engine. Its own clients and its worker do not notice: they reconnect to the same
socket, as they do after any restart.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket

from penstock.adapters.link.address import Address
from penstock.adapters.sqlite.database import WriterLock
from penstock.app.application import App
from penstock.app.engine import Engine
from penstock.app.worker_process import WorkerProcess
from penstock.config import Settings
from penstock.core.errors import PenstockError

log = logging.getLogger(__name__)

_LOOK = 0.2
"""Seconds between looks at the lock."""
_RETRY = 2.0
"""Seconds until a start of the engine that failed is tried again."""
_WELCOME = 5.0
"""Seconds that joining waits for the engine to know the worker."""


class Membership:
    """This process's part in an engine that it shares with others."""

    def __init__(self, app: App, settings: Settings) -> None:
        self._settings = settings
        self._worker_process = WorkerProcess(
            app,
            Address(path=settings.socket),
            settings,
            worker_id=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}",
            drain_timeout=settings.drain_timeout,
            bind=False,
        )
        self._engine: Engine | None = None
        self._working: asyncio.Task[None] | None = None
        self._standing_by: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._gave_up = asyncio.Event()
        """Set when jobs that still run are no longer waited for."""

    @property
    def has_engine(self) -> bool:
        return self._engine is not None

    async def start(self) -> None:
        """Run jobs of the application, and stand by. Raises if the worker can't be started."""
        self._standing_by = asyncio.create_task(self._stand_by())
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
        """Start the engine whenever nobody has it."""
        while True:
            await asyncio.sleep(_LOOK)
            try:
                lock = WriterLock(self._settings.lock_file)
            except PenstockError:
                continue
            try:
                await self._have_engine(lock)
            except PenstockError as error:
                log.error("the engine of %s can't go on here: %s", self._settings.data_dir, error)
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
            asyncio.get_running_loop().call_later(patience, self._gave_up.set)
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        try:
            if self._working is not None:
                await self._end_worker(self._working)
        finally:
            if self._standing_by is not None:
                self._standing_by.cancel()
                await asyncio.gather(self._standing_by, return_exceptions=True)
            self._worker_process.abandon()

    async def _end_worker(self, working: asyncio.Task[None]) -> None:
        """While it stands by, so that its results reach an engine if the others have left."""
        working.cancel()
        gave_up = asyncio.create_task(self._gave_up.wait())
        await asyncio.wait((working, gave_up), return_when=asyncio.FIRST_COMPLETED)
        gave_up.cancel()
        if not working.done():
            log.error("jobs still run that can't be ended; they are left to themselves")
