"""A worker in a process of its own, joined to an engine over a link."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property

from penstock.adapters.files.start_log import FileStartLog
from penstock.adapters.link.address import Address
from penstock.adapters.link.blocking import Pulse
from penstock.adapters.link.client import Link
from penstock.adapters.link.proxy import RemoteBlobs, remote_api, remote_state
from penstock.app.application import App, make_executors
from penstock.app.client import Client
from penstock.app.portal import Portal
from penstock.config import Settings
from penstock.core.errors import Misconfigured, PenstockError
from penstock.ports.bus import HANDSHAKE, AnyMessage, Farewell
from penstock.ports.clock import SystemClock
from penstock.ports.executor import Environment, Executor, is_needed
from penstock.worker.worker import Worker, WorkerOptions

_LAST_WORDS = 5.0
"""Seconds that a stopped worker waits for a lost engine, to send it the last results."""


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
    ) -> None:
        """`bind`: let the application's functions submit through this worker's connection.
        `make` gives the executors, if they are not to be those of the settings alone."""
        self._make = make
        self._app, self._address, self._settings, self._token = app, address, settings, token
        self._worker: Worker | None = None
        self._made = asyncio.Event()
        self._bind = bind
        self.options = WorkerOptions(
            worker_id=worker_id or f"{socket.gethostname()}-{os.getpid()}",
            pool=pool,
            slots=settings.concurrency,
            labels=labels or {},
            drain_timeout=drain_timeout,
            max_log_lines=settings.max_log_lines,
        )

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

    def abandon(self) -> None:
        """Nobody waits any longer for jobs that still run."""
        for executor in self.executors:
            if (abandon := getattr(executor, "abandon", None)) is not None:
                abandon()

    async def run(self) -> None:
        options, settings, executors = self.options, self._settings, self.executors
        if not executors:
            raise Misconfigured("the application has no jobs, so a worker has nothing to serve")
        # What its jobs ask for while the engine is away waits; their own time limits end it.
        link = Link(self._address, token=self._token, will=self._last_word, reconnect_timeout=None)
        api = remote_api(link)
        max_size = max(settings.max_input, settings.max_result)
        blobs = RemoteBlobs(api, inline_limit=settings.inline_limit, max_size=max_size)
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
            with suppress(TimeoutError, PenstockError):
                async with asyncio.timeout(_LAST_WORDS):
                    await link.ready()  # else its last results would not leave
            await asyncio.to_thread(pulse.stop)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await link.close()
            if self._bind:
                self._app.bind(None)
