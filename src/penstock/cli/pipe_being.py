"""What a node lives in: nothing, an engine of its own, or a worker of another's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from penstock.cli.live import LiveScreen
from penstock.cli.place import Place
from penstock.cli.worker import engine_there
from penstock.workloads.pipes.setup import pipe_config

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.config import Settings
    from penstock.ports.executor import Executor
    from penstock.workloads.pipes.config import LpConfig
    from penstock.workloads.pipes.executor import Host
    from penstock.workloads.pipes.node import Node

USUAL = "127.0.0.1:7470"


class Being(Protocol):
    """A node, whatever it lives in."""

    @property
    def url(self) -> str:
        """Where the HTTP API of its engine is, if it has one here."""

    @property
    def node(self) -> Node:
        """Once it was started."""

    async def start(self) -> None: ...

    async def wait(self) -> None:
        """Until it fails; raises why."""

    async def stop(self) -> None:
        """It drains first."""


async def made(place: Place, settings: Settings, screen: LiveScreen, *, no_http: bool) -> Being:
    """What can be wrong is looked for before anything takes long."""
    from penstock.workloads.pipes.weights.source import needs_engine

    needs_engine()
    config = pipe_config(settings)
    assert config is not None
    from penstock.workloads.pipes.wire.identity import Identity

    Identity.make(config.key, config.node_id or "node")
    if place.connect:
        return _Worker(place, settings, screen)
    if config.end_model:
        return _Engine(settings, screen, no_http=no_http)
    return _Alone(config, screen)


class _Alone:
    """A layer node: it needs no engine."""

    url = ""

    def __init__(self, config: LpConfig, screen: LiveScreen) -> None:
        from penstock.workloads.pipes.node import Node

        self.node: Node = Node(config)
        self._screen = screen

    async def start(self) -> None:
        await self.node.start(self._screen.load)

    async def wait(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def stop(self) -> None:
        await self.node.stop()


class _Hosted:
    """A node that an executor starts."""

    def __init__(self, screen: LiveScreen) -> None:
        self._screen = screen
        self._node: Node | None = None
        self.there = asyncio.Event()

    @property
    def node(self) -> Node:
        assert self._node is not None
        return self._node

    def executors(self, app: App | None, settings: Settings) -> list[Executor]:
        """Those that the settings make, with one for this node."""
        from penstock.app.application import make_executors
        from penstock.workloads.pipes.executor import PipesExecutor

        others = make_executors(app, replace(settings, pipe_model=""))
        own = PipesExecutor(pipe_config(settings), self._host)
        return [one for one in others if not isinstance(one, PipesExecutor)] + [own]

    def _host(self, config: LpConfig) -> Host:
        from penstock.workloads.pipes.hosting import NodeHost

        hosted, screen = self, self._screen

        class Shown(NodeHost):
            async def start(self, told: Callable[[float, str], None]) -> None:
                await super().start(screen.load)
                hosted._node = self.runner.node
                hosted.there.set()

        return Shown(config)


class _Engine:
    """An origin: an engine of its own, as of `penstock up`."""

    def __init__(self, settings: Settings, screen: LiveScreen, *, no_http: bool) -> None:
        from penstock.app.engine import Engine

        any_port = not (settings.http or no_http)
        if any_port:
            settings = replace(settings, http=USUAL)
        self._hosted = _Hosted(screen)
        executors: Sequence[Executor] = self._hosted.executors(None, settings)
        self._engine = Engine(settings, executors, any_port=any_port)
        self._started = False

    @property
    def url(self) -> str:
        return self._engine.url

    @property
    def node(self) -> Node:
        return self._hosted.node

    async def start(self) -> None:
        await self._engine.start()
        self._started = True

    async def wait(self) -> None:
        await self._engine.wait()

    async def stop(self) -> None:
        if self._started:
            await self._engine.stop()


class _Worker:
    """A worker of an engine that runs elsewhere."""

    url = ""

    def __init__(self, place: Place, settings: Settings, screen: LiveScreen) -> None:
        from penstock.app import App
        from penstock.app.application import engine_address
        from penstock.app.worker_process import WorkerProcess

        self._hosted = _Hosted(screen)
        address, token = engine_address(place.connect, place.data, place.secret)
        self._place, self._address = place, str(address)
        self._site = WorkerProcess(
            *(App(), address, settings),
            token=token,
            drain_timeout=settings.pipe_drain,
            make=self._hosted.executors,
        )
        self._working: asyncio.Task[None] | None = None

    @property
    def node(self) -> Node:
        return self._hosted.node

    async def start(self) -> None:
        await engine_there(self._place, self._address)
        self._working = asyncio.create_task(self._site.run())
        there = asyncio.create_task(self._hosted.there.wait())
        try:
            await asyncio.wait({self._working, there}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            there.cancel()
        if self._working.done():
            self._working.result()

    async def wait(self) -> None:
        assert self._working is not None
        await asyncio.shield(self._working)

    async def stop(self) -> None:
        if self._working is not None:
            self._working.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(self._working, return_exceptions=True)
