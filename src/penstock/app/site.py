"""A worker in a process of its own, joined to an engine over a link."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from penstock.adapters.files.starts import FileStartBook
from penstock.adapters.link.address import Address
from penstock.adapters.link.blobs import RemoteBlobs
from penstock.adapters.link.client import Link
from penstock.adapters.link.desk import RemoteDesk
from penstock.adapters.link.pipelines import RemotePipelineStore
from penstock.adapters.link.pulse import Pulse
from penstock.app.application import App, make_executors
from penstock.app.client import Client
from penstock.app.portal import Portal
from penstock.config import Settings
from penstock.core.errors import Misconfigured
from penstock.ports.bus import HANDSHAKE, AnyMessage, Farewell
from penstock.ports.clock import SystemClock
from penstock.ports.executor import Executor, World, is_needed
from penstock.worker.worker import Worker, WorkerOptions


class Site:
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
        make: Callable[[App, Settings], Sequence[Executor]] = make_executors,
    ) -> None:
        """`make` gives the executors, if they are not to be those of the settings alone."""
        self._make = make
        self._app, self._address, self._settings, self._token = app, address, settings, token
        self._worker: Worker | None = None
        self.options = WorkerOptions(
            worker_id=worker_id or f"{socket.gethostname()}-{os.getpid()}",
            pool=pool,
            slots=settings.concurrency,
            labels=labels or {},
            drain_timeout=drain_timeout,
        )

    def _last_word(self, link: int) -> tuple[str, AnyMessage]:
        session = self._worker.session if self._worker is not None else ""
        farewell = Farewell(self.options.worker_id, lost=True, link=link, session=session)
        return HANDSHAKE, farewell

    async def run(self) -> None:
        options, settings = self.options, self._settings
        executors = list(filter(is_needed, self._make(self._app, settings)))
        if not executors:
            raise Misconfigured("the application has no jobs, so a worker has nothing to serve")
        link = Link(self._address, token=self._token, will=self._last_word)
        blobs = RemoteBlobs(link, inline_limit=settings.inline_limit, max_size=settings.max_result)
        # An engine behind a Unix socket is on this machine, and can read our book.
        make_book = FileStartBook if self._address.path is not None else None
        clock, desk = SystemClock(), RemoteDesk(link)
        world = World(options.worker_id, clock, blobs, desk, RemotePipelineStore(link))
        worker = Worker(link, blobs, executors, clock, options, make_book, world)
        self._worker = worker
        portal = Portal(asyncio.get_running_loop())
        self._app.bind(Client(desk, portal, time.time, self._app.functions))
        pulse = Pulse(
            self._address, options.worker_id, token=self._token, interval=settings.lease / 5
        )
        await link.connect()
        keeping = asyncio.create_task(link.keep())
        pulse.start()
        working = asyncio.create_task(worker.run())
        link.on_connect = lambda: worker.announce(link.number)
        try:
            await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await asyncio.to_thread(pulse.stop)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await link.close()
            self._app.bind(None)
