"""A node from its start to its end: alone, under an engine of its own, or as another's worker."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from penstock.app.pipes import pipe_config
from penstock.cli.exits import Exit
from penstock.cli.journal import keep_journal
from penstock.cli.pipe_banner import banner, facts_of
from penstock.cli.pipe_news import news
from penstock.cli.pipe_places import NodePlace, kept
from penstock.cli.pipe_show import Screen
from penstock.cli.place import Place
from penstock.cli.service import Stop, leave_at_once
from penstock.cli.worker import engine_there
from penstock.core.pipes import NodeView, PipesView
from penstock.workloads.pipes.views import view_of

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.cli.pipe_children import Children
    from penstock.config import Settings
    from penstock.ports.executor import Executor
    from penstock.workloads.pipes.config import LpConfig
    from penstock.workloads.pipes.executor import Host
    from penstock.workloads.pipes.node import Node

log = logging.getLogger("penstock.cli")

USUAL = "127.0.0.1:7470"
_SETTLE = 0.05
"""Seconds in which changes that belong together come together."""
_LOOK = 60.0
_NET = "penstock.workloads.pipes.net"


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


async def serve(
    place: Place,
    settings: Settings,
    said: Mapping[str, Any],
    children: Children | None = None,
) -> int:
    """Until a signal ends it; `children` are nodes that live as long."""
    stop = Stop()
    stop.listen()
    with Screen(json=said["json"]) as screen:
        # Only now, so that what is logged is drawn above the last line.
        keep_journal(verbose=said["verbose"])
        if not said["verbose"]:
            logging.getLogger(f"{_NET}.assigning").setLevel(logging.WARNING)
            logging.getLogger(f"{_NET}.membership").addFilter(_is_no_loss)
        screen.load(0.0, "starting")
        being = await _made(place, settings, screen, no_http=said["no_http"])
        if children is not None:
            children.start()
        try:
            if await _unless_asked(being.start(), stop):
                await _live(place, settings, being, screen, stop, children)
        finally:
            if not await stop.unless_urgent(_end(being, children)):
                leave_at_once("stopped at once; jobs that went over this node look for another")
    log.info("stopped")
    return Exit.OK


def _is_no_loss(record: logging.LogRecord) -> bool:
    """Losses are told as news, with what is missing then."""
    return " is lost: " not in str(record.msg)


async def _end(being: Being, children: Children | None) -> None:
    """The jobs that it has go over its children too."""
    await being.stop()
    if children is not None:
        await children.stop()


async def _live(
    place: Place,
    settings: Settings,
    being: Being,
    screen: Screen,
    stop: Stop,
    children: Children | None,
) -> None:
    node = being.node
    where = NodePlace(
        node_id=node.node_id, address=node.address, pid=os.getpid(), model=node.config.model
    )
    pids = children.pids if children is not None else {}
    text = banner(place, settings, being.url, node, pids)
    screen.say(text, what="here", **facts_of(node, being.url, pids))
    if children is not None:
        children.attach(node.mesh.join)
    with kept(settings.data_dir / "pipes", where):
        screen.stand(lambda: _own(node))
        async with _watching(node, screen):
            await stop.first_of(_first(being.wait(), children))


async def _first(waiting: Coroutine[Any, Any, None], children: Children | None) -> None:
    """Until one of them fails."""
    if children is None:
        return await waiting
    tasks = [asyncio.create_task(waiting), asyncio.create_task(children.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def _watching(node: Node, screen: Screen) -> AsyncIterator[None]:
    """Tell of every change in the network, as this node sees it."""
    reasons: dict[str, str] = {}
    node.mesh.on_lost(reasons.__setitem__)

    async def watch() -> None:
        before = PipesView(nodes=tuple(n for n in _seen(node).nodes if n.node_id == node.node_id))
        while True:
            after = _seen(node)
            for one in news(before, after, reasons):
                screen.tell(one)
            reasons.clear()
            before = after
            await node.changed(_LOOK)
            await asyncio.sleep(_SETTLE)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def _seen(node: Node) -> PipesView:
    return view_of(node.mesh.table.live())


def _own(node: Node) -> NodeView | None:
    return next((one for one in _seen(node).nodes if one.node_id == node.node_id), None)


async def _unless_asked(work: Coroutine[Any, Any, None], stop: Stop) -> bool:
    """Whether it ended before somebody asked to stop; then it is broken off."""
    working = asyncio.create_task(work)
    asked = asyncio.create_task(stop.asked.wait())
    await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if working.done():
        working.result()
        return True
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    return False


# -- what a node lives in -------------------------------------------------------------------


async def _made(place: Place, settings: Settings, screen: Screen, *, no_http: bool) -> Being:
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

    def __init__(self, config: LpConfig, screen: Screen) -> None:
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

    def __init__(self, screen: Screen) -> None:
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

    def __init__(self, settings: Settings, screen: Screen, *, no_http: bool) -> None:
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

    def __init__(self, place: Place, settings: Settings, screen: Screen) -> None:
        from penstock.app import App
        from penstock.app.application import engine_address
        from penstock.app.site import Site

        self._hosted = _Hosted(screen)
        address, token = engine_address(place.connect, place.data, place.secret)
        self._place, self._address = place, str(address)
        self._site = Site(
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
