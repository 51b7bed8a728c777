"""`penstock top`: a live view of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec import Struct

from penstock.cli.fleet import STATUS
from penstock.cli.paper import Listing, console, emit, print_json, record, styled
from penstock.cli.parameters import DURATION, as_json
from penstock.cli.place import Place, api_at, placed, run
from penstock.cli.ps import listing_of, why_open
from penstock.cli.words import plural, short_id, span
from penstock.core.job import Job, chain_of
from penstock.lifecycles.canonical import HELD, TERMINAL, WAITING, JobState
from penstock.ports.engine_api import EngineApi, EngineStatus, WorkerView
from penstock.ports.store import JobQuery

if TYPE_CHECKING:
    from rich.console import RenderableType

_SHOWN = 8
"""Groups of waiting jobs, and running jobs."""
_WAITING = 50
"""The oldest waiting jobs, which are looked at."""
_WORKERS = 10


class Glance(Struct, frozen=True):
    """An engine at one moment."""

    at: float
    status: EngineStatus
    workers: list[WorkerView]
    running: Listing | None
    """The jobs that workers have had for longest."""
    waiting: list[tuple[Job, str]]
    """The oldest, with their reasons."""

    @property
    def accepted(self) -> int:
        return sum(self.status.tally.values())


@click.command()
@click.option("--interval", type=DURATION, default="1s", show_default=True, help="Between looks.")
@click.option("--once", is_flag=True, help="Look once; so it does into a pipe.")
@as_json
@placed
@click.pass_obj
def top(place: Place, interval: float, once: bool, json: bool) -> None:
    """Watch the engine: jobs, rates, workers.

    Ctrl-C ends it. With --json it prints one look.
    """
    with contextlib.suppress(KeyboardInterrupt):
        run(_top(place, max(0.1, interval), once or not sys.stdout.isatty(), json))


async def _top(place: Place, interval: float, once: bool, json: bool) -> None:
    async with api_at(place) as api:
        glance = await _look(api)
        if json:
            print_json(_as_json(glance))
        elif once:
            emit(_page(glance, None))
        else:
            await _live(api, glance, interval)


async def _live(api: EngineApi, glance: Glance, interval: float) -> None:
    from rich.live import Live

    with Live(_page(glance, None), console=console(), screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(interval)
            before, glance = glance, await _look(api)
            live.update(_page(glance, before), refresh=True)


async def _look(api: EngineApi) -> Glance:
    waits = JobQuery(states=tuple(WAITING), oldest_first=True, limit=_WAITING)
    runs = JobQuery(states=tuple(HELD), oldest_first=True, limit=_SHOWN)
    status, workers, waiting, running = await asyncio.gather(
        api.status(), api.workers(), api.find(waits), api.find(runs)
    )
    reasons = await asyncio.gather(*(why_open(api, job) for job in waiting))
    listing = await listing_of(api, running, runs, title="RUNNING") if running else None
    explained = list(zip(waiting, reasons, strict=True))
    return Glance(time.time(), status, workers, listing, explained)


def _as_json(glance: Glance) -> dict[str, Any]:
    return {
        "status": msgspec.to_builtins(glance.status),
        "workers": msgspec.to_builtins(glance.workers),
        "waiting": [{**record(job), "why": why} for job, why in glance.waiting],
    }


def _page(glance: Glance, before: Glance | None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_title(glance), Text(), _states(glance)]
    parts += [Text(), _rates(glance, before)]
    if glance.running is not None:
        parts += [Text(), glance.running]
    if glance.waiting:
        parts += [Text(), _waiting(glance)]
    if glance.workers:
        parts += [Text(), _workers(glance)]
    return Group(*parts)


def _title(glance: Glance) -> RenderableType:
    from rich.text import Text

    status = glance.status
    return Text.assemble(
        ("penstock", "bold"),
        f" {status.version}  {status.data_dir}  durability {status.durability.value}"
        f"  up {span(glance.at - status.started_at)}",
        no_wrap=True,
        overflow="ellipsis",
    )


def _states(glance: Glance) -> RenderableType:
    from rich.columns import Columns
    from rich.text import Text

    tally = glance.status.tally
    cells = [
        Text.assemble(styled(state), f" {tally.get(state, 0):,}")
        for state in JobState
        if tally.get(state) or state not in TERMINAL
    ]
    return Columns(cells, padding=(0, 3))


def _rates(glance: Glance, before: Glance | None) -> RenderableType:
    from rich.text import Text

    status = glance.status
    counts = f"waiting {status.waiting:,}   held {status.held:,}   ended {status.finished:,}"
    if status.retried:
        counts += f"   retried tries {status.retried:,}"
    if before is None:
        return Text(counts)
    elapsed = max(0.001, glance.at - before.at)
    taken_in = max(0, glance.accepted - before.accepted) / elapsed
    ended = max(0, status.finished - before.status.finished) / elapsed
    return Text(f"{counts}   in {taken_in:,.0f}/s   out {ended:,.0f}/s")


def _waiting(glance: Glance) -> RenderableType:
    """One line for those that wait for the same: how many, or the id of a single one."""
    listing = Listing(
        *("WAITING", "STATE", "TOPIC", "SINCE", "WHY"),
        flexible=("WAITING", "TOPIC", "WHY"),
        right=("SINCE",),
    )
    groups: dict[tuple[JobState, str, str], list[Job]] = {}
    for job, why in glance.waiting:
        groups.setdefault((job.state, job.request.topic, why), []).append(job)
    for (state, topic, why), jobs in list(groups.items())[:_SHOWN]:
        oldest = jobs[0]
        listing.add(
            short_id(chain_of(oldest.request)) if len(jobs) == 1 else plural(len(jobs), "job"),
            styled(state),
            topic,
            span(glance.at - oldest.accepted_at),
            why,
        )
    return listing


def _workers(glance: Glance) -> RenderableType:
    from rich.text import Text

    listing = Listing(
        *("WORKER", "STATUS", "POOL", "HELD", "SLOTS", "TOPICS"),
        flexible=("WORKER", "TOPICS"),
        right=("HELD", "SLOTS"),
    )
    for worker in sorted(glance.workers, key=lambda w: -w.held)[:_WORKERS]:
        listing.add(
            worker.worker_id,
            Text(worker.status, STATUS.get(worker.status, "")),
            worker.pool,
            str(worker.held),
            str(worker.slots),
            ", ".join(worker.topics),
        )
    return listing
