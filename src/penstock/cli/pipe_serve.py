"""A node from its start to its end, as people see it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.cli.exits import Exit
from penstock.cli.journal import keep_journal
from penstock.cli.live import LiveScreen
from penstock.cli.pipe_banner import banner, facts_of
from penstock.cli.pipe_being import Being, made
from penstock.cli.pipe_news import news
from penstock.cli.pipe_places import NodePlace, kept
from penstock.cli.pipe_show import line, standing
from penstock.cli.place import Place
from penstock.cli.service import Stop, leave_at_once
from penstock.workloads.pipes.status import PipesView
from penstock.workloads.pipes.views import view_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.cli.pipe_children import Children
    from penstock.config import Settings
    from penstock.workloads.pipes.node import Node

log = logging.getLogger("penstock.cli")

_SETTLE = 0.05
"""Seconds in which changes that belong together come together."""
_LOOK = 60.0
_NET = "penstock.workloads.pipes.net"


async def serve(
    place: Place,
    settings: Settings,
    said: Mapping[str, Any],
    children: Children | None = None,
) -> int:
    """Until a signal ends it; `children` are nodes that live as long."""
    stop = Stop()
    stop.listen()
    with LiveScreen(line, json=said["json"]) as screen:
        # Only now, so that what is logged is drawn above the last line.
        keep_journal(verbose=said["verbose"])
        if not said["verbose"]:
            logging.getLogger(f"{_NET}.assigning").setLevel(logging.WARNING)
            logging.getLogger(f"{_NET}.membership").addFilter(_is_no_loss)
        screen.load(0.0, "starting")
        being = await made(place, settings, screen, no_http=said["no_http"])
        if children is not None:
            children.start()
        try:
            if await stop.first_of(being.start()):
                await _live(place, settings, being, screen, stop, children)
        finally:
            if not await stop.unless_urgent(_end(being, children)):
                leave_at_once("stopped at once; jobs that went over this node look for another")
    log.info("stopped")
    return Exit.OK


def _is_no_loss(record: logging.LogRecord) -> bool:
    """Losses are told as news, with what is missing then."""
    return not getattr(record, "is_loss", False)


async def _end(being: Being, children: Children | None) -> None:
    """The jobs that it has go over its children too."""
    await being.stop()
    if children is not None:
        await children.stop()


async def _live(
    place: Place,
    settings: Settings,
    being: Being,
    screen: LiveScreen,
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
        screen.stand(partial(_standing, node))
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
async def _watching(node: Node, screen: LiveScreen) -> AsyncIterator[None]:
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


def _standing(node: Node, seconds: float) -> RenderableType | None:
    own = next((one for one in _seen(node).nodes if one.node_id == node.node_id), None)
    return standing(own, seconds) if own is not None else None
