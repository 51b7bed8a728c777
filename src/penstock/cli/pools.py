"""`penstock pool`: pausing, resuming and draining pools."""

from __future__ import annotations

import asyncio
import sys
import time

import click
import msgspec

from penstock.cli.exits import Exit
from penstock.cli.fleet import print_pools
from penstock.cli.groups import Commands
from penstock.cli.paper import print_json
from penstock.cli.parameters import DURATION, as_json
from penstock.cli.place import Place, api_at, placed, run
from penstock.cli.terminal import echo, harmless
from penstock.cli.words import plural
from penstock.core.errors import NotFound
from penstock.ports.engine_api import EngineApi, PoolView

_LOOK = 0.25
"""Seconds between checks of a pool that is being drained."""


@click.group(cls=Commands)
def pool() -> None:
    """List, pause, resume and drain pools."""


@pool.command("list")
@as_json
@placed
@click.pass_obj
def list_pools(place: Place, json: bool) -> None:
    """List the pools."""
    print_pools(run(_list(place)), json)


async def _list(place: Place) -> list[PoolView]:
    async with api_at(place) as api:
        return await api.pools()


@pool.command()
@click.argument("name")
@as_json
@placed
@click.pass_obj
def pause(place: Place, name: str, json: bool) -> None:
    """Stop giving jobs to a pool's workers.

    What they have, they finish. It stays so over a restart, until it is resumed.
    """
    view = run(_pause(place, name))
    if json:
        print_json(msgspec.to_builtins(view))
    else:
        echo(f"{name} paused; it holds {plural(view.held, 'job')}")


async def _pause(place: Place, name: str) -> PoolView:
    async with api_at(place) as api:
        return await api.pause_pool(name)


@pool.command()
@click.argument("name")
@as_json
@placed
@click.pass_obj
def resume(place: Place, name: str, json: bool) -> None:
    """Resume giving jobs to a pool's workers."""
    view = run(_resume(place, name))
    print_json(msgspec.to_builtins(view)) if json else echo(f"{name} resumed")


async def _resume(place: Place, name: str) -> PoolView:
    async with api_at(place) as api:
        return await api.resume_pool(name)


@pool.command()
@click.argument("name")
@click.option("--timeout", type=DURATION, help="Maximum time to wait; the pool stays paused.")
@as_json
@placed
@click.pass_obj
def drain(place: Place, name: str, timeout: float | None, json: bool) -> int:
    """Pause a pool and wait until its jobs have ended.

    Ctrl-C ends the waiting and leaves it paused.
    """
    try:
        view = run(_drain(place, name, timeout))
    except KeyboardInterrupt:
        echo(f"\npenstock: {name} stays paused", err=True)
        echo(f"  'penstock {place.spelled()}pool resume {name}' lets it go on", err=True)
        return Exit.INTERRUPTED
    if json:
        print_json(msgspec.to_builtins(view))
    elif view.held:
        echo(f"{name} is paused and still holds {plural(view.held, 'job')}")
    else:
        echo(f"{name} is paused and holds nothing")
    return Exit.NOT_YET if view.held else Exit.OK


async def _drain(place: Place, name: str, timeout: float | None) -> PoolView:
    end = None if timeout is None else time.monotonic() + timeout
    async with api_at(place) as api:
        view, told = await api.pause_pool(name), -1
        while view.held and (end is None or time.monotonic() < end):
            if view.held != told:
                _progress(f"{name} is paused and holds {plural(view.held, 'job')} …")
                told = view.held
            await asyncio.sleep(_LOOK)
            view = await _look(api, name)
        _progress("")
        return view


async def _look(api: EngineApi, name: str) -> PoolView:
    for view in await api.pools():
        if view.name == name:
            return view
    raise NotFound(f"no pool {name!r}", hint="'penstock pool list' shows them")


def _progress(text: str) -> None:
    """A progress line that is overwritten."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{harmless(text)}", nl=False, err=True)  # noqa: TID251 (our own codes)
