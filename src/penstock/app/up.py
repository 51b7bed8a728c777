"""`penstock up`: an engine from its start to its end, or one that stands by."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from penstock.app.application import App, make_executors
from penstock.app.client import Client
from penstock.app.engine import Engine
from penstock.app.portal import Portal
from penstock.app.service import Stop, leave_at_once
from penstock.config import Settings
from penstock.core.errors import OwnedByAnother, StoreFailed, Unavailable

if TYPE_CHECKING:
    from penstock.app.standby import StandBy

log = logging.getLogger("penstock.cli")

_UNAVAILABLE = 8
"""The exit code of an engine that can't go on."""
_AGAIN = 1.0
"""Seconds between two tries to reach a database that was lost."""
OnStart = Callable[[Engine, list[str]], Awaitable[None]]
"""Called with each engine that has started, and the topics of its own worker."""


async def serve_engine(
    settings: Settings,
    app: App | None,
    *,
    no_worker: bool,
    any_port: bool,
    on_start: OnStart,
    on_standby: Callable[[StandBy], None],
) -> None:
    """Run an engine until a signal; where another one owns the database, stand by for it."""
    stop = Stop()
    stop.listen()
    standby: StandBy | None = None
    was_up = False
    try:
        while not stop.asked.is_set():
            executors = [] if no_worker else make_executors(app, settings)
            engine = Engine(
                settings,
                executors,
                any_port=any_port,
                patience=0.0 if settings.store else None,
                sockets=standby.sockets() if standby is not None else None,
            )
            if app is not None:
                portal = Portal(asyncio.get_running_loop())
                engine.on_failure = portal.fail
                engine.on_open = partial(_bind, app, engine, portal)
            try:
                await engine.start()
            except OwnedByAnother:
                if standby is None:
                    from penstock.app.standby import StandBy  # needs an extra

                    standby = StandBy(settings, any_port=any_port)
                    await standby.start()
                    on_standby(standby)
                await stop.first_of(standby.run())
            except StoreFailed as error:
                if not was_up:
                    raise
                log.warning("%s; trying again", error.message)
                await stop.first_of(asyncio.sleep(_AGAIN))
            else:
                was_up = True
                topics = sorted({topic for executor in executors for topic in executor.topics})
                await _run(engine, stop, on_start(engine, topics))
    finally:
        if standby is not None:
            await standby.close()
    log.info("stopped")


def _bind(app: App, engine: Engine, portal: Portal) -> None:
    app.bind(Client(engine.api, portal, app.functions))


async def _run(engine: Engine, stop: Stop, started: Awaitable[None]) -> None:
    """Until it is asked to stop, or another engine owns the database."""
    try:
        await started
        await stop.first_of(engine.wait())
    except Unavailable:
        if not engine.was_replaced:
            raise
    finally:
        if not await stop.unless_urgent(engine.stop()):
            leave_at_once("stopped at once; jobs that still ran are left to the next start")
        if engine.left_running:
            leave_at_once(str(engine.failure), _UNAVAILABLE)
