"""`penstock up`: an engine from its start to its end, or one that stands by."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.app.application import App, make_executors
from penstock.app.client import Client
from penstock.app.engine import Engine
from penstock.app.portal import Portal
from penstock.app.service import Stop, leave_at_once
from penstock.app.shards import Balance, settings_of, share_token
from penstock.config import Settings
from penstock.core.errors import (
    Misconfigured,
    OwnedByAnother,
    PenstockError,
    StoreFailed,
    Unavailable,
)
from penstock.core.shards import Shard

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
    count = await _shard_count(settings.store) if settings.store else 1
    if count > 1 and not no_worker:
        _check_no_jobs(app, settings)
        app, no_worker = None, True
    service = partial(
        ShardService,
        app=app,
        no_worker=no_worker,
        any_port=any_port,
        stop=stop,
        on_start=on_start,
        on_standby=on_standby,
    )
    if count == 1:
        await service(settings, Shard()).run()
    else:
        await _serve_shards(settings, [Shard(number, count) for number in range(count)], service)
    log.info("stopped")


async def _shard_count(url: str) -> int:
    from penstock.app.databases import shard_count  # needs an extra

    return await shard_count(url)


async def _serve_shards(
    settings: Settings, shards: Sequence[Shard], service: Callable[..., ShardService]
) -> None:
    """Own some of them, and stand by for the others."""
    from penstock.app.databases import migrate_database

    await migrate_database(settings.store)
    every = [settings_of(settings, shard) for shard in shards]
    balance = Balance(share_token(settings, every))
    balancing = asyncio.create_task(balance.run())
    try:
        async with asyncio.TaskGroup() as tasks:
            for shard, one in zip(shards, every, strict=True):
                tasks.create_task(service(one, shard, balance, settings.store).run())
    except* PenstockError as errors:
        raise errors.exceptions[0] from None
    finally:
        balancing.cancel()


def _check_no_jobs(app: App | None, settings: Settings) -> None:
    """A worker serves one shard; this process may own any of them. Raises Misconfigured."""
    if any(executor.topics for executor in make_executors(app, settings)):
        raise Misconfigured(
            "this database has several shards, so engines run no jobs themselves",
            hint="start them without --app, and a worker for each shard: 'penstock worker start'",
        )


class ShardService:
    """One shard in this process: its engine, or one that stands by for the owner."""

    def __init__(
        self,
        settings: Settings,
        shard: Shard,
        balance: Balance | None = None,
        home: str = "",
        *,
        app: App | None,
        no_worker: bool,
        any_port: bool,
        stop: Stop,
        on_start: OnStart,
        on_standby: Callable[[StandBy], None],
    ) -> None:
        """`balance` decides what to own, of several shards; `home` is the URL of shard 0."""
        self._settings, self._shard, self._balance = settings, shard, balance
        self._home = home if shard.number else ""
        self._app, self._no_worker, self._any_port = app, no_worker, any_port
        self._stop, self._on_start, self._on_standby = stop, on_start, on_standby
        self._standby: StandBy | None = None
        self._give_up = asyncio.Event()
        self._was_up = False

    async def run(self) -> None:
        """Until the process is asked to stop."""
        try:
            while not self._stop.asked.is_set():
                if self._balance is None:
                    await self._own()
                else:
                    await self._own_in_turn(self._balance)
        finally:
            if self._standby is not None:
                await self._standby.close()

    async def _own_in_turn(self, balance: Balance) -> None:
        """Stand by until this process is to own the shard, and own it until another one is to."""
        number, standby = self._shard.number, await self._stand_by()
        balance.standbys[number] = standby
        await self._stop.first_of(standby.run())
        if self._stop.asked.is_set():
            return
        self._give_up = balance.give_up[number] = asyncio.Event()
        try:
            await self._own()
        finally:
            del balance.give_up[number]
            balance.owned.discard(number)

    async def _own(self) -> None:
        """Own it for as long as that goes; where another engine owns it, stand by for that."""
        engine, topics = self._engine()
        try:
            await engine.start()
        except OwnedByAnother:
            standby = await self._stand_by()
            if self._balance is None:
                await self._stop.first_of(standby.run())
        except StoreFailed as error:
            if not self._was_up and self._balance is None:
                raise
            log.warning("%s; trying again", error.message)
            await self._stop.first_of(asyncio.sleep(_AGAIN))
        else:
            self._was_up = True
            await self._run(engine, self._on_start(engine, topics))

    async def _run(self, engine: Engine, started: Awaitable[None]) -> None:
        """Until it is asked to stop, or another engine owns or is to own the database."""
        stop = self._stop
        try:
            await started
            await stop.first_of(self._ended(engine))
        except Unavailable:
            if not engine.was_replaced:
                raise
        finally:
            if not await stop.unless_urgent(engine.stop()):
                leave_at_once("stopped at once; jobs that still ran are left to the next start")
            if engine.left_running:
                leave_at_once(str(engine.failure), _UNAVAILABLE)

    async def _ended(self, engine: Engine) -> None:
        """Wait until the engine has failed, or is to be given up."""
        waits = [asyncio.ensure_future(engine.wait()), asyncio.ensure_future(self._give_up.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[0].done():
                await waits[0]
        finally:
            for one in waits:
                one.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _engine(self) -> tuple[Engine, list[str]]:
        """With the topics of its own worker."""
        app, settings = self._app, self._settings
        executors = [] if self._no_worker else make_executors(app, settings)
        engine = Engine(
            settings,
            executors,
            any_port=self._any_port,
            patience=0.0 if settings.store else None,
            sockets=self._standby.sockets() if self._standby is not None else None,
            shard=self._shard,
            home=self._home,
            owner_url=None if self._balance is None else self._balance.owner_url,
        )
        if app is not None:
            portal = Portal(asyncio.get_running_loop())
            engine.on_failure = portal.fail
            engine.on_open = partial(_bind, app, engine, portal)
        return engine, sorted({topic for executor in executors for topic in executor.topics})

    async def _stand_by(self) -> StandBy:
        from penstock.app.standby import StandBy  # needs an extra

        if self._standby is None:
            shard, balance = self._shard, self._balance
            how: dict[str, Any] = {"any_port": self._any_port, "shard": shard, "home": self._home}
            if balance is not None:
                how["may_own"] = partial(balance.claim, shard.number)
                how["owner_url"] = balance.owner_url
            standby = StandBy(self._settings, **how)
            await standby.start()
            self._standby = standby
            if not standby.engines.is_free:
                self._on_standby(standby)
        return self._standby


def _bind(app: App, engine: Engine, portal: Portal) -> None:
    app.bind(Client(engine.api, portal, app.functions))
