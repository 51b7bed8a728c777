"""`penstock status` and `penstock top`: a summary of the engine, once or live."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from penstock.app.job_details import reasons
from penstock.cli.engine import EngineRef
from penstock.cli.exits import Exit
from penstock.cli.formats import plural, short_id, span, total
from penstock.cli.groups import command
from penstock.cli.job_list import job_row
from penstock.cli.live import redraw
from penstock.cli.options import options
from penstock.cli.output import (
    WIDE,
    Listing,
    Row,
    console,
    emit,
    facts,
    print_json,
    record,
    rich_text,
    styled,
)
from penstock.cli.worker import worker_row
from penstock.core.errors import NotRunning
from penstock.core.job import Job, chain_of
from penstock.lifecycles.canonical import HELD, TERMINAL, WAITING, JobState
from penstock.ports.engine_api import (
    EngineApi,
    EngineStatus,
    JobTotal,
    Timeline,
    WorkerView,
)
from penstock.ports.store import JobQuery

if TYPE_CHECKING:
    from rich.console import RenderableType

_SHOWN = 8
"""Groups of waiting jobs, and running jobs."""
_WAITING = 50
"""The oldest waiting jobs, which are looked at."""
_WORKERS = 10
_FAILURES = 5
_DEAD = JobQuery(dead=True)

# -- status ------------------------------------------------------------------------


@command()
async def status(engine: EngineRef, json: bool) -> int:
    """Show whether the engine runs, its jobs and workers, and what needs a person.

    The exit code is 8 if no engine runs.
    """
    where = engine.connect or str(engine.settings().data_dir)
    try:
        async with engine.api() as api:
            found, workers = await api.status(), await api.workers()
            dead = await api.count(_DEAD)
    except NotRunning:
        starting = engine.command("up --app MODULE:APP")
        if json:
            print_json({"running": False, "where": where})
        else:
            emit("engine  not running", facts([("data", where), ("start", starting)]))
        return Exit.UNAVAILABLE
    needs = list(_needs(engine, found, workers, dead))
    if json:
        view = {"running": True, "where": where, "engine": found, "workers": workers}
        print_json({**view, "dead": dead.count, "needs": needs})
        return Exit.OK
    ready = sum(worker.status == "ready" for worker in workers)
    emit(
        rich_text("engine  ", ("running", "green"), f"  {found.version}, process {found.pid}"),
        facts(
            [
                ("data", found.data_dir),
                ("up", span(time.time() - found.started_at)),
                ("durability", found.durability.value),
                ("rules", found.rules),
                ("workers", f"{len(workers)}: {ready} ready" if workers else "none"),
                ("pools", ", ".join(f"{name} paused" for name in found.paused_pools)),
            ]
        ),
        "",
        _states(found),
    )
    if needs:
        emit(*_attention(needs))
    return Exit.OK


def _attention(needs: list[str]) -> list[RenderableType]:
    return ["", rich_text(("needs attention", "bold yellow")), *(f"  {one}" for one in needs)]


def _needs(
    engine: EngineRef, found: EngineStatus, workers: list[WorkerView], dead: JobTotal
) -> Iterator[str]:
    """What waits for a person, with the command for each."""
    if count := found.awaiting_approval:
        listing = engine.command("ps --awaiting-approval")
        yield f"{plural(count, 'job')} awaiting approval: {listing}"
    if dead.count:
        yield f"{total(dead)} failed or timed out, not retried: {engine.command('ps --dead')}"
    if found.waiting and not workers:
        starting = engine.command("worker start --app MODULE:APP")
        yield f"{plural(found.waiting, 'job')} waiting, and no worker: {starting}"
    for name in found.paused_pools:
        yield f"pool {name} is paused: {engine.command(f'pool resume {name}')}"
    for topic, why in found.paused_topics.items():
        yield f"{topic} is paused: {why}"
    for worker in workers:
        if worker.status == "missing":
            yield f"worker {worker.worker_id} is missing for {span(worker.silent_for)}"
    if found.policy_problem:
        yield f"the current rule file was not accepted: {found.policy_problem}"


# -- top ---------------------------------------------------------------------------


class Snapshot(Struct, frozen=True):
    """An engine at one moment."""

    at: float
    status: EngineStatus
    workers: list[WorkerView]
    running: list[Job]
    """The jobs that workers have had for longest."""
    waiting: list[Job]
    """The oldest."""
    why: dict[str, str]
    """What those wait for or do, by id."""
    hour: Timeline
    dead: JobTotal

    @property
    def accepted(self) -> int:
        return sum(self.status.tally.values())


@command()
@options("--once  Print one snapshot; the default without a terminal.")
async def top(engine: EngineRef, api: EngineApi, interval: float, once: bool, json: bool) -> None:
    """Watch the engine: what needs a person, jobs, rates, failures, workers.

    Ctrl-C ends it. With --json it prints one snapshot.
    """
    snapshot: Snapshot | None = None

    async def page() -> RenderableType:
        nonlocal snapshot
        before, snapshot = snapshot, await _look(api)
        return _page(engine, snapshot, before)

    if json:
        print_json(_as_json(await _look(api)))
    elif once or not sys.stdout.isatty():
        emit(await page())
    else:
        await redraw(page, max(0.1, interval))


async def _look(api: EngineApi) -> Snapshot:
    status, workers, waiting, running, hour, dead = await asyncio.gather(
        api.status(),
        api.workers(),
        api.find(JobQuery(states=tuple(WAITING), oldest_first=True, limit=_WAITING)),
        api.find(JobQuery(states=tuple(HELD), oldest_first=True, limit=_SHOWN)),
        api.timeline(),
        api.count(_DEAD),
    )
    why = await reasons(api, waiting) | await reasons(api, running)
    return Snapshot(time.time(), status, workers, running, waiting, why, hour, dead)


def _as_json(snapshot: Snapshot) -> dict[str, Any]:
    waiting = [{**record(job), "why": snapshot.why[job.job_id]} for job in snapshot.waiting]
    view = {"status": snapshot.status, "workers": snapshot.workers, "waiting": waiting}
    return {**view, "hour": snapshot.hour.total, "failures": snapshot.hour.failures}


def _page(engine: EngineRef, snapshot: Snapshot, before: Snapshot | None) -> RenderableType:
    from rich.console import Group

    status = snapshot.status
    title = rich_text(
        ("penstock", "bold"),
        f" {status.version}  {status.data_dir}  durability {status.durability.value}"
        f"  up {span(snapshot.at - status.started_at)}",
        cut=True,
    )
    parts: list[RenderableType] = [title, "", _states(status)]
    parts += ["", _rates(snapshot, before), _hour(snapshot.hour)]
    if needs := [*_needs(engine, status, snapshot.workers, snapshot.dead)]:
        parts += _attention(needs)
    if failures := snapshot.hour.failures[:_FAILURES]:
        rows: list[Row] = [
            {"FAILED": one.count, "TOPIC": one.topic, "ERROR": one.error_code} for one in failures
        ]
        parts += ["", Listing(rows)]
    if running := snapshot.running:
        row = partial(job_row, why=snapshot.why, now=snapshot.at, title="RUNNING")
        parts += ["", Listing(list(map(row, running)), wide=console().width >= WIDE)]
    if snapshot.waiting:
        parts += ["", _waiting(snapshot)]
    if snapshot.workers:
        busiest = sorted(snapshot.workers, key=lambda worker: -worker.held)[:_WORKERS]
        shown = ("WORKER", "STATUS", "POOL", "HELD", "SLOTS", "TOPICS")
        found = [worker_row(worker, snapshot.at) for worker in busiest]
        parts += ["", Listing([{name: row[name] for name in shown} for row in found])]
    return Group(*parts)


def _states(status: EngineStatus) -> RenderableType:
    from rich.columns import Columns

    tally = status.tally
    cells = [
        rich_text(styled(state), f" {tally.get(state, 0):,}")
        for state in JobState
        if tally.get(state) or state not in TERMINAL
    ]
    return Columns(cells, padding=(0, 3))


def _rates(snapshot: Snapshot, before: Snapshot | None) -> str:
    status = snapshot.status
    counts = f"waiting {status.waiting:,}   held {status.held:,}   ended {status.finished:,}"
    if status.retried:
        counts += f"   retried tries {status.retried:,}"
    if before is None:
        return counts
    elapsed = max(0.001, snapshot.at - before.at)
    taken_in = max(0, snapshot.accepted - before.accepted) / elapsed
    ended = max(0, status.finished - before.status.finished) / elapsed
    return f"{counts}   in {taken_in:,.0f}/s   out {ended:,.0f}/s"


def _hour(hour: Timeline) -> str:
    total, ended = hour.total, sum(hour.total.ended.values())
    said = f"last hour: ended {ended:,} ({ended / len(hour.points):,.1f} a minute)"
    if ended:
        said += f"   succeeded {total.ended.get(JobState.SUCCEEDED, 0) / ended:.0%}"
    if total.wait_p50 is not None and total.wait_p99 is not None:
        said += f"   wait p50 {span(total.wait_p50)}, p99 {span(total.wait_p99)}"
    return said


def _waiting(snapshot: Snapshot) -> RenderableType:
    """One line for those that wait for the same: how many, or the id of a single one."""
    groups: dict[tuple[JobState, str, str], list[Job]] = {}
    for job in snapshot.waiting:
        why = snapshot.why[job.job_id]
        groups.setdefault((job.state, job.request.topic, why), []).append(job)
    rows: list[Row] = []
    for (state, topic, why), jobs in list(groups.items())[:_SHOWN]:
        one, count = jobs[0], len(jobs)
        rows.append(
            {
                "WAITING": short_id(chain_of(one.request)) if count == 1 else plural(count, "job"),
                "STATE": styled(state),
                "TOPIC": topic,
                "SINCE": span(snapshot.at - one.accepted_at),
                "WHY": why,
            }
        )
    return Listing(rows)
