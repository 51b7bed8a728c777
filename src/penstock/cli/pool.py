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
from penstock.cli.nouns import Noun
from penstock.cli.output import (
    Row,
    print_done,
    styled,
    warn,
)
from penstock.ports.engine_api import EngineApi, PoolView

_LOOK = 0.25
"""Seconds between checks of a pool that is being drained."""


@click.group(cls=Commands)
def pool() -> None:
    """List, show, pause, resume and drain pools."""


def pool_row(one: PoolView, now: float) -> Row:
    return {
        "POOL": one.name,
        "STATUS": styled("paused" if one.paused else "active"),
        "WORKERS": one.workers,
        "HELD": one.held,
        "CAPACITY": "any" if one.capacity is None else one.capacity,
        "LABELS": pairs(one.labels),
        "TOPICS": ", ".join(one.topics),
    }


POOLS = Noun(pool, pool_row, lambda api: api.pools(), "no pools")
POOLS.list("List the pools.")
POOLS.show("Show a pool.", lambda api, name: api.pool(name))
POOLS.act(
    "pause",
    """Stop giving jobs to a pool's workers.

    Running jobs finish. The pool stays paused over a restart, until it is resumed.
    """,
    lambda api, name: api.pause_pool(name),
    lambda view: f"{view.name} paused; it holds {plural(view.held, 'job')}",
)
POOLS.act(
    "resume",
    "Resume giving jobs to a pool's workers.",
    lambda api, name: api.resume_pool(name),
    lambda view: f"{view.name} resumed",
)


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


async def _topics(api: EngineApi) -> list[dict[str, str]]:
    pools = await api.pools()
    return [
        {"topic": one, "pools": ", ".join(pool.name for pool in pools if one in pool.topics)}
        for one in await api.topics()
    ]


TOPICS = Noun(
    topic,
    lambda one, now: {"TOPIC": one["topic"], "POOLS": one["pools"]},
    _topics,
    "no topics: no worker runs; start one with 'penstock worker start --app MODULE:APP'",
)
TOPICS.list("List the topics that workers serve now.")
