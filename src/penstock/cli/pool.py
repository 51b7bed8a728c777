"""`penstock pool` and `penstock topic`: where jobs can run."""

from __future__ import annotations

import asyncio
import time

import click

from penstock.cli.engine import EngineRef
from penstock.cli.exits import Exit
from penstock.cli.formats import pairs, plural
from penstock.cli.groups import Commands
from penstock.cli.live import Spinner
from penstock.cli.output import (
    Form,
    Row,
    print_done,
    print_list,
    print_one,
    row_facts,
    styled,
    warn,
)
from penstock.ports.engine_api import EngineApi, PoolView

_LOOK = 0.25
"""Seconds between checks of a pool that is being drained."""


@click.group(cls=Commands)
def pool() -> None:
    """List, show, pause, resume and drain pools."""


@pool.command("list")
def list_pools(engine: EngineRef, form: Form) -> None:
    """List the pools."""
    found = engine.ask(lambda api: api.pools())
    print_list(form, found, _row, name=lambda one: one.name, empty="no pools")


def _row(one: PoolView) -> Row:
    return {
        "POOL": one.name,
        "STATUS": styled("paused" if one.paused else "active"),
        "WORKERS": one.workers,
        "HELD": one.held,
        "CAPACITY": "any" if one.capacity is None else one.capacity,
        "LABELS": pairs(one.labels),
        "TOPICS": ", ".join(one.topics),
    }


@pool.command()
def show(engine: EngineRef, name: str, form: Form) -> None:
    """Show a pool."""
    one = engine.ask(lambda api: api.pool(name))
    print_one(form, one, name, lambda: [f"pool {name}", row_facts(_row(one))])


@pool.command()
def pause(engine: EngineRef, name: str, json: bool) -> None:
    """Stop giving jobs to a pool's workers.

    Running jobs finish. The pool stays paused over a restart, until it is resumed.
    """
    view = engine.ask(lambda api: api.pause_pool(name))
    print_done(json, view, f"{name} paused; it holds {plural(view.held, 'job')}")


@pool.command()
def resume(engine: EngineRef, name: str, json: bool) -> None:
    """Resume giving jobs to a pool's workers."""
    view = engine.ask(lambda api: api.resume_pool(name))
    print_done(json, view, f"{name} resumed")


@pool.command()
def drain(engine: EngineRef, name: str, wait_timeout: float | None, json: bool) -> int:
    """Pause a pool and wait until its jobs have ended.

    Ctrl-C ends the waiting and leaves it paused.
    """

    async def drained(api: EngineApi) -> PoolView:
        end = None if wait_timeout is None else time.monotonic() + wait_timeout
        view = await api.pause_pool(name)
        with Spinner(f"{name} is paused") as spinner:
            while view.held and (end is None or time.monotonic() < end):
                spinner.say(f"{name} is paused and holds {plural(view.held, 'job')} …")
                await asyncio.sleep(_LOOK)
                view = await api.pool(name)
        return view

    try:
        view = engine.ask(drained)
    except KeyboardInterrupt:
        resuming = engine.command(f"pool resume {name}")
        warn(f"{name} stays paused", f"'{resuming}' resumes it")
        return Exit.INTERRUPTED
    held = f"still holds {plural(view.held, 'job')}" if view.held else "holds nothing"
    print_done(json, view, f"{name} is paused and {held}")
    return Exit.NOT_YET if view.held else Exit.OK


@click.group(cls=Commands)
def topic() -> None:
    """List the topics that workers serve."""


@topic.command("list")
def list_topics(engine: EngineRef, form: Form) -> None:
    """List the topics that workers serve now."""

    async def find(api: EngineApi) -> list[Row]:
        pools = await api.pools()
        return [
            {
                "topic": one,
                "pools": ", ".join(pool.name for pool in pools if one in pool.topics),
            }
            for one in await api.topics()
        ]

    print_list(
        form,
        engine.ask(find),
        lambda one: {"TOPIC": one["topic"], "POOLS": one["pools"]},
        name=lambda one: str(one["topic"]),
        empty="no topics: no worker runs; start one with 'penstock worker start --app MODULE:APP'",
    )
