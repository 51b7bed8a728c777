"""`penstock pipe status`: who holds which layers, and whether a model is whole."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import click
import msgspec

from penstock.cli.paper import console, emit, print_json
from penstock.cli.parameters import DURATION, as_json
from penstock.cli.pipe_options import check_key, joined, keyed
from penstock.cli.pipe_places import places
from penstock.cli.pipe_screen import Board
from penstock.cli.place import Place, api_at, placed, run
from penstock.core.errors import NotFound, NotRunning, PenstockError, Unavailable
from penstock.workloads.pipes.status import PipesView, status_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.config import Settings

Look = Callable[[], Awaitable[PipesView]]


@click.command()
@joined
@keyed
@click.option("--watch", is_flag=True, help="Look again and again; Ctrl-C ends it.")
@click.option("--interval", type=DURATION, default="1s", show_default=True, help="Between looks.")
@as_json
@placed
@click.pass_obj
def status(
    place: Place,
    join: tuple[str, ...],
    key: str | None,
    watch: bool,
    interval: float,
    json: bool,
) -> None:
    """Tell who holds which layers, and whether models are complete.

    It asks a node: one that --join names, or one that was started on this data folder; else the
    engine that runs. A bar shows a node's layers; below them is how many copies of each layer
    there are. With --json it prints what GET /v1/pipes gives.
    """
    if watch and (json or not sys.stdout.isatty()):
        raise click.UsageError("--watch draws on a terminal: without one, ask again and again")
    settings = place.settings(pipe_key=key)
    with contextlib.suppress(KeyboardInterrupt):
        run(_status(place, settings, join, max(0.1, interval) if watch else None, json))


async def _status(
    place: Place, settings: Settings, join: tuple[str, ...], interval: float | None, json: bool
) -> None:
    look, view = await _found(place, settings, join)
    if interval is not None:
        await _live(look, view, interval)
    elif json:
        print_json(msgspec.to_builtins(view))
    elif view.nodes:
        emit(Board(view))
    else:
        raise NotFound("there is no node", hint="start one with 'penstock pipe node'")


async def _found(place: Place, settings: Settings, join: tuple[str, ...]) -> tuple[Look, PipesView]:
    """Somebody who answers, with the first answer."""
    if place.connect:
        return await _engine(place)
    addresses = join or [one.address for one in places(settings.data_dir / "pipes")]
    reasons = []
    for address in addresses:
        look = _node(settings, address)
        try:
            return look, await look()
        except Unavailable as error:
            reasons.append(error.message)
    if join:
        raise Unavailable("; ".join(reasons), hint="is its key this one ('penstock pipe key')?")
    try:
        return await _engine(place)
    except NotRunning:
        raise NotRunning(
            f"no node and no engine of {settings.data_dir} answers",
            hint="name one with --join or --connect, or start one with 'penstock pipe node'",
        ) from None


def _node(settings: Settings, address: str) -> Look:
    from penstock.workloads.pipes.setup import network_key, observe

    check_key(settings)
    key = network_key(settings)

    async def look() -> PipesView:
        try:
            return await observe(address, key)
        except OSError as error:
            raise Unavailable(f"{address}: {error}") from error

    return look


async def _engine(place: Place) -> tuple[Look, PipesView]:
    async def look() -> PipesView:
        async with api_at(place) as api:
            return status_of(await api.workers())

    return look, await look()


async def _live(look: Look, view: PipesView, interval: float) -> None:
    from rich.live import Live

    with Live(_page(view, ""), console=console(), screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(interval)
            trouble = ""
            try:
                view = await look()
            except PenstockError as error:
                trouble = error.message
            live.update(_page(view, trouble), refresh=True)


def _page(view: PipesView, trouble: str) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    return Group(Board(view), Text(trouble, "bold red")) if trouble else Board(view)
